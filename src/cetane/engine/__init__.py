"""The engine: sessions that follow a plan, and generation on them."""
