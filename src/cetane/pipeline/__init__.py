"""Whole jobs, each one function: the API, the commands and the lab call them."""
