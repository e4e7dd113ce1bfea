"""Exports: bundles in the form of other runtimes."""
