"""Drafters, and the controller that decides when drafting pays."""
