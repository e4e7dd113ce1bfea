"""Predicted speed: chips as data, a physical model of a call, and its fit to public measurements."""
