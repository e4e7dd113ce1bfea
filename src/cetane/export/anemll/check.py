"""Static checks of a folder: problems that would stop ANEMLL's hosts or make them compute wrongly.

Their hosts warn of little: a chunk that is not found is skipped, and a function for positions
beyond the window falls back to the one before it. Both give wrong tokens, and no error.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from cetane.checkpoint import Tokenizer
from cetane.errors import LONGEST, CetaneError
from cetane.export.anemll.contract import (
    ASSUMED_WINDOW,
    META,
    STATE,
    FolderSizes,
    Shape,
    assumes_window,
)
from cetane.files import read_json, read_text
from cetane.mil import MilFunction, Program, load
from cetane.mil.index import FunctionIndex
from cetane.mil.package import Package
from cetane.validation import spoken

LARGEST_META = 1 << 16
"""Bytes of the largest `meta.yaml`. An export has under 1 kB; 20 MB took the parser minutes."""
CHUNK_NUMBER = "com.anemll.chunk_no"
COUNTS = {
    "context_length": 2**24, "batch_size": 2**24, "num_chunks": 99, "split_lm_head": 256,
    "vocab_size": 2**24,
}  # fmt: skip
"""Keys of `meta.yaml` that must be at least 1, and the most that each may be. The head has an
output for each part."""
LUTS = ("lut_embeddings", "lut_ffn", "lut_lmhead")
"""Keys that `chat.py` requires."""
ENDING = re.compile(r"_chunk_(\d\d)of(\d\d)\.mlmodelc$")
BOUNDS = ("maximum", "clip")
"""Ops that make minus infinity finite."""
WRITE = "write_state"


class Plain(yaml.SafeLoader):
    """YAML without aliases: a few of them stand for gigabytes of text."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases are not read")
        return super().compose_node(parent, index)


def check(folder: Path) -> list[str]:
    """The problems of a folder; an empty list if there are none. Reads no weights.

    Packages that a Mac has compiled count as present, but cannot be read. If a package was made
    anew after that, it lies beside its compiled form, and is read.
    """
    return [problem[:LONGEST] for problem in problems_of(folder)]


def problems_of(folder: Path) -> list[str]:
    """The problems as `check` gives them, but of any length."""
    try:
        info = yaml.load(read_text(folder / META, LARGEST_META), Plain)["model_info"]
        parameters = dict(info["parameters"])
        hidden = read_json(folder / "config.json")["hidden_size"]
    except (CetaneError, yaml.YAMLError, KeyError, TypeError, ValueError, RecursionError) as error:
        return [f"{META} or config.json: {' '.join(spoken(error).split()) or repr(error)}"]
    problems = list(check_parameters(info, parameters))
    if type(hidden) is not int or hidden < 1:
        problems.append(f"config.json: hidden_size = {hidden!r}")
    if problems:
        return problems
    window = parameters.get("sliding_window")
    sizes = FolderSizes(
        hidden=hidden,
        vocab=parameters["vocab_size"],
        context=parameters["context_length"],
        batch=parameters["batch_size"],
        parts=parameters["split_lm_head"],
        window=window if window and window < parameters["context_length"] else None,
        choose=parameters.get("argmax_in_model") is True,
    )
    problems += check_sizes(sizes, parameters)
    problems += check_window(read_json(folder / "config.json"), sizes)
    problems += check_tokenizer(folder)
    names = [parameters["embeddings"], *chunk_names(parameters), parameters["lm_head"]]
    return problems + list(check_packages(folder, sizes, names))


def check_parameters(info: dict[str, Any], parameters: dict[str, Any]) -> Iterator[str]:
    """Problems of the keys in `meta.yaml`, each alone."""
    for key, most in COUNTS.items():
        if type(parameters.get(key)) is not int or not 1 <= parameters[key] <= most:
            yield f"{META}: {key} = {parameters.get(key)!r}"
    for key in LUTS:
        if parameters.get(key) != "none":
            yield f"{META}: {key} = {parameters.get(key)!r}, but no package's name has a lut"
    for key in ("embeddings", "lm_head", "ffn"):
        name = parameters.get(key)
        if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+\.mlmodelc", name):
            yield f"{META}: {key} = {name!r}, not a package of this folder"
    if not isinstance(parameters.get("model_prefix"), str):
        yield f"{META}: model_prefix = {parameters.get('model_prefix')!r}"
    window = parameters.get("sliding_window")
    if window is not None and (type(window) is not int or window < 1):
        yield f"{META}: sliding_window = {window!r}"
    if str(info.get("version")) == "0.1.1":
        yield f"{META}: version 0.1.1, for which the app expects a whole batch from the last chunk"
    if info.get("model_type", "chunked") != "chunked":
        yield f"{META}: model_type = {info['model_type']!r}, but the packages are chunks"
    if parameters.get("prefill_dynamic_slice") is not True:
        yield f"{META}: without prefill_dynamic_slice: true, chat.py feeds prompts token by token"
    ending = ENDING.search(str(parameters.get("ffn")))
    chunks = parameters.get("num_chunks")
    if ending is None or (int(ending[1]), int(ending[2])) != (1, chunks):
        yield f"{META}: ffn = {parameters.get('ffn')!r} is not chunk 01 of {chunks}"


def check_sizes(sizes: FolderSizes, parameters: dict[str, Any]) -> Iterator[str]:
    """Problems of sizes that contradict each other."""
    if parameters.get("lm_head_chunk_sizes") not in (None, [sizes.rows] * sizes.parts):
        yield f"{META}: lm_head_chunk_sizes are not {sizes.parts} times {sizes.rows}"
    if sizes.window and sizes.window % sizes.batch:
        yield f"a batch of {sizes.batch} tokens does not divide the window of {sizes.window}"
    if 3 * sizes.batch > sizes.context:
        yield f"a context of {sizes.context} holds fewer than 3 batches of {sizes.batch} tokens"
    assumed = assumes_window(parameters["model_prefix"], sizes.context)
    if assumed and "sliding_window" not in parameters:
        yield (
            f"{META}: no sliding_window, so the app assumes {ASSUMED_WINDOW} for the prefix gemma3"
        )


def check_window(config: dict[str, Any], sizes: FolderSizes) -> Iterator[str]:
    """A problem if the window is not that of the model's sliding layers."""
    layers = config.get("layer_types")
    slides = isinstance(layers, list) and "sliding_attention" in layers
    own = config.get("sliding_window") if slides else None
    own = own if type(own) is int and own < sizes.context else None
    if own != sizes.window:
        yield f"{META}: sliding_window = {sizes.window}, but the model's is {own}"


def check_tokenizer(folder: Path) -> Iterator[str]:
    """Problems of the tokenizer's files, and of the stop tokens."""
    try:
        for name in ("tokenizer.json", "tokenizer_config.json"):  # the app makes neither of others
            read_json(folder / name)
        Tokenizer.load(folder)
    except CetaneError as error:
        yield error.message
    stop = read_json(folder / "config.json").get("eos_token_id")
    if not (type(stop) is int or (isinstance(stop, list) and stop)):
        yield f"config.json: eos_token_id = {stop!r}, so that no answer ends"


def chunk_names(parameters: dict[str, Any]) -> list[str]:
    """The names of all chunks, as the app derives them from that of the first."""
    count = parameters["num_chunks"]
    return [
        ENDING.sub(f"_chunk_{number + 1:02}of{count:02}.mlmodelc", parameters["ffn"])
        for number in range(count)
    ]


def check_packages(folder: Path, sizes: FolderSizes, names: list[str]) -> Iterator[str]:
    """Problems of the packages: embeddings, chunks, head."""
    listed = {Path(name).stem for name in names}
    for path in sorted(folder.glob("*_chunk_*of*.mlpackage")):
        if path.stem not in listed:
            yield f"{path.name}: chat.py would load it as a chunk"
    states: dict[str, str] = {}
    for number, name in enumerate(names):
        package = folder / f"{Path(name).stem}.mlpackage"
        if not package.is_dir():
            compiled = folder / name
            if not (compiled.is_dir() and any(compiled.iterdir())):
                yield f"{package.name} is missing"
            continue
        try:
            program = load(package)
        except CetaneError as error:
            yield f"{package.name}: {error.message}"
            continue
        checked = PackageCheck(package.name, sizes, program)
        if number == 0:
            yield from checked.embeddings()
        elif number == len(names) - 1:
            yield from checked.head()
        else:
            yield from checked.chunk(number, number == len(names) - 2, package)
            states |= checked.states
    if len(set(states.values())) > 1:
        listing = "; ".join(f"{where} {state}" for where, state in states.items())
        yield f"chunks declare different states, but share one: {listing}"


@dataclass
class PackageCheck:
    """The check of one package."""

    where: str
    sizes: FolderSizes
    program: Program
    states: dict[str, str] = field(default_factory=dict)
    """The states of every function, as text."""

    def embeddings(self) -> Iterator[str]:
        """Problems of the embeddings: they take one token, or a batch."""
        function = yield from self.only()
        if function is None:
            return
        ids = function.inputs.get("input_ids")
        wanted = ((1, 1), (1, self.sizes.batch))
        if ids is None or ids.dtype != "int32" or ids.default != (1, 1):
            yield f"{self.where}: input_ids is {ids}, not int32 (1, 1) by default"
        elif tuple(sorted(ids.enumerated)) != wanted:
            yield f"{self.where}: input_ids takes {ids.enumerated}, not {wanted}"
        made = function.outputs.get("hidden_states")
        if made is None or made.dtype != "fp16" or made.shape[-1:] != (self.sizes.hidden,):
            yield f"{self.where}: hidden_states is {made}, not fp16 (1, T, {self.sizes.hidden})"

    def head(self) -> Iterator[str]:
        """Problems of the head: its parts have equal size."""
        function = yield from self.only()
        if function is not None:
            hidden: dict[str, tuple[str, Shape]] = {
                "hidden_states": ("fp16", (1, 1, self.sizes.hidden))
            }
            yield from self.tensors(self.where, "input", hidden, function.inputs)
            yield from self.tensors(
                self.where, "output", self.sizes.head_outputs(), function.outputs
            )

    def only(self) -> Any:
        """The only function of a package; yields a problem if there are others."""
        if len(self.program.functions) != 1:
            yield f"{self.where}: functions {', '.join(sorted(self.program.functions))}, not one"
            return None
        return next(iter(self.program.functions.values()))

    def chunk(self, number: int, last: bool, package: Path) -> Iterator[str]:
        """Problems of a chunk."""
        marked = Package(package).spec.description.metadata.userDefined.get(CHUNK_NUMBER)
        if marked is not None and marked != str(number):
            yield f"{self.where}: holds chunk {marked}"
        wanted = dict(self.sizes.functions())
        for name in sorted(wanted.keys() - self.program.functions.keys()):
            yield f"{self.where}: no function {name}"
        for name in sorted(self.program.functions.keys() - wanted.keys()):
            yield f"{self.where}: no host calls {name} without a sliding_window in {META}"
        for name, tokens in wanted.items():
            function = self.program.functions.get(name)
            if function is None:
                continue
            where = f"{self.where}/{name}"
            alone = last and name.startswith("prefill")
            yield from self.tensors(where, "input", self.sizes.inputs(tokens), function.inputs)
            yield from self.tensors(
                where, "output", self.sizes.outputs(tokens, alone), function.outputs
            )
            yield from self.memory(where, function)

    def tensors(
        self, where: str, kind: str, wanted: dict[str, tuple[str, Shape]], there: dict[str, Any]
    ) -> Iterator[str]:
        """Inputs or outputs that are missing, that no host knows, or of another type."""
        for name in sorted(wanted.keys() - there.keys()):
            yield f"{where}: no {kind} {name}"
        for name in sorted(there.keys() - wanted.keys()):
            yield f"{where}: no host has the {kind} {name}"
        for name in sorted(wanted.keys() & there.keys()):
            dtype, shape = wanted[name]
            if (there[name].dtype, there[name].static_shape) != (dtype, shape):
                yield f"{where}: {name} is {there[name]}, not {dtype} {shape}"

    def memory(self, where: str, function: MilFunction) -> Iterator[str]:
        """Problems of a function's state and mask."""
        self.states[where] = ", ".join(f"{n} {t}" for n, t in sorted(function.states.items()))
        if set(function.states) != {STATE}:
            yield f"{where}: states {', '.join(sorted(function.states)) or 'none'}, not {STATE}"
            return
        *_, length = (0, *function.states[STATE].shape)
        if length != self.sizes.context:
            yield f"{where}: its state holds {length} tokens, not {self.sizes.context}"
        index = FunctionIndex(function)
        if not any(op.kind == WRITE for op in index.ops):
            yield f"{where}: writes no keys and values"
        readers = index.readers.get("causal_mask", [])
        used = [op for op in readers if any(v.name in index.readers for v in op.outputs)]
        if not all(op.kind in BOUNDS for op in used):
            yield f"{where}: its mask may hold minus infinity, which no op makes finite"
