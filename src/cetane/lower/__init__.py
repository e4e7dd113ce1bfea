"""Lowering: a function of torch becomes a program of MIL, in a deterministic package."""
