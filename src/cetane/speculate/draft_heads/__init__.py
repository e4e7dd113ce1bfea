"""Draft heads: their modules, their training, their shard."""
