"""Prompts that ship for several rooms: the speculative suite, and conversations."""

import tomllib

from cetane.files import shipped_text


def suite() -> dict[str, list[str]]:
    """The speculative suite: prompts, by category."""
    return tomllib.loads(shipped_text("data/prompts/speculative.toml"))


def conversations() -> list[list[str]]:
    """What a user says in each conversation, turn by turn. All have the same number of turns."""
    content: dict[str, list[list[str]]] = tomllib.loads(
        shipped_text("data/prompts/conversations.toml")
    )
    return content["conversations"]
