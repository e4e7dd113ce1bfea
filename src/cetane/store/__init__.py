"""The store: results of work by their keys, and files by their hashes, shared by whoever can reach
it."""
