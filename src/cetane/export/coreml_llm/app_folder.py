"""What CoreML-LLM's runtime reads of a folder (`ChunkedEngine.swift` at 72178c6)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cetane.engine.portable import in_fp32
from cetane.export.coreml_llm.contract import (
    CHUNKS,
    DECODE,
    FULL,
    KINDS,
    PREFILL,
    SLIDING,
    VERIFY,
    caches,
    is_there,
    numbered_keys,
)
from cetane.files import read_json
from cetane.mil import MilFunction, Program, load

Array = npt.NDArray[Any]
Arrays = dict[str, Array]
RunFunction = Callable[[str, str, Arrays], Mapping[str, Array]]
"""`call(package, function, inputs)`: its outputs."""
LETTERS = {SLIDING: "s", FULL: "f"}


@dataclass(frozen=True)
class AppFolder:
    """What the runtime knows of a folder."""

    call: RunFunction
    chunks: Sequence[str]
    """The packages that decode."""
    embed: Callable[[int], Array]
    """A token's row of the embedding, `(C,)`."""
    per_layer: Callable[[int], Array]
    """A token's rows for all layers, `(L * P,)`."""
    rotary: Mapping[str, Array]
    """Cosines and sines `(positions, D)`, as `cos_sliding`."""
    context: int
    window: int
    kinds: Sequence[str]
    """The kinds of the layers that have caches."""
    owned: Sequence[int]
    """The number of these layers in each chunk."""
    heads: int = 1
    """Heads of keys and values."""
    prefilled: int = 0
    """The number of these layers in the first package that prefills."""
    prefill_tokens: int = 0
    """Tokens of a prefill; 0 without its packages."""
    verify_tokens: int = 0
    """Tokens of a call that verifies; 0 if the chunks only decode."""


class AppPackages:
    """The packages of a folder, on cetane's executor in fp32."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.programs: dict[str, Program] = {}
        self.opened: dict[str, Any] = {}

    def program(self, package: str) -> Program:
        if package not in self.programs:
            self.programs[package] = load(self.path / f"{package}.mlpackage")
        return self.programs[package]

    def __call__(self, package: str, function: str, inputs: Arrays) -> Mapping[str, Array]:
        if (package in PREFILL) != any(other in PREFILL for other in self.opened):
            self.opened.clear()  # the weights of one mode are in memory at a time
        if package not in self.opened:
            self.opened[package] = in_fp32(self.program(package))
        types = self.program(package).functions[function].inputs
        given = shaped({name: type_.shape for name, type_ in types.items()}, inputs)
        made: Mapping[str, Array] = self.opened[package].call(function, given, None)
        return made


def shaped(shapes: Mapping[str, Sequence[Any]], inputs: Mapping[str, Array]) -> Arrays:
    """What a function takes of what the runtime has, in its shapes."""
    return {
        name: np.asarray(inputs[name], np.float32).reshape(tuple(shape))
        for name, shape in shapes.items()
    }


class AppRows:
    """A table of int8 rows, each with a scale in fp16."""

    def __init__(self, folder: Path, name: str, channels: int, factor: float) -> None:
        values = np.memmap(folder / f"{name}_q8.bin", np.int8, "r")
        self.values, self.factor = values.reshape(-1, channels), factor
        self.scales = np.memmap(folder / f"{name}_scales.bin", np.float16, "r")

    def __call__(self, token: int) -> Array:
        scale = np.float32(self.scales[token]) / 127
        row: Array = self.values[token].astype(np.float32) * scale * self.factor
        return row


def read_folder(path: Path) -> AppFolder:
    """A folder that `check` has found right, in the layout that the runtime takes first."""
    config = read_json(path / "model_config.json")
    layers = [KINDS[kind] for kind in config["layer_types"]]
    chunks = next(names for names in CHUNKS.values() if is_there(path, names[-1]))
    packages = AppPackages(path)
    functions = [packages.program(name).functions for name in chunks]
    decoding = [own[DECODE if DECODE in own else "main"] for own in functions]
    verify = functions[0].get(VERIFY)
    prefilled = prefill_tokens = 0
    if is_there(path, PREFILL[0]):
        first = packages.program(PREFILL[0]).functions["main"]
        prefilled = numbered_keys(first)
        prefill_tokens = width(first)
    channels = config["num_layers"] * config["per_layer_dim"]
    return AppFolder(
        call=packages,
        chunks=chunks,
        embed=AppRows(path, "embed_tokens", config["hidden_size"], config["embed_scale"]),
        per_layer=AppRows(
            path, "embed_tokens_per_layer", channels, config["per_layer_embed_scale"]
        ),
        rotary={
            f"{part}_{kind}": np.load(path / f"{part}_{kind}.npy", "r")
            for part in ("cos", "sin")
            for kind in LETTERS
        },
        context=config["context_length"],
        window=config["sliding_window"],
        kinds=layers[: len(layers) - config["num_kv_shared_layers"]],
        owned=[sum(caches(function).values()) for function in decoding],
        heads=config["num_key_value_heads"],
        prefilled=prefilled,
        prefill_tokens=prefill_tokens,
        verify_tokens=width(verify) if verify else 0,
    )


def width(function: MilFunction) -> int:
    """The tokens of a call."""
    tokens = function.inputs["hidden_states"].shape[1]
    assert isinstance(tokens, int)
    return tokens
