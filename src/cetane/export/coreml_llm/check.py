"""Static checks of a folder: problems that stop CoreML-LLM's runtime or make it compute wrongly."""

import math
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cetane.errors import CetaneError
from cetane.export.coreml_llm.contract import (
    CHUNKS,
    DECODE,
    FULL,
    KINDS,
    PREFILL,
    SHARED,
    SLIDING,
    VERIFY,
    VERIFYING,
    PackageSizes,
    caches,
    commits,
    is_compiled,
    is_there,
    numbered_keys,
    positions,
    theirs,
)
from cetane.files import read_json
from cetane.mil import MilFunction, Program, load
from cetane.npy import open_array
from cetane.schema.recipe import Mode

COUNTS = (
    "context_length", "vocab_size", "hidden_size", "num_layers", "per_layer_dim", "sliding_window",
    "head_dim", "global_head_dim", "num_key_value_heads",
)  # fmt: skip
"""Keys of `model_config.json` that must be at least 1."""


def check(folder: Path) -> list[str]:
    """The problems of a folder; an empty list if there are none. Reads no weights.

    Packages that a Mac has compiled count as present, but cannot be read.
    """
    try:
        config = read_json(folder / "model_config.json")
        counts = {key: config[key] for key in COUNTS}
        layers, shared = config["layer_types"], config["num_kv_shared_layers"]
    except CetaneError as error:
        return [error.message]
    except KeyError as error:
        return [f"model_config.json: {error!r}"]
    problems = list(check_counts(counts, layers, shared))
    if problems:
        return problems
    problems += check_factors(config)
    problems += check_files(folder, counts)
    for name, dim in ((SLIDING, "head_dim"), (FULL, "global_head_dim")):
        for part in ("cos", "sin"):
            path = folder / f"{part}_{name}.npy"
            problems += check_rotary(path, counts["context_length"], counts[dim])
    sizes = PackageSizes(
        hidden=counts["hidden_size"],
        context=counts["context_length"],
        window=counts["sliding_window"],
        per_layer=counts["num_layers"] * counts["per_layer_dim"],
        kv_heads=counts["num_key_value_heads"],
        dims={SLIDING: counts["head_dim"], FULL: counts["global_head_dim"]},
    )
    owners = [KINDS[kind] for kind in layers[: len(layers) - shared]]
    return problems + list(check_packages(folder, sizes, owners))


def check_counts(counts: dict[str, Any], layers: Any, shared: Any) -> Iterator[str]:
    """Problems of numbers that must be there, of the `layers`' kinds, and of the number of layers
    that have `shared` keys and values."""
    for key, value in counts.items():
        if type(value) is not int or value < 1:
            yield f"model_config.json: {key} = {value!r}"
    known = isinstance(layers, list) and all(
        isinstance(kind, str) and kind in KINDS for kind in layers
    )
    if not known or len(layers) != counts["num_layers"]:
        yield "model_config.json: layer_types are not one known kind for each layer"
    if type(shared) is not int or not known or not 0 <= shared < len(layers):
        yield f"model_config.json: num_kv_shared_layers = {shared!r}"


def check_factors(config: dict[str, Any]) -> Iterator[str]:
    """Problems of the factors on rows. A bundle may scale down Gemma's own factor on embeddings
    (`family.residual_scale`), but not the one on per-layer rows."""
    for key, size, least in (
        ("embed_scale", "hidden_size", 0.0),
        ("per_layer_embed_scale", "per_layer_dim", 0.999),
    ):
        found: Any = config.get(key)
        own = math.sqrt(config[size])
        if type(found) not in (int, float) or not least * own < found < 1.001 * own:
            yield f"model_config.json: {key} = {found!r}, but the model's is {own:.6g}"


def check_files(folder: Path, counts: dict[str, int]) -> Iterator[str]:
    """Problems of the embeddings and the model's own files, by their sizes."""
    vocab, hidden = counts["vocab_size"], counts["hidden_size"]
    width = counts["num_layers"] * counts["per_layer_dim"]
    files = {
        "embed_tokens_q8.bin": vocab * hidden,
        "embed_tokens_scales.bin": 2 * vocab,
        "embed_tokens_per_layer_q8.bin": vocab * width,
        "embed_tokens_per_layer_scales.bin": 2 * vocab,
        "per_layer_projection.bin": 2 * width * hidden,
        "per_layer_norm_weight.bin": 2 * counts["per_layer_dim"],
        "hf_model/tokenizer.json": None,
        "hf_model/config.json": None,
    }
    for name, size in files.items():
        path = folder / name
        if not path.is_file():
            yield f"{name} is missing"
        elif size is not None and path.stat().st_size != size:
            yield f"{name} has {path.stat().st_size} bytes, not {size}"


def check_rotary(path: Path, context: int, dim: int) -> list[str]:
    """Problems of a rotary table: it needs rows for every position, fp16, a version 1 header."""
    try:
        open_array(path, "<f2", (positions(context), dim))
    except CetaneError as error:
        return [error.message]
    return []


@dataclass
class Chain:
    """The packages of one mode, in the order of their calls."""

    sizes: PackageSizes
    mode: Mode
    tokens: int | None = None
    """Tokens of a call, the same for all packages."""
    handed: set[str] = field(default_factory=set)
    """The tensors that the runtime or an earlier package has for the next package."""

    def problems(
        self, where: str, function: MilFunction, owned: dict[str, int], last: bool
    ) -> Iterator[str]:
        """Problems of a function; `owned` layers of each kind have caches in it."""
        shape = function.inputs["hidden_states"].shape if "hidden_states" in function.inputs else ()
        if len(shape) != 3 or not isinstance(shape[1], int):
            yield f"{where}: hidden_states of shape {shape}"
            return
        if self.tokens is None:
            self.tokens = shape[1]
        if self.mode == "decode" and self.tokens != 1:
            yield f"{where}: takes {self.tokens} tokens"
        wanted = self.sizes.inputs(self.mode, self.tokens, owned)
        for name in function.inputs:
            made = name.startswith(("kv1", "per_layer_combined"))
            if name not in wanted or (made and name not in self.handed):
                yield f"{where}: nothing gives {name}"
        yield from self.shapes(where, wanted, function.inputs)
        full = any(name in function.inputs for name in ("K_full_in", f"{SHARED[FULL]}_k"))
        mask = theirs("mask_full", self.mode)
        if (full or self.mode == "prefill") and mask not in function.inputs:
            yield f"{where}: no {mask}"
        yield from self.results(where, function, owned, last)

    def results(
        self, where: str, function: MilFunction, owned: dict[str, int], last: bool
    ) -> Iterator[str]:
        """Problems of a function's outputs."""
        assert self.tokens is not None
        possible = self.sizes.outputs(self.mode, self.tokens, owned)
        yield from self.shapes(where, possible, function.outputs)
        needed = {name for name in possible if name.startswith(("K_", "V_", "new_"))}
        if last:
            needed |= {name for name in possible if name.startswith("token_")}
        if not last or self.mode != "prefill":
            needed.add("hidden_states_out")
        if "per_layer_raw" in function.inputs and not last:
            needed.add("per_layer_combined_out")
        for name in sorted(needed - set(function.outputs)):
            yield f"{where}: gives no {name}"
        self.handed |= {name.removesuffix("_out") for name in function.outputs}

    def shapes(
        self, where: str, wanted: dict[str, tuple[int, ...]], there: dict[str, Any]
    ) -> Iterator[str]:
        """Inputs and outputs with another shape or type than the contract's."""
        for name, type_ in there.items():
            if name not in wanted:
                continue
            dtype = "int32" if name.startswith("token_id") else "fp16"
            if tuple(type_.shape) != wanted[name]:
                yield f"{where}: {name} of shape {tuple(type_.shape)}, not {wanted[name]}"
            if type_.dtype != dtype:
                yield f"{where}: {name} is {type_.dtype}, not {dtype}"


def check_packages(folder: Path, sizes: PackageSizes, owners: list[str]) -> Iterator[str]:
    """Problems of the packages: missing ones, and inputs and outputs that the runtime lacks.

    `owners` are the kinds of the layers that have caches.
    """
    layouts = [names for names in CHUNKS.values() if is_there(folder, names[-1])]
    if not layouts:
        lasts = [f"{names[-1]}.mlpackage" for names in CHUNKS.values()]
        yield f"none of {', '.join(lasts)}"
    in_first = 0
    for names in layouts:
        in_first = yield from check_layout(folder, sizes, owners, names)
    if any(is_there(folder, name) for name in PREFILL):
        split = in_first if layouts and len(layouts[-1]) in VERIFYING else 0
        yield from check_prefill(folder, sizes, owners, split or None)


def check_layout(
    folder: Path, sizes: PackageSizes, owners: list[str], names: tuple[str, ...]
) -> Generator[str, None, int]:
    """Problems of the packages that decode, and verify. The result is the number of layers with
    caches in the first."""
    programs = yield from opened(folder, names)
    if len(programs) != len(names):
        return 0
    functions = {frozenset(program.functions) for program in programs}
    if functions not in ({frozenset({"main"})}, {frozenset({DECODE, VERIFY})}):
        listed = "; ".join(", ".join(sorted(f)) for f in sorted(functions, key=sorted))
        yield f"functions are {listed}: main everywhere, or {DECODE} and {VERIFY} everywhere"
        return 0
    both = functions == {frozenset({DECODE, VERIFY})}
    owned = [caches(program.functions[DECODE if both else "main"]) for program in programs]
    counts = [sum(kinds.values()) for kinds in owned]
    if sum(counts) != len(owners):
        yield f"packages have {sum(counts)} caches, not {len(owners)}"
    if both and not commits(owned):
        yield f"{names[0]}: {VERIFY}, but the runtime writes verified columns as for E2B"
    decode, verify = Chain(sizes, "decode"), Chain(sizes, "verify")
    for name, program, kinds in zip(names, programs, owned, strict=True):
        last = name == names[-1]
        if not both:
            yield from decode.problems(name, program.functions["main"], kinds, last)
            continue
        if program.default != DECODE:
            yield f"{name}: {program.default} is its default function, not {DECODE}"
        for chain, function in ((decode, DECODE), (verify, VERIFY)):
            where = f"{name}/{function}"
            yield from chain.problems(where, program.functions[function], kinds, last)
    return counts[0]


def check_prefill(
    folder: Path, sizes: PackageSizes, owners: list[str], first: int | None
) -> Iterator[str]:
    """Problems of the prefill packages, of which the first has `first` layers.

    None if the decoding packages do not tell that number: then it is the number of its keys.
    """
    programs = yield from opened(folder, PREFILL)
    if len(programs) != len(PREFILL):
        return
    if first is None and "main" in programs[0].functions:
        first = numbered_keys(programs[0].functions["main"])
    first = first or 0
    chain = Chain(sizes, "prefill")
    parts: tuple[list[str], ...] = (owners[:first], owners[first:], [], [])
    for name, program, kinds in zip(PREFILL, programs, parts, strict=True):
        if set(program.functions) != {"main"}:
            yield f"{name}: functions {', '.join(sorted(program.functions))}, not main"
            continue
        function = program.functions["main"]
        last = name == PREFILL[-1]
        yield from chain.problems(name, function, {}, last)
        if chain.tokens is None:
            return
        if last and "last_position_mask" not in function.inputs:
            yield f"{name}: no last_position_mask"
        yield from columns(name, function, chain, kinds, producing=kinds is parts[1])
    if chain.tokens is not None and chain.tokens > sizes.context:
        yield f"prefill of {chain.tokens} tokens does not fit a context of {sizes.context}"


def columns(
    where: str, function: MilFunction, chain: Chain, kinds: list[str], producing: bool
) -> Iterator[str]:
    """Problems with the keys and values of layers that have caches. Their names are numbered,
    except those that later packages read."""
    assert chain.tokens is not None
    producers = {len(kinds) - 1 - kinds[::-1].index(kind) for kind in set(kinds)}
    number = 0
    for index, kind in enumerate(kinds):
        handed_on = producing and index in producers
        names = [f"{SHARED[kind]}_{p}" if handed_on else f"{p.upper()}{number}" for p in "kv"]
        number += not handed_on
        wanted = chain.sizes.shared(kind, "prefill", chain.tokens)
        for name in names:
            if name not in function.outputs:
                yield f"{where}: gives no {name}"
        yield from chain.shapes(where, dict.fromkeys(names, wanted), function.outputs)


def opened(folder: Path, names: tuple[str, ...]) -> Generator[str, None, list[Program]]:
    """Yields why packages cannot be read. The generator's result is the list of the other
    programs. Compiled packages are left out."""
    programs: list[Program] = []
    for name in names:
        package = folder / f"{name}.mlpackage"
        if not package.is_dir() and is_compiled(folder, name):
            continue
        try:
            programs.append(load(package))
        except (CetaneError, ValueError) as error:
            yield f"{name}: {error}"
    return programs
