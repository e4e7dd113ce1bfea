"""The error for what no instruction of a tape covers."""

from cetane.errors import CetaneError


class Unsupported(CetaneError):
    """A tape has no instruction for an op, so another executor runs the function."""
