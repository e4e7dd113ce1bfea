"""coremltools' W8A8 of one shard's decode function, calibrated and executed through the bridge.

Outputs are compared with the fp16 program's on tokens that calibration has not seen. Calibration by
random numbers is what examples do; by real tokens is what a port would have to do.
"""

import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from pytest import MonkeyPatch

from cetane import bridge
from cetane.bundle import Bundle
from cetane.checkpoint import open_checkpoint
from cetane.engine.backend import Arrays, Program
from cetane.engine.engine import Engine
from cetane.engine.generate import generate
from cetane.engine.portable import PortableBackend
from cetane.engine.sampling import Sampler
from cetane.gates.probes import chat_prompts
from cetane.lower.package import single_function
from cetane.mil import load
from cetane.quiet import import_coremltools
from cetane.recipe import load_recipe
from common import arguments, bundle_of, report

ct = import_coremltools()
import coremltools.optimize.coreml as cto  # noqa: E402
from coremltools.optimize.coreml.experimental import (  # noqa: E402
    _post_training_quantization,
    linear_quantize_activations,
)
from coremltools.optimize.coreml.experimental._model_debugger import (  # noqa: E402
    ModelDebugger,
)

CALIBRATING = 3
"""Of the chat prompts, how many calibrate; the others are held out."""
TOKENS, STRIDE = 25, 6
"""Tokens that are made for a prompt, and how far apart the sampled steps are."""
NAIVE = 5
"""Random samples (ane-book, experiment 3.9 with Gemma 4)."""

VARIANTS = [  # calibration, whether additions are quantized too, the samples whose ranges count
    ("none", False, "-"),
    ("random", True, "last"),
    ("real", True, "last"),
    ("random", False, "last"),
    ("real", False, "last"),
    ("real", False, "all"),
]

Samples = list[Arrays]


class Recorder:
    """A portable backend that keeps the inputs of every call of one function."""

    name = PortableBackend.name

    def __init__(self, bundle: Bundle, shard: str, function: str) -> None:
        self.backend = PortableBackend(bundle)
        self.dtype = self.backend.dtype
        self.shard, self.function = shard, function
        self.samples: Samples = []

    def open(self, shard: str) -> Program:
        program = self.backend.open(shard)
        call = program.call

        def recorded(function: str, inputs: Arrays, state: Any) -> Arrays:
            if (shard, function) == (self.shard, self.function):
                self.samples.append({name: value.copy() for name, value in inputs.items()})
            return call(function, inputs, state)

        program.call = recorded  # type: ignore[method-assign]
        return program


def real_samples(bundle: Bundle, shard: str) -> tuple[Samples, Samples]:
    """Inputs of a shard's decode function while chat prompts are answered: those that calibrate,
    and those that are held out."""
    recorder = Recorder(bundle, shard, "decode")
    engine = Engine(bundle.plan, recorder, bundle.tables())
    parts: tuple[Samples, Samples] = [], []
    for index, prompt in enumerate(chat_prompts(bundle.tokenizer, 5)):
        recorder.samples.clear()
        list(generate(engine.session(["decode", "prefill"]), prompt, Sampler(), TOKENS))
        parts[index >= CALIBRATING].extend(recorder.samples[::STRIDE])
    return parts


def random_samples(like: Arrays) -> Samples:
    draw = np.random.default_rng(0)
    return [
        {name: draw.standard_normal(value.shape, np.float32) for name, value in like.items()}
        for _ in range(NAIVE)
    ]


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder for all that coremltools leaves behind: a package for every model it opens."""
    with tempfile.TemporaryDirectory() as folder, MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


@contextmanager
def ranges_of_all_samples() -> Iterator[None]:
    """coremltools 9 overwrites a tensor's range with every sample, so that the last one decides;
    here it grows."""

    def record(value: Any, name: str, ranges: dict[str, dict[str, float]]) -> None:
        known = ranges[name]
        known["rmin"] = min(np.min(value), known.get("rmin", np.inf))
        known["rmax"] = max(np.max(value), known.get("rmax", -np.inf))

    with MonkeyPatch.context() as patch:
        patch.setattr(ModelDebugger, "record_intermediate_output", staticmethod(record))
        patch.setattr(
            _post_training_quantization,
            "_update_tensor_range",
            lambda name, value, ranges: record(value, name, ranges),
        )
        yield


def w8a8(model: Any, samples: Samples, additions: bool) -> Any:
    """Symmetric int8 activations of convolutions, and of additions or not; int8 weights."""
    symmetric = cto.OpLinearQuantizerConfig(mode="linear_symmetric")
    activations = cto.OptimizationConfig(
        global_config=symmetric, op_type_configs={} if additions else {"add": None}
    )
    return w8(linear_quantize_activations(model, activations, samples))


def w8(model: Any) -> Any:
    """Symmetric int8 weights, a scale for each output channel."""
    config = cto.OpLinearQuantizerConfig(mode="linear_symmetric")
    return cto.linear_quantize_weights(model, cto.OptimizationConfig(global_config=config))


def measure(model: Any, samples: Samples, truth: Samples, folder: Path) -> dict[str, Any]:
    """A quantized model as a package, and against the outputs that it should give."""
    path = folder / "quantized.mlpackage"
    model.save(str(path))
    kinds = Counter(op.kind for op in load(path).functions["main"].ops)
    outputs = [model.predict(sample) for sample in samples]
    result: dict[str, Any] = {
        "megabytes": sum(f.stat().st_size for f in path.rglob("*") if f.is_file()) / 1e6,
        "quantize": kinds["quantize"],
        "dequantize": kinds["dequantize"],
        "outputs": {},
    }
    for name in truth[0]:
        found, true = (np.stack([o[name].ravel() for o in some]) for some in (outputs, truth))
        lengths = np.linalg.norm(found, axis=1), np.linalg.norm(true, axis=1)
        cosine = (found * true).sum(1) / np.maximum(lengths[0] * lengths[1], 1e-30)
        error = np.linalg.norm(found - true, axis=1) / lengths[1]
        result["outputs"][name] = {"cosine": cosine.min().item(), "error": error.max().item()}
    return result


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--shard", default="chunk-00")
    options = parser.parse_args()
    bundle = bundle_of(open_checkpoint(options.model), load_recipe("fp16"))
    real, held_out = real_samples(bundle, options.shard)
    samples = {"random": random_samples(real[0]), "real": real}
    bridge.install()
    results = []
    for calibration, additions, ranges in VARIANTS:
        print(f"calibration {calibration}, additions {additions}, {ranges}", file=sys.stderr)
        with temporary_folder() as folder:
            model = single_function(bundle.shard(options.shard), "decode")
            truth = [model.predict(sample) for sample in held_out]
            started = time.perf_counter()
            if calibration == "none":
                quantized = w8(model)
            else:
                with ranges_of_all_samples() if ranges == "all" else nullcontext():
                    quantized = w8a8(model, samples[calibration], additions)
            seconds = time.perf_counter() - started
            result = measure(quantized, held_out, truth, folder)
        results.append({
            "calibration": calibration, "samples": len(samples.get(calibration, [])),
            "additions": additions, "ranges": ranges, "seconds": seconds,
        } | result)  # fmt: skip
    title = f"{options.shard}/decode in W8A8 against fp16, worst of {len(held_out)} held-out steps"
    columns = [
        "calibration",
        "ranges",
        "quantized",
        "cosine",
        "error",
        "of all",
        "q, dq",
        "MB",
        "s",
    ]
    whole = {"shard": options.shard, "held_out": len(held_out), "variants": results}
    report(title, columns, [row(result) for result in results], whole, options.json)


def row(result: dict[str, Any]) -> list[Any]:
    """The first output, which is what the shard hands on, and the worst cosine of all."""
    outputs = list(result["outputs"].values())
    return [
        f"{result['samples']} {result['calibration']}" if result["samples"] else "weights only",
        result["ranges"],
        "conv, add" if result["additions"] else "conv",
        f"{outputs[0]['cosine']:.4f}",
        outputs[0]["error"],
        f"{min(output['cosine'] for output in outputs):.4f}",
        f"{result['quantize']}, {result['dequantize']}",
        f"{result['megabytes']:.1f}",
        f"{result['seconds']:.0f}",
    ]


if __name__ == "__main__":
    main()
