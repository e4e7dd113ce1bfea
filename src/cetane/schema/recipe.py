"""Recipes: what to build, as data. TOML in, a validated frozen object out."""

import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from cetane.compress import Selection
from cetane.errors import CetaneError
from cetane.files import read_toml
from cetane.schema.interface import Order
from cetane.schema.slots import ContractName
from cetane.schema.subset import Subset, load_subset
from cetane.validation import Data, validated

Mode = Literal["decode", "verify", "prefill"]
Quality = Literal["near-lossless", "good", "usable"]
PROMISED: Quality = "good"


class Layout(Data):
    """Which blocks go into which shard; a layer of some families is two blocks."""

    kind: Literal["per-block", "per-layer", "chunks", "single", "auto"] = "chunks"
    """`auto` is left to a port for a chip, with contract, head slices and a verifier's width; it
    means chunks until then."""
    chunks: int | None = Field(default=None, ge=1)
    """How many shards the layers are cut into; 4, or one a layer, when it is not said."""
    cuts: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """The first layer of every chunk but the first, where they are not of equal length."""
    head: Literal["apart", "last"] = "apart"
    """Whether the head has shards of its own, or is in the last one of the layers."""
    routed: tuple[Mode, ...] = ()
    """Modes that run only the experts that their tokens choose, each a function of its own; the
    others compute all experts in one graph."""

    @model_validator(mode="after")
    def consistent(self) -> "Layout":
        if self.chunks is not None and self.kind != "chunks":
            raise ValueError(f"chunks = {self.chunks} has no meaning for the layout {self.kind!r}")
        if self.cuts and (self.chunks is not None or self.kind != "chunks"):
            raise ValueError("cuts are for the layout 'chunks', in place of their number")
        if list(self.cuts) != sorted(set(self.cuts)):
            raise ValueError(f"cuts = {list(self.cuts)} are not in ascending order")
        return self


class CacheTable(Data):
    """The key/value caches: their contracts, and the slots (a multiple of 32) of the longest."""

    contract: ContractName = "readonly"
    sliding: ContractName | None = None
    """The contract of layers that see only a window; the same, when it is not said."""
    context: int = Field(default=512, ge=32)
    windowed: bool = True
    """Whether layers that see only a window keep only that much."""
    padded: bool = False
    """Whether one state of a package holds all layers, each in rows as wide and as long as the
    largest: a function of several tokens may have only one on a phone."""
    state_heads: int = Field(default=1, ge=1, le=256)
    """Key/value heads that the rows of such a state have at least; 32 in the seeds' experiment."""

    @field_validator("context")
    @classmethod
    def aligned(cls, context: int) -> int:
        if context % 32:
            raise ValueError(
                "context must be a multiple of 32 (ANE row alignment, coremltools #2631)"
            )
        return context

    @model_validator(mode="after")
    def consistent(self) -> "CacheTable":
        if self.padded and {self.contract, self.sliding or self.contract} != {"stateful"}:
            raise ValueError("padded: only states are; contract = 'stateful'")
        if self.state_heads > 1 and not self.padded:
            raise ValueError("state_heads: only rows of a padded state have room for more")
        return self


Width = Annotated[int | None, BeforeValidator(lambda value: None if value == 0 else value)]
"""Tokens of a call; 0 leaves the function out, since TOML has no null."""


class Tokens(Data):
    """Tokens per call: one static function each. Decode is always 1; 0 leaves one out."""

    verify: Width = Field(default=4, ge=2, le=64)
    prefill: Width = Field(default=64, ge=2, le=1024)
    shapes: Literal["static", "range"] = "static"
    """`range` makes one function with a RangeDim; the ANE runs it at its default shape only
    (coremltools #2370)."""

    def by_mode(self) -> dict[Mode, int]:
        """Tokens per call of the modes that there are."""
        modes: dict[Mode, int | None] = {
            "decode": 1,
            "verify": self.verify,
            "prefill": self.prefill,
        }
        return {mode: tokens for mode, tokens in modes.items() if tokens is not None}


class EmbeddingTable(Data):
    """How the host keeps its tables: `int8` rows each have a scale in fp16; `auto` is left to a
    port, and int8 until then."""

    format: Literal["fp16", "int8", "auto"] = "fp16"
    inside: bool = False
    """Whether the first shard looks tokens up itself: a gather, which leaves the ANE."""

    @property
    def quantized(self) -> bool:
        """Whether rows are int8."""
        return self.format != "fp16"


class HeadTable(Data):
    """The output projection, in `slices` of the vocabulary."""

    slices: int = Field(default=1, ge=1)
    choose: bool = False
    """Whether a slice gives only its largest logit and where it is: enough to decode greedily, and
    nothing else. ANE compilers leave the argmax to the CPU."""
    subset: Subset | None = None
    """The tokens that have rows; all, when it is not said. In a file, the path of one that
    `cetane vocabulary` made, from the recipe's folder."""


class LoweringTable(Data):
    """How blocks become graphs, where there is a choice."""

    split_contracting: bool = False
    """Cut the contracted axis of projections on the 1 MiB notch (`cetane.hardware.notch`) in two.
    Exact but for the rounding of one sum; it pays on an M4, by public report."""


class TargetTable(Data):
    """What the programs are compiled for. Multifunction packages need iOS 18."""

    deployment: Literal["iOS18", "iOS26"] = "iOS18"


class Recipe(Data):
    """Everything that decides how a checkpoint becomes a bundle."""

    name: str
    description: str = ""
    family: dict[str, Any] = Field(default_factory=dict)
    """Options of the model's family, which knows them."""
    tensor_layout: Order = "c1t"
    layout: Layout = Layout()
    cache: CacheTable = CacheTable()
    tokens: Tokens = Tokens()
    embedding: EmbeddingTable = EmbeddingTable()
    head: HeadTable = HeadTable()
    compression: Selection = Selection()
    lowering: LoweringTable = LoweringTable()
    target: TargetTable = TargetTable()
    quality: Quality = Field(default=PROMISED, exclude_if=lambda promised: promised == PROMISED)
    """What the recipe promises: the gate holds the bundle to it at any number of bits. The default
    is left out of manifests, which keep the bytes that they had before there was a choice."""
    reasons: dict[str, str] = Field(default_factory=dict, exclude_if=lambda reasons: not reasons)
    """Why cetane chose a value that the recipe left to it, by dotted key."""

    @model_validator(mode="after")
    def consistent(self) -> "Recipe":
        widest = max(self.tokens.by_mode().values())
        if widest > self.cache.context:
            raise ValueError(
                f"a call of {widest} tokens does not fit a context of {self.cache.context}"
            )
        if self.layout.routed and self.tokens.shapes == "range":
            raise ValueError("layout.routed needs static shapes: tokens.shapes = 'static'")
        missing = set(self.layout.routed) - set(self.tokens.by_mode())
        if missing:
            raise ValueError(f"layout.routed: there is no mode {min(missing)}")
        return self


def shipped() -> dict[str, Path]:
    """The recipes that come with cetane, by name."""
    folder = Path(str(resources.files("cetane"))) / "recipes"
    if not folder.is_dir():  # a source checkout keeps them at the top
        folder = Path(__file__).parents[3] / "recipes"
    return {path.stem: path for path in sorted(folder.glob("**/*.toml"))}


def load_recipe(source: str) -> Recipe:
    """A recipe from a TOML file, or one of those that come with cetane, by name."""
    known = shipped()
    path = Path(source) if source.endswith(".toml") else known.get(source)
    if path is None or not path.is_file():
        raise CetaneError(f"no recipe {source!r}; known: {', '.join(known)}, or a path to a .toml")
    content = read_toml(path)
    head = content.get("head")
    if isinstance(head, dict) and isinstance(head.get("subset"), str):
        head["subset"] = load_subset(path.parent / head["subset"])
    recipe = parse_recipe({"name": path.stem} | content, str(path))
    if recipe.compression.sensitivity is not None:
        recipe.compression.sensitivity.beside(path)
    return recipe


def override(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    """A recipe with some values replaced, by dotted key as TOML writes it: `{"cache.context": 64}`.

    CetaneError for a key that no recipe has, with the alternatives, or for a value that does not
    fit. Without changes, the recipe itself.
    """
    content = recipe.model_dump()
    for key, value in changes.items():
        *tables, field = key_path(key)
        table = content
        for name in tables:
            inner = table.setdefault(name, {})
            if not isinstance(inner, dict):
                raise CetaneError(f"recipe {recipe.name}: {key}: {name} is not a table")
            table = inner
        table[field] = value
    return parse_recipe(content, f"recipe {recipe.name}") if changes else recipe


def decided(recipe: Recipe, values: Mapping[str, Any], reasons: Mapping[str, str]) -> Recipe:
    """A recipe with some values that cetane chose, by dotted key, and why."""
    return override(recipe, {**values, "reasons": {**recipe.reasons, **reasons}})


def value_of(recipe: Recipe, key: str) -> Any:
    """A value of a recipe by its dotted key; None where it has none."""
    value: Any = recipe.model_dump(mode="json")
    for name in key_path(key):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def recipe_content(recipe: Recipe) -> dict[str, Any]:
    """A recipe as TOML says it, defaults left out; a file of it is read as the same recipe."""
    return without_none(recipe.model_dump(mode="json", exclude_defaults=True))


def without_none(content: Mapping[str, Any]) -> dict[str, Any]:
    """Content for TOML, which has no null: `Width` reads 0 as None."""
    return {
        key: without_none(value) if isinstance(value, Mapping) else 0 if value is None else value
        for key, value in content.items()
    }


def key_path(key: str) -> list[str]:
    """The names in a dotted TOML key: two in `cache.context`, three in `a.b."c.d"`."""
    try:
        table: Any = tomllib.loads(f"{key} = 0")
    except tomllib.TOMLDecodeError as error:
        raise CetaneError(f"{key!r}: not a key of a recipe", "as in cache.context") from error
    path = []
    while isinstance(table, dict):
        ((name, table),) = table.items()
        path.append(name)
    return path


def parse_recipe(content: dict[str, Any], where: str) -> Recipe:
    """Validate a recipe; a CetaneError names the key and, for an unknown one, the alternatives."""
    return validated(Recipe, content, where)
