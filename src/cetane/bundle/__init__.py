"""The folder that ships, on disk."""

from cetane.bundle.folder import Bundle

__all__ = ["Bundle"]
