"""Predicted speed: chips as data, a physical model, and its fit to public measurements."""
