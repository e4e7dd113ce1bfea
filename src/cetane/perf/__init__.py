"""Predicted speed: a physical cost model, its fit to public measurements, and predictions."""
