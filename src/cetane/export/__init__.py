"""Bundles in the form of other runtimes."""
