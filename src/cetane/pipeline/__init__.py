"""Whole jobs: what the API, the commands and the lab call."""
