"""Recipes: what to build, as data. TOML in, a validated frozen object out."""

from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from cetane.compress import Selection
from cetane.compress.sensitivity import SENSITIVITY
from cetane.errors import CetaneError
from cetane.files import read_toml, write_toml
from cetane.schema.interface import Order
from cetane.schema.slots import CacheFormat, ContractName
from cetane.schema.streaming import Streaming, load_scores
from cetane.schema.subset import SUBSET, Subset, load_subset
from cetane.validation import Data, guess, read_already, validated

Mode = Literal["decode", "verify", "prefill"]
Quality = Literal["near-lossless", "good", "usable"]
"""What a recipe promises about its compression, the strictest first."""
DEFAULT_QUALITY: Quality = "good"
ALIGNED = 32
"""Tokens of which a cache's length is a multiple: the ANE aligns rows (coremltools #2631)."""
RECIPE = "recipe.toml"
"""The file of a recipe that cetane writes, with the reasons for what it chose."""


class LayoutSection(Data):
    """Which blocks go into which shard; a layer of some families is two blocks."""

    kind: Literal["per-block", "per-layer", "chunks", "single", "auto"] = "chunks"
    """With `auto`, a port for a chip chooses the layout, the contract, the head's slices and the
    width of `verify`. Until then `auto` means chunks."""
    chunks: int | None = Field(default=None, ge=1)
    """Number of shards that hold the layers. The default is 4, 3, 5 or 6: the first of them that
    makes all chunks alike. If none does, it is 4, or one for each layer of a smaller model."""
    cuts: tuple[Annotated[int, Field(ge=1)], ...] = ()
    """The first layer of every chunk but the first, for chunks of unequal length."""
    head: Literal["apart", "last"] = "apart"
    """Where the head lies: in shards of its own, or in the last shard of the layers."""
    routed: tuple[Mode, ...] = ()
    """Modes that run only the experts that their tokens choose: each expert is a function of its
    own. The other modes compute all experts in one graph."""

    @model_validator(mode="after")
    def consistent(self) -> "LayoutSection":
        if self.chunks is not None and self.kind != "chunks":
            raise ValueError(
                f"chunks = {self.chunks} is only for the layout 'chunks': layout.kind = 'chunks'"
            )
        if self.cuts and (self.chunks is not None or self.kind != "chunks"):
            raise ValueError("cuts are only for the layout 'chunks', and replace chunks = N")
        if list(self.cuts) != sorted(set(self.cuts)):
            raise ValueError(f"cuts = {list(self.cuts)} are not in ascending order")
        return self


class CacheSection(Data):
    """The key/value caches: their contracts, and the context, in tokens (a multiple of 32)."""

    contract: ContractName = "readonly"
    """How the new keys and values of a call reach the caches."""
    sliding: ContractName | None = None
    """The contract of layers that see only a window; by default `contract`."""
    context: int = Field(default=512, ge=32)
    """The most tokens of a sequence."""
    capacities: tuple[Annotated[int, Field(ge=32)], ...] = Field(
        default=(), exclude_if=lambda capacities: not capacities
    )
    """Smaller capacities, ascending: every call has a function for each of them, too. A sequence
    begins in the smallest, and its caches grow between calls. The smaller the capacity, the cheaper
    a call. Manifests leave an empty list out, so that older manifests keep their bytes."""
    windowed: bool = True
    """Whether layers that see only a window keep only the tokens of that window."""
    padded: bool = False
    """Whether one state of a package holds all layers, each padded to the largest layer's rows.
    On a phone, a function of several tokens may have only one state."""
    state_heads: int = Field(default=1, ge=1, le=256)
    """The least number of key/value heads in the rows of a padded state. The published Gemma port
    tried 32."""
    format: CacheFormat = Field(default="fp16", exclude_if=lambda form: form == "fp16")
    """How the host keeps keys and values. With `int8`, each token and key/value head has a scale in
    fp16. Manifests leave the default out, so that older manifests keep their bytes."""
    streaming: Streaming | None = Field(default=None, exclude_if=lambda chosen: chosen is None)
    """Key/value heads that keep only the first tokens and the newest; by default none. Manifests
    leave it out then, so that older manifests keep their bytes."""

    @field_validator("context")
    @classmethod
    def aligned(cls, context: int) -> int:
        if context % ALIGNED:
            raise ValueError(
                f"context must be a multiple of {ALIGNED} (ANE row alignment, coremltools #2631)"
            )
        return context

    @field_validator("capacities")
    @classmethod
    def all_aligned(cls, capacities: tuple[int, ...]) -> tuple[int, ...]:
        if any(capacity % ALIGNED for capacity in capacities):
            raise ValueError(f"capacities must be multiples of {ALIGNED}, as context")
        return capacities

    @model_validator(mode="after")
    def consistent(self) -> "CacheSection":
        contracts = {self.contract, self.sliding or self.contract}
        if self.padded and not all(one.startswith("stateful") for one in contracts):
            raise ValueError("padded = true needs contract = 'stateful'")
        if self.state_heads > 1 and not self.padded:
            raise ValueError("state_heads above 1 needs padded = true")
        if self.format == "int8" and contracts != {"readonly"}:
            raise ValueError(
                "format = 'int8' needs caches that the host keeps: contract = 'readonly', for "
                "sliding layers too"
            )
        if list(self.capacities) != sorted({*self.capacities} - {self.context}):
            raise ValueError(f"capacities = {list(self.capacities)} are not in ascending order")
        if self.capacities and self.capacities[-1] > self.context:
            raise ValueError(
                f"the capacity {self.capacities[-1]} is beyond the context, {self.context}"
            )
        return self


Width = Annotated[int | None, BeforeValidator(lambda value: None if value == 0 else value)]
"""Tokens of a call. 0 leaves the function out, since TOML has no null."""


class TokensSection(Data):
    """Tokens per call of verify and prefill, each a static function. Decode always takes 1."""

    verify: Width = Field(default=8, ge=2, le=64)
    """Tokens of a call that checks drafts; 0 leaves these calls out."""
    prefill: Width = Field(default=64, ge=2, le=1024)
    """Tokens of a call that reads a prompt; 0 leaves these calls out."""
    shapes: Literal["static", "range"] = "static"
    """`range` makes one function with a RangeDim. The ANE runs it only at its default shape
    (coremltools #2370)."""

    def by_mode(self) -> dict[Mode, int]:
        """Tokens per call of every mode that the recipe has."""
        modes: dict[Mode, int | None] = {
            "decode": 1,
            "verify": self.verify,
            "prefill": self.prefill,
        }
        return {mode: tokens for mode, tokens in modes.items() if tokens is not None}


RowFormatName = Literal["fp16", "int8", "int4"]


class EmbeddingSection(Data):
    """How the host keeps its tables."""

    format: Literal[RowFormatName, "auto"] = "fp16"
    """With `int8`, each row has a scale in fp16. With `int4`, every 32 columns of a row have one.
    With `auto`, a port chooses int8 or fp16; until then `auto` means int8."""
    inside: bool = False
    """Whether the first shard looks tokens up itself: a gather, which leaves the ANE."""

    @property
    def rows(self) -> RowFormatName:
        """The format of rows, by name."""
        return "int8" if self.format == "auto" else self.format


Choosing = Literal["argmax"] | bool


class HeadSection(Data):
    """The output projection, in `slices` of the vocabulary."""

    slices: int = Field(default=1, ge=1)
    """The number of slices. Each is a shard, unless the last shard of the layers holds the head."""
    choose: Choosing = False
    """Whether a slice gives only its largest logit and that logit's row. This is enough for greedy
    decoding only. `argmax` chooses as the published Gemma port does, with ops that leave the ANE:
    softcap, argmax and gather."""
    subset: Annotated[Subset | None, read_already("tokens")] = None
    """The tokens that have rows; by default all. In a recipe file: the path, relative to the
    recipe's folder, of a subset that `cetane vocabulary` wrote."""


class LoweringSection(Data):
    """How blocks become graphs, where there is a choice."""

    split_contracting: bool = False
    """Whether to cut the contracted axis of projections on the 1 MiB notch in two
    (`cetane.hardware.notch`). Only the rounding of one sum changes. A public report measured a gain
    on an M4."""


class TargetSection(Data):
    """The oldest system that the programs run on. Multifunction packages need iOS 18."""

    deployment: Literal["iOS18", "iOS26"] = "iOS18"
    """`iOS18` stands for macOS 15 too, `iOS26` for macOS 26."""


class Recipe(Data):
    """Every choice that decides how a checkpoint becomes a bundle."""

    name: str
    """A recipe file may leave it out: then it is the file's own name."""
    description: str = ""
    """What the recipe is for, in one line."""
    family: dict[str, Any] = Field(default_factory=dict)
    """Options of the model's family, which checks them."""
    tensor_layout: Order = "c1t"
    """The axes of hidden tensors: `(1, C, 1, T)` for `c1t`, as the ANE stores them, `(1, C, T, 1)`
    for `ct1`, as the published ports have them."""
    layout: LayoutSection = LayoutSection()
    cache: CacheSection = CacheSection()
    tokens: TokensSection = TokensSection()
    embedding: EmbeddingSection = EmbeddingSection()
    head: HeadSection = HeadSection()
    compression: Selection = Selection()
    lowering: LoweringSection = LoweringSection()
    target: TargetSection = TargetSection()
    quality: Quality = Field(
        default=DEFAULT_QUALITY, exclude_if=lambda promised: promised == DEFAULT_QUALITY
    )
    """The quality that the recipe promises, the strictest first. The golden gate has limits for
    each, and holds the bundle to them at any number of bits. Manifests leave the default out, so
    that older manifests keep their bytes."""
    reasons: dict[str, str] = Field(default_factory=dict, exclude_if=lambda reasons: not reasons)
    """Why cetane chose a value that the recipe left to it, by dotted key."""

    @model_validator(mode="after")
    def consistent(self) -> "Recipe":
        widest, mode = max((tokens, mode) for mode, tokens in self.tokens.by_mode().items())
        rooms = {"context": self.cache.context}
        if self.cache.capacities:
            rooms["capacity"] = self.cache.capacities[0]
        for what, room in rooms.items():
            if widest > room:
                raise ValueError(
                    f"a call of {widest} tokens does not fit a {what} of {room}: "
                    f"tokens.{mode} = {room} is the most"
                )
        if self.cache.capacities and self.tokens.shapes == "range":
            raise ValueError("cache.capacities needs static shapes: tokens.shapes = 'static'")
        if self.cache.format == "int8" and self.target.deployment != "iOS26":
            raise ValueError(
                "cache.format = 'int8' needs programs with inputs of 8 bits: "
                "target.deployment = 'iOS26'"
            )
        if self.layout.routed and self.tokens.shapes == "range":
            raise ValueError("layout.routed needs static shapes: tokens.shapes = 'static'")
        if self.head.choose is True and self.tokens.shapes == "range":
            raise ValueError(
                "head.choose = true needs static shapes: tokens.shapes = 'static', "
                "or head.choose = 'argmax'"
            )
        missing = set(self.layout.routed) - set(self.tokens.by_mode())
        if missing:
            raise ValueError(f"layout.routed: the recipe has no mode {min(missing)}")
        return self


def shipped() -> dict[str, Path]:
    """The recipes that come with cetane, by name."""
    folder = Path(str(resources.files("cetane"))) / "recipes"
    if not folder.is_dir():  # a source checkout keeps them at the top
        folder = Path(__file__).parents[3] / "recipes"
    return {path.stem: path for path in sorted(folder.glob("**/*.toml"))}


def load_recipe(source: str) -> Recipe:
    """A recipe from a TOML file, or a recipe that comes with cetane, by its name.

    Raises CetaneError for an unknown name, and for a file that is not a valid recipe.
    """
    content, path = read_recipe(source)
    recipe = parse_recipe(content, str(path))
    recipe.compression.find_beside(path)
    return recipe


def read_recipe(source: str) -> tuple[dict[str, Any], Path]:
    """What `load_recipe` validates: the content of a recipe's file and of the files that it names;
    and the file's path."""
    known = shipped()
    path = Path(source) if source.endswith(".toml") else known.get(source)
    if path is None or not path.is_file():
        raise CetaneError(
            f"no recipe {source!r}; {guess(source, known)}".rstrip("; "),
            "cetane recipes lists them; one of your own is the path of a .toml file",
        )
    content = {"name": path.stem} | read_toml(path)
    head = content.get("head")
    if isinstance(head, dict) and isinstance(head.get("subset"), str):
        head["subset"] = load_subset(path.parent / head["subset"])
    cache = content.get("cache")
    streaming = cache.get("streaming") if isinstance(cache, dict) else None
    if isinstance(streaming, dict) and isinstance(streaming.get("scores"), str):
        streaming["scores"] = load_scores(path.parent / streaming["scores"])
    return content, path


def recipe_files(recipe: Recipe) -> dict[str, Callable[[Path], None]]:
    """How to write a recipe: by name, a function that writes a file. In one folder, `load_recipe`
    reads `RECIPE` as the same recipe."""
    content = without_none(recipe.model_dump(mode="json", exclude_defaults=True))
    files: dict[str, Callable[[Path], None]] = {RECIPE: lambda path: write_toml(path, content)}
    if recipe.compression.names:
        content["compression"]["names"] = dict(recipe.compression.names)
    if recipe.head.subset is not None:
        content["head"]["subset"] = SUBSET
        files[SUBSET] = recipe.head.subset.save
    if recipe.compression.sensitivity is not None:
        content["compression"]["sensitivity"]["file"] = SENSITIVITY
        files[SENSITIVITY] = recipe.compression.sensitivity.copy_to
    return files


def without_none(content: Mapping[str, Any]) -> dict[str, Any]:
    """Content for TOML, which has no null: `Width` reads 0 as None."""
    return {
        key: without_none(value) if isinstance(value, Mapping) else 0 if value is None else value
        for key, value in content.items()
    }


def parse_recipe(content: dict[str, Any], where: str) -> Recipe:
    """Validate a recipe. A CetaneError names the key and, if it is unknown, the alternatives."""
    return validated(Recipe, content, where)
