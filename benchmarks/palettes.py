"""Palette encoding against coremltools' k-means: time and squared error of one weight. And the time
for a whole mixture-of-experts layer of ZAYA1-8B (201 M weights), packed for the file."""

import argparse
import os
import statistics
import time
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import coremltools as ct
import coremltools.optimize.coreml as cto
import numpy as np
from coremltools.converters.mil import Builder as mb
from coremltools.converters.mil.mil import types

from cetane.compress import parse_format
from cetane.compress.encoded import Encoded, Palettized
from common import report

LAYER = [(4096, 2048)] * 16 + [(2048, 2048)] * 16
SHOWN = ("seconds_per_million", "seconds_per_million_coremltools", "ratio", "relative_mse")
"""The figures that the table shows."""
DRAWS: dict[str, Callable[[np.random.Generator, int], Any]] = {
    "gaussian": lambda rng, size: rng.normal(0, 0.02, size),
    "laplace": lambda rng, size: rng.laplace(0, 0.02, size),
    "student-t 4": lambda rng, size: 0.02 * rng.standard_t(4, size),
}


def model(weight: np.ndarray) -> Any:
    """A 1x1 convolution with this weight, as a Core ML model."""

    @mb.program(
        input_specs=[mb.TensorSpec((1, weight.shape[1], 1, 8), dtype=types.fp16)],
        opset_version=ct.target.iOS18,
    )
    def program(x: Any) -> Any:
        return mb.conv(x=x, weight=weight[:, :, None, None])

    return ct.convert(program, minimum_deployment_target=ct.target.iOS18, skip_model_load=True)


def theirs(weight: np.ndarray, bits: int, group: int) -> tuple[float, np.ndarray]:
    """Seconds that coremltools takes, and the weight that Core ML would make of its constants."""
    config = cto.OpPalettizerConfig(
        mode="kmeans",
        nbits=bits,
        granularity="per_grouped_channel",
        group_size=group,
        weight_threshold=0,
    )
    dense = model(weight)
    started = time.perf_counter()
    compressed = cto.palettize_weights(dense, cto.OptimizationConfig(global_config=config))
    seconds = time.perf_counter() - started
    function = compressed._mil_program.functions["main"]
    (op,) = function.find_ops(op_type="constexpr_lut_to_dense")
    return seconds, op.materialized_val_inference().reshape(weight.shape)


def ours(weight: np.ndarray, name: str) -> tuple[float, Encoded]:
    """Seconds to the bytes of the file, and the constants."""
    started = time.perf_counter()
    encoded = parse_format(name).encode(weight)
    if isinstance(encoded, Palettized):
        encoded.packed()
    return time.perf_counter() - started, encoded


def relative_error(weight: np.ndarray, decoded: np.ndarray) -> float:
    exact = weight.astype(np.float64)
    return float(((decoded - exact) ** 2).sum() / (exact**2).sum())


def beside_coremltools(bits: int, options: Namespace) -> dict[str, dict[str, float]]:
    """Times and errors of a weight of each of `DRAWS`, by its kind."""
    rng, shape = np.random.default_rng(0), (options.rows, 2048)
    millions, name = options.rows * 2048 / 1e6, f"palette{bits}-kmeans-group{options.group}"
    made = {}
    for kind, draw in DRAWS.items():
        weight = draw(rng, options.rows * 2048).astype(np.float16).reshape(shape)
        ours(weight, name)  # loads the kernels
        taken = statistics.median(ours(weight, name)[0] for _ in range(options.rounds))
        error = relative_error(weight, ours(weight, name)[1].decode())
        seconds, decoded = theirs(weight, bits, options.group)
        reference = relative_error(weight, decoded)
        made[kind] = {
            "seconds_per_million": taken / millions,
            "seconds_per_million_coremltools": seconds / millions,
            "ratio": seconds / taken,
            "relative_mse": error,
            "relative_mse_coremltools": reference,
            "relative_mse_ratio": error / reference,
        }
    return made


def layer_seconds(layer: list[np.ndarray], name: str, rounds: int) -> float:
    """The median time to encode and pack a whole layer."""
    ours(layer[0], name)  # loads the kernels
    return statistics.median(sum(ours(weight, name)[0] for weight in layer) for _ in range(rounds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    parser.add_argument("--bits", type=int, nargs="+", default=[4])
    parser.add_argument("--group", type=int, default=32)
    parser.add_argument("--rows", type=int, default=512, help="of 2048 weights, per distribution")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    rows: list[list[Any]] = []
    result: dict[str, Any] = {"cores": os.cpu_count()}
    for bits in options.bits:
        for kind, found in beside_coremltools(bits, options).items():
            result[f"palette{bits}-kmeans-group{options.group} {kind}"] = found
            against = f"{found['relative_mse_ratio'] - 1:+.1e}"
            rows.append([bits, kind, *(found[key] for key in SHOWN), against])
    columns = ["bits", "weights", "s per million", "coremltools", "faster", "relative MSE",
               "against theirs"]  # fmt: skip
    report(f"k-means palettes, group {options.group}", columns, rows, {}, False)

    rng = np.random.default_rng(0)
    layer = [(0.02 * rng.standard_normal(shape, np.float32)).astype(np.float16) for shape in LAYER]
    size = sum(weight.size for weight in layer) / 1e6
    rows = []
    for name in (f"palette4-kmeans-group{options.group}", f"palette4-uniform-group{options.group}",
                 "int8-per-channel"):  # fmt: skip
        taken = layer_seconds(layer, name, options.rounds)
        result[f"layer {name}"] = {"seconds": taken, "seconds_per_million": taken / size}
        rows.append([name, taken, taken / size])
    title = f"a layer of {size:.0f} M weights, with packing"
    report(title, ["format", "s", "s per million"], rows, result, options.json)


if __name__ == "__main__":
    main()
