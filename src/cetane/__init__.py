"""cetane: port language models to Apple's Neural Engine from any machine."""

__version__ = "0.1.0"
