"""The server: bundles behind OpenAI's API, for the clients that people already use."""
