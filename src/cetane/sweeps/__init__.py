"""Compression quality: many formats of one model, judged on a text without building any."""
