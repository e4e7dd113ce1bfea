"""Residency: the compute unit of every op, predicted by rules before a Mac sees the program.

Rules are data, each with a predicate. A rule predicts from public evidence; a Mac's measurement
wins over it.
"""
