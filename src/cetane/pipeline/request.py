"""What a user asks to be built: a checkpoint, a recipe with some values replaced, and a place."""

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cetane.checkpoint import Checkpoint, Tokenizer, open_checkpoint
from cetane.compress import Palette, parse_format
from cetane.compress.recipe_file import TextFile
from cetane.compress.selection import UNFITTED
from cetane.errors import CetaneError
from cetane.files import check_outside, check_writable, is_present, nameable
from cetane.schema.changes import decided, keys_in, load_changed, override, without_reasons
from cetane.schema.manifest import MANIFEST, TOKENIZER
from cetane.schema.recipe import ALIGNED, Recipe, load_recipe, shipped

if TYPE_CHECKING:  # plans need torch; a bundle that comes from a store needs no plan
    from cetane.planner import Planner

FORMAT_OF_BITS = {
    16: "fp16",
    8: "int8-per-channel",
    6: "palette6-kmeans-group32",
    4: "palette4-kmeans-group8",
    3: "palette3-kmeans-group8",
    2: "palette2-kmeans-group8",
}
"""Formats of `--bits`. The ANE runs palettes in groups of 32 channels most widely. With few bits,
groups of 8 are worth the bytes of their palettes: 0.06 bits a weight where 576 channels are read.
Core AI's presets have no smaller groups (`4bit_weight_palettized_group8`)."""
FITTED_BITS = 4
"""The most bits at which `--bits` fits constants to the model (`compression.method`). Plain ones
lose too much there (docs/explanation/compression.md)."""
MIXED = {4: 4.6, 3: 3.1, 2: 2.1}
"""By `--bits`: the most bits a weight of a mix, where uniform palettes do not hold the promise.
SmolLM2 passed its gates as good with 4.57; more than 4.6 would be five. Whoever asks for 3 or 2
bits counts bytes, so a mix there takes hardly more."""
MIX, TURN = "compression.mix_to", "compression.rotate"
"""Keys that `--bits` sets."""
PREFILL = "tokens.prefill"
MINUTES = "compression.minutes"
NUMBER = r"[0-9]{1,9}(?:\.[0-9]{1,9})?"
"""The pattern of a budget's number. More digits overflow a float."""


@dataclass(frozen=True)
class Request:
    """A checkpoint and a recipe that fit each other. Reads no weight and writes nothing."""

    checkpoint: Checkpoint
    recipe: Recipe
    named: frozenset[str] = frozenset()
    """Values of the recipe that the user chose, by dotted key: no choice for a chip changes
    them, and no advice of a gate without `--fix`."""
    budget: int | None = None
    """Bytes of weights and tables, at most."""

    @cached_property
    def planner(self) -> "Planner":
        """The planner of the request. CetaneError if the model cannot be built by this recipe.

        It reads all that a build needs (family, tensors, dtypes, tokenizer, files of the
        recipe), so that a refusal comes before any work.
        """
        from cetane.planner import Planner

        planner = Planner(self.checkpoint, self.recipe)
        tokenizer = self.checkpoint.tokenizer
        check_prompts(tokenizer, planner.model.vocab)
        if self.recipe.head.subset is not None:
            self.recipe.head.subset.check(tokenizer)
        compression = self.recipe.compression
        for file in (compression.sensitivity, compression.fitted):
            if file is not None:
                file.read()  # refuses one that is missing or changed
        if compression.method != "plain" and compression.fitted is None:
            from cetane.fitting.fit import check_formats
            from cetane.fitting.human_text import check_text

            check_formats(planner)
            check_text(self.checkpoint, planner)
        return planner

    @property
    def warning(self) -> str | None:
        """The sign of a misread checkpoint: tensors that the model does not read. None without."""
        from cetane.families import warn_unread

        return warn_unread(self.checkpoint.names(), self.planner.model)

    @property
    def name(self) -> str:
        """The model's name: that of its folder or file."""
        name = Path(self.checkpoint.source).resolve().name
        return name.removesuffix(".gguf").removesuffix(".safetensors")

    def target(self, output: str | Path | None) -> Path:
        """The bundle's path: `output`, or a folder here by the model's and the recipe's names.

        CetaneError for a path without a name, since the finished bundle is renamed to it, and for a
        recipe whose name leads to another folder.
        """
        if output is None:
            name = f"{self.name}-{self.recipe.name}"
            if "/" in name or not nameable(name):
                raise CetaneError(
                    f"recipe {self.recipe.name}: no name for a folder", "add --output"
                )
            return Path(name)
        path = Path(output)
        if path.name in ("", ".."):
            raise CetaneError(f"--output {path}: does not end with a name for the bundle")
        return path


def check_prompts(tokenizer: Tokenizer, vocab: int) -> None:
    """Raise CetaneError if plain prompts hold tokens that a model of `vocab` tokens lacks: a text,
    and a question in the chat template."""
    from cetane.gates.probes import QUESTIONS, asked, texts

    prompt = tokenizer.encode(texts()) + asked(tokenizer, QUESTIONS[0])
    tokenizer.check_known(prompt, vocab)


def make_request(
    model: str | Path,
    recipe: str | Path | Recipe = "default",
    context: int | None = None,
    bits: int | None = None,
    changes: Mapping[str, Any] | None = None,
    budget: str | None = None,
    lora: str | Path | None = None,
    adapters: Mapping[str, str | Path] | None = None,
    text: str | Path | None = None,
) -> Request:
    """Open a checkpoint and a recipe, and replace some of the recipe's values.

    - `context` is in tokens. A recipe that comes with cetane gets no longer a context than the
      model's, unless `context` or `changes` name one.
    - `bits` chooses the format of weights for which the recipe names no other of as many bits.
    - `changes` are values by dotted key, as `{"tokens.verify": 8}`. They win over all others.
    - `budget` is the most that weights and tables may take, as "300MB".
    - `lora` is the folder of a peft adapter to merge. `adapters` are folders of some to keep beside
      the model, by name.
    - `text` is a file that few bits are fitted on.

    CetaneError for a value that is none, and for a model, a recipe or a text that cannot be read.
    """
    if context is not None and context % ALIGNED:
        below = context // ALIGNED * ALIGNED
        raise CetaneError(
            f"--context {context} is not a multiple of {ALIGNED}",
            f"--context {below} or --context {below + ALIGNED}",
        )
    read = None if text is None else TextFile.of(Path(text))
    asked = asked_for(context, bits, changes or {}, read)
    chosen = recipe if isinstance(recipe, Recipe) else load_changed(str(recipe), asked)
    checkpoint = open_checkpoint(model, lora, adapters)
    ours = isinstance(recipe, str) and recipe in shipped()
    implied, reasons = left_open(checkpoint, chosen, ours, asked, bits)
    wanted = implied | asked  # what the user asked for wins
    size = None if budget is None else read_size(budget)
    final = decided(override(without_reasons(chosen, keys_in(wanted)), wanted), {}, reasons)
    if read is not None:
        final.compression.find_as(read)
    method = final.compression.method
    if MINUTES in keys_in(wanted) and method != "tuned":
        raise CetaneError(
            f'{MINUTES}: only tuning takes minutes, and compression.method is "{method}"',
            "add --set compression.method=tuned, or leave the minutes out",
        )
    if final.compression.rotate or final.cache.streaming is not None:
        from cetane.planner import as_recipe_asks

        checkpoint = as_recipe_asks(checkpoint, final)
    return Request(checkpoint, final, keys_in(wanted), size)


def asked_for(
    context: int | None, bits: int | None, changes: Mapping[str, Any], text: TextFile | None
) -> dict[str, Any]:
    """The values that the user asks for, by dotted key. `changes` win over the options."""
    asked: dict[str, Any] = {} if context is None else {"cache.context": context}
    asked |= bits_changes(bits)
    if text is not None:
        asked["compression.text"] = text.model_dump()
    asked |= changes
    return asked | mix_change(asked, bits, MIX in changes)


def left_open(
    checkpoint: Checkpoint, recipe: Recipe, ours: bool, asked: dict[str, Any], bits: int | None
) -> tuple[dict[str, Any], dict[str, str]]:
    """The values that follow from the model and from what was `asked`, and reasons for some.

    - Weights keep a format of as many bits as `bits`, and lose a coarser one.
    - Named chunks or cuts make a layout of chunks of one that is left to cetane.
    - Another compression drops the constants that were fitted to the recipe's.
    - The context fits the model, in a recipe that comes with cetane (`ours`).
    - Calls that read a prompt fit the caches, unless somebody named their tokens.
    - With few bits, channels are turned.
    """
    named = keys_in(asked)
    implied = more_bits(recipe, bits)
    if recipe.layout.kind == "auto" and named & {"layout.chunks", "layout.cuts"}:
        implied["layout.kind"] = "chunks"
    if any(key.startswith("compression") for key in {*named, *implied}):
        implied["compression.fitted"] = None
    if ours and not named & {"cache", "cache.context"}:
        implied |= fitting_context(checkpoint, recipe.cache.context)
    if ours or "prefill" not in recipe.tokens.model_fields_set:
        implied |= fitting_prefill(recipe, implied | asked)
    turned, reasons = turning(checkpoint, recipe, implied | asked, bits)
    return implied | turned, reasons


def bits_changes(bits: int | None) -> dict[str, Any]:
    """What `--bits` changes in a recipe. CetaneError for a number without a format."""
    if bits is None:
        return {}
    if bits not in FORMAT_OF_BITS:
        known = ", ".join(map(str, FORMAT_OF_BITS))
        raise CetaneError(f"{bits} bits: no format", f"known: {known}")
    default = {"compression.default": FORMAT_OF_BITS[bits]}
    if bits <= FITTED_BITS:
        return default | {"compression.method": "gptq", MIX: MIXED[bits]}
    # a recipe of few bits, as a bundle's, may fit constants and mix palettes
    return default | {f"compression.{key}": value for key, value in UNFITTED.items()}


def more_bits(recipe: Recipe, bits: int | None) -> dict[str, Any]:
    """What `--bits` leaves of the formats that a recipe names for some weights: those of as many
    bits or more. Empty if that is all."""
    rules = recipe.compression
    tables = {"compression.types": rules.types, "compression.names": rules.names}
    kept = {
        key: {name: form for name, form in table.items() if parse_format(form).bits >= (bits or 0)}
        for key, table in tables.items()
    }
    return {key: table for key, table in kept.items() if table != tables[key]}


def mix_change(wanted: Mapping[str, Any], bits: int | None, given: bool) -> dict[str, Any]:
    """No mix where constants are not fitted, and by default none where `--bits` cannot mix the
    format. `given` says whether the user names a mix."""
    unmixed = bits is not None and not mixable(wanted["compression.default"], bits)
    plain = wanted.get("compression.method") == "plain"
    return {MIX: None} if plain or (unmixed and not given) else {}


def turning(
    checkpoint: Checkpoint, recipe: Recipe, wanted: Mapping[str, Any], bits: int | None
) -> tuple[dict[str, Any], dict[str, str]]:
    """With few bits, a change that turns channels, or the reason why there is none. `wanted` are
    the other changes of the recipe."""
    if bits is None or bits > FITTED_BITS:
        return {}, {}
    from cetane.planner import can_rotate

    if can_rotate(checkpoint, override(recipe, wanted)):
        return {TURN: True}, {}
    if TURN in keys_in(wanted):
        return {}, {}
    if checkpoint.adapters:
        return {}, {TURN: "adapters beside a base keep its channels"}
    return {}, {TURN: "no channels of this model can be turned before they are rounded"}


def mixable(name: str, bits: int) -> bool:
    """Whether `--bits` may mix palettes of this format with larger ones."""
    with suppress(CetaneError):  # of an unknown format, the recipe tells
        form = parse_format(name)
        return isinstance(form, Palette) and form.bits <= bits
    return False


def read_size(text: str) -> int:
    """Bytes of "300MB" or "1.2GB"; CetaneError for anything else."""
    match = re.fullmatch(f"({NUMBER})(MB|GB)", text)
    if match is None or not float(match[1]):
        raise CetaneError(f"--budget {text}: not a size in MB or GB", "write 300MB or 1.2GB")
    return round(float(match[1]) * (1e6 if match[2] == "MB" else 1e9))


def fitting_context(checkpoint: Checkpoint, context: int) -> dict[str, int]:
    """A change of `cache.context`, if a model was trained for fewer tokens than `context`, else
    empty: all that the model has, in multiples of 32."""
    longest = checkpoint.config.get("max_position_embeddings")
    if not isinstance(longest, int) or not 32 <= longest < context:
        return {}
    return {"cache.context": longest // 32 * 32}


def fitting_prefill(recipe: Recipe, wanted: Mapping[str, Any]) -> dict[str, int]:
    """A change of `tokens.prefill`, if calls of so many tokens do not fit the caches of a recipe
    with the `wanted` changes, else empty: all that fits. Empty too if `wanted` names the key."""
    tokens = recipe.tokens.prefill
    if tokens is None or {"tokens", PREFILL} & keys_in(wanted):
        return {}
    cache = override(recipe, {**wanted, PREFILL: 2}).cache  # 2 fit everywhere
    room = min((cache.context, *cache.capacities))
    return {PREFILL: room} if room < tokens else {}


def check_named_file(output: Path, read: Callable[[Path], object]) -> None:
    """Check the place of a file that recipes shall name, and that `read` reads.

    CetaneError for a place that takes none: a folder, a bundle, which lists its files, and a file
    that `read` refuses, since it is not an earlier one.
    """
    if output.is_dir():
        raise CetaneError(f"--output {output}: is a folder", "name a file in it")
    for folder in output.resolve().parents:
        if all((folder / name).exists() for name in (MANIFEST, TOKENIZER)):
            check_outside(output, folder)
    if is_present(output):
        try:
            read(output)
        except CetaneError as error:
            raise CetaneError(
                f"--output {output}: another file is there", "name a new file, or remove that one"
            ) from error
    check_writable(output)


def shipped_recipes() -> dict[str, list[Recipe]]:
    """The recipes that come with cetane, by what they are for: any model, or the folder's name."""
    groups: dict[str, list[Recipe]] = {}
    for name, path in shipped().items():
        group = path.parent.name
        recipe = load_recipe(name)
        groups.setdefault("any model" if group == "recipes" else group, []).append(recipe)
    return dict(sorted(groups.items(), key=lambda item: item[0] != "any model"))
