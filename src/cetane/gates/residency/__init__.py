"""Residency: the compute unit of every op, predicted by rules before a Mac sees the program.

Each rule is data with a predicate. It predicts from public evidence; a Mac's measurement wins.
"""
