"""The explanation of a refused port, as data."""

from typing import Any, Literal, Protocol

import tomli_w
from pydantic import Field, computed_field

from cetane.checkpoint import Tokenizer
from cetane.gates.lost import LostNumbers
from cetane.schema.changes import key_path
from cetane.schema.plan import Plan
from cetane.validation import Data

Cause = Literal[
    "weights",
    "authoring",
    "conversion",
    "contract",
    "fp16 range",
    "attention",
    "experts",
    "compression",
    "residency",
]


class RefusedPort(Protocol):
    """The refused port: a bundle, or a port that is not yet a bundle."""

    @property
    def plan(self) -> Plan: ...
    @property
    def tokenizer(self) -> Tokenizer: ...


class Explanation(Data):
    """The reason why a port was refused."""

    cause: Cause
    where: str
    """The first shard, block or constant."""
    sentence: str
    changes: dict[str, Any] = Field(default_factory=dict)
    """Values of the recipe that mend the port, by dotted key; empty where no recipe can."""

    @computed_field  # type: ignore[prop-decorator]  # pydantic's own order
    @property
    def recipe_change(self) -> str | None:
        """The changes as lines of TOML, ready to paste; None without changes."""
        tables: dict[str, Any] = {}
        for key, value in self.changes.items():
            *path, name = key_path(key)
            table = tables
            for part in path:
                table = table.setdefault(part, {})
            table[name] = value
        return tomli_w.dumps(tables).strip() or None

    @property
    def mends(self) -> bool:
        """Whether the change mends the port: a smaller promise does not."""
        return bool(self.changes) and "quality" not in self.changes


def with_lost(found: Explanation, lost: LostNumbers | None) -> Explanation:
    """The explanation with the op from which infinity or NaN comes, if there is some."""
    if lost is None:
        return found
    return found.model_copy(update={"sentence": f"{found.sentence} {lost.told}"})
