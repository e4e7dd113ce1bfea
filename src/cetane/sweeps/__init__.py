"""Sweeps: many compressions of one model, judged on a text without building any."""
