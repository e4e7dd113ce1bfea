"""The selection: rules of a recipe that give each weight its compression format."""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from cetane.compress.fitted import FittedFile
from cetane.compress.formats import Format, Palette, parse_format
from cetane.compress.recipe_file import RecipeFile, TextFile
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


Method = Literal["plain", "weighted", "gptq", "tuned"]


class SecondOrder(Data):
    """How `gptq` rounds (arXiv 2210.17323)."""

    damping: float = Field(default=0.01, gt=0, le=1)
    """The share of the mean of the Hessian's diagonal that is added to this diagonal."""
    order: Literal["largest", "given"] = "largest"
    """The order of columns: large inputs first, or as in the checkpoint."""
    effort: Literal["whole", "quick"] = "whole"
    """`quick` reads a fifth of the text, and counts all errors of a layer alike."""


AS_GPTQ = SecondOrder()
"""The default: GPTQ's damping, and its order by activations (`act_order`)."""
FormatName = Annotated[str, AfterValidator(_known_format)]
UNFITTED: dict[str, Any] = {"method": "plain", "mix_to": None, "text": None, "fitted": None}
"""Fields of a selection whose constants need only the weights."""
AUTO, SMALLEST, NEXT = "auto", "palette6-kmeans-group32", "int8-per-channel"
"""With `auto`, a port chooses the default that holds the recipe's promise: `SMALLEST`, else `NEXT`.
Until then `SMALLEST` stands for `auto`."""


class Selection(Data):
    """A recipe's `[compression]` table.

    The rules `default`, `types` and `names` go from general to particular. The last match wins.
    """

    default: Annotated[str, AfterValidator(_known_default)] = "fp16"
    """The format of every weight. `auto` leaves it to a port."""
    types: dict[str, FormatName] = Field(default_factory=dict)
    """Formats of the weights of one kind ("attention", "head")."""
    names: dict[str, FormatName] = Field(default_factory=OrderedDict)
    """Formats by a case-sensitive glob pattern of a weight's canonical name ("model.layers.0.*"),
    in the order of the file."""
    sensitivity: SensitivityFile | None = None
    """The file of sensitivities, for formats that need them."""
    method: Method = Field(default="plain", exclude_if=lambda method: method == "plain")
    """How a format's constants are found. `plain` needs only the weight. The others need the model:
    `weighted` the mean squares of a layer's inputs, `gptq` all their products. `tuned` continues
    from `gptq` with the model's answers."""
    minutes: float = Field(
        default=30.0, gt=0, allow_inf_nan=False, exclude_if=lambda minutes: minutes == 30.0
    )
    """The minutes that `tuned` may take, without the rounding before it. A third of them at most
    write the text that it learns from, but at least two batches are written."""
    text: TextFile | None = Field(default=None, exclude_if=lambda file: file is None)
    """A text file like what the port will read. Methods that need the model read it in place of
    Python's documentation, beside the model's own text."""
    second_order: SecondOrder = Field(default=AS_GPTQ, exclude_if=lambda own: own == AS_GPTQ)
    rotate: bool = Field(default=False, exclude_if=lambda rotate: not rotate)
    """Whether the residual stream and the values of attention are turned first, which spreads
    outliers: the same function, with weights that round better."""
    mix_to: float | None = Field(default=None, gt=0, le=8, exclude_if=lambda bits: bits is None)
    """The most bits a weight, palettes counted, of the weights that `default` applies to. A port
    mixes palettes up to it if `default` alone does not hold the recipe's promise, and writes into
    `names` which weights get other palettes. A mix needs fitted constants."""
    fitted: FittedFile | None = Field(default=None, exclude_if=lambda file: file is None)
    """The file of constants that the method made, beside the recipe, else in the cache folder. A
    build adds it."""

    @field_validator("names", mode="before")
    @classmethod
    def from_pairs(cls, names: Any) -> Any:
        """What `in_order` wrote."""
        if isinstance(names, list) and all(
            isinstance(pair, list) and len(pair) == 2 and isinstance(pair[0], str) for pair in names
        ):
            return dict(names)
        return names

    @field_validator("names")
    @classmethod
    def ordered(cls, names: dict[str, str]) -> dict[str, str]:
        """Names of which another order is not equal."""
        return OrderedDict(names)

    @model_serializer(mode="wrap", when_used="json")
    def in_order(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Names as pairs, if their order is not that of JSON with sorted keys: manifests and keys
        sort them, but the last match wins."""
        content: dict[str, Any] = handler(self)
        if list(self.names) != sorted(self.names):
            content["names"] = [list(pair) for pair in self.names.items()]
        return content

    @model_validator(mode="after")
    def fields_agree(self) -> "Selection":
        """Refuse what `plain` constants do not use, and a mix or `auto` that cannot be."""
        if self.fitted is not None and self.method == "plain":
            raise ValueError("fitted: plain constants need no file; name the method that made it")
        if self.text is not None and self.method == "plain":
            raise ValueError(
                'text: plain constants read none; ask for few bits (--bits 4), or method = "gptq"'
            )
        if self.auto and self.method != "plain":
            raise ValueError(
                f'method: "{self.method}" fits constants to one format; name it in place of "auto"'
            )
        if self.mix_to is not None and self.method == "plain":
            raise ValueError(
                'mix_to: only fitted constants tell which weights cost most; add method = "gptq"'
            )
        if self.mix_to is not None and not isinstance(parse_format(self.default), Palette):
            raise ValueError(f"mix_to: a mix is of palettes, and default is {self.default}")
        if self.mix_to is not None and self.mix_to <= (least := parse_format(self.default).bits):
            raise ValueError(
                f"mix_to: {self.mix_to:g} bits a weight hold no mix, since {self.default} alone "
                f"has {least} and more; write more than {least}"
            )
        return self

    @model_validator(mode="after")
    def formats_agree(self) -> "Selection":
        """Refuse a format that needs sensitivities without them, and one that the method does not
        fit."""
        formats = (*self.types.values(), *self.names.values())
        for name in formats if self.auto else (self.default, *formats):
            form = parse_format(name)
            if form.weighted and self.sensitivity is None:
                raise ValueError(
                    f"{name} needs compression.sensitivity: the file that cetane sweep writes"
                )
            if self.method != "plain" and isinstance(form, Palette) and form.mode != "kmeans":
                raise ValueError(
                    f"{name} places its palettes in a way of its own: with method = "
                    f'"{self.method}", write {name.replace(form.mode, "kmeans")}'
                )
        return self

    @property
    def files(self) -> tuple[RecipeFile, ...]:
        """All files that the recipe names here."""
        named = self.sensitivity, self.text, self.fitted
        return tuple(file for file in named if file is not None)

    def find_beside(self, recipe: Path) -> None:
        """Look for each file in the folder of the recipe at this path."""
        for file in self.files:
            file.find_beside(recipe)

    def find_as(self, *known: RecipeFile) -> None:
        """Look for each file at the place of the known one that has the same content."""
        places = {file: file for file in known}
        for file in self.files:
            file.find_at(places.get(file, file).path)

    @property
    def auto(self) -> bool:
        """Whether a port chooses the formats of weights that no other rule matches."""
        return self.default == AUTO

    def format_for(self, name: str, kind: str) -> Format:
        """The format of the weight with this canonical name and kind.

        Callers with a `Weight` take `planner.weights.format_of`: it knows gains, and shapes that
        the format does not divide.
        """
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


def patterns(names: Iterable[str], others: Iterable[str]) -> list[str]:
    """Patterns that match some names and no others: one, if their common beginning will do."""
    mine = list(names)
    start, end = min(mine), max(mine)
    shared = next((i for i, (a, b) in enumerate(zip(start, end, strict=False)) if a != b), None)
    if shared is None or any(name.startswith(start[:shared]) for name in others):
        return sorted(set(mine))
    return [f"{start[:shared]}*"]
