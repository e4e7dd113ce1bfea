"""Rules by subject: what is known in `GROUP.toml`, how to see it in `GROUP.py`."""
