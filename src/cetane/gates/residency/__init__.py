"""Where the ops of a program will run, before a Mac sees it: rules as data, one predicate each.

What a rule says is a prediction from public evidence; what a Mac measured wins over it.
"""
