"""The selection: rules of a recipe that give each weight its compression format."""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from cetane.compress.formats import Format, parse_format
from cetane.compress.sensitivity import SensitivityFile
from cetane.errors import CetaneError
from cetane.validation import Data, nearest


def _known_format(name: str) -> str:
    try:
        return parse_format(name).name
    except CetaneError as error:
        raise ValueError(str(error)) from error  # pydantic adds its place in the recipe


def _known_default(name: str) -> str:
    return name if name == AUTO else _known_format(name)


FormatName = Annotated[str, AfterValidator(_known_format)]
AUTO, SMALLEST = "auto", "palette6-kmeans-group32"
"""A default that a port chooses by what its recipe promises; and what stands for it until then, the
smallest format that a port tries."""


class Selection(Data):
    """A recipe's `[compression]` table: from general to particular, and the last match wins.

    - `default` applies to every weight. `auto` leaves it to a port.
    - `types` applies to the weights of one kind ("attention", "head").
    - `names` applies to weights by a case-sensitive glob pattern of their canonical name
      ("model.layers.0.*"), in the order of the file.
    - `sensitivity` names the file of sensitivities, for formats that need them.
    """

    default: Annotated[str, AfterValidator(_known_default)] = "fp16"
    types: dict[str, FormatName] = Field(default_factory=dict)
    names: dict[str, FormatName] = Field(default_factory=dict)
    sensitivity: SensitivityFile | None = None

    @model_validator(mode="after")
    def consistent(self) -> "Selection":
        formats = (*self.types.values(), *self.names.values())
        for name in formats if self.auto else (self.default, *formats):
            if parse_format(name).weighted and self.sensitivity is None:
                raise ValueError(
                    f"{name} needs compression.sensitivity: the file that cetane sweep writes"
                )
        return self

    @property
    def auto(self) -> bool:
        """Whether a port chooses the formats of weights that no other rule matches."""
        return self.default == AUTO

    def format_for(self, name: str, kind: str) -> Format:
        """The format of the weight with this canonical name and kind."""
        chosen = self.types.get(kind, SMALLEST if self.auto else self.default)
        for pattern, format_name in self.names.items():
            if fnmatchcase(name, pattern):
                chosen = format_name
        return parse_format(chosen)

    def check(self, kinds: Mapping[str, str]) -> None:
        """Raise CetaneError for a type or a name pattern that fits no weight of the model.

        `kinds` maps the canonical name of each of the model's weights to its kind.
        """
        known_kinds = sorted(set(kinds.values()))
        for kind in self.types:
            if kind not in known_kinds:
                raise CetaneError(
                    f"compression.types: no weight is of type {kind!r}",
                    f"the model has {', '.join(known_kinds)}",
                )
        for pattern in self.names:
            if not any(fnmatchcase(name, pattern) for name in kinds):
                raise CetaneError(
                    f"compression.names: {pattern!r} matches no weight",
                    f"the closest names are {nearest(pattern, kinds)}",
                )


def pattern(names: Iterable[str], others: Iterable[str]) -> list[str]:
    """Patterns that match some names and no others: one, if their common beginning will do."""
    mine = list(names)
    start, end = min(mine), max(mine)
    shared = next((i for i, (a, b) in enumerate(zip(start, end, strict=False)) if a != b), None)
    if shared is None or any(name.startswith(start[:shared]) for name in others):
        return sorted(set(mine))
    return [f"{start[:shared]}*"]
