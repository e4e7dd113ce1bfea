"""The one exception for everything a user can put right."""


class CetaneError(Exception):
    """Bad input or a broken file. The command line prints it as one line and exits with 2.

    `message` says what is wrong, where, and why; `hint` names the next thing to try.
    """

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message} ({self.hint})"
