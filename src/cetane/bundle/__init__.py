"""The bundle on disk: the folder that ships, its tables and its draft heads."""

from cetane.bundle.folder import Bundle

__all__ = ["Bundle"]
