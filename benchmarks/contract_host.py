"""The NumPy host of `cetane export --layout contract` gives the engine's tokens, in a process of
its own, for every cache contract. Without arguments: the two small trained models that come with
cetane, ZAYA with routed experts and Gemma 4 with windows and shared caches."""

import argparse
import subprocess
import sys
import time
from importlib import resources
from pathlib import Path

import numpy as np

from cetane.checkpoint import open_checkpoint
from cetane.engine.engine import Engine
from cetane.engine.generate import generate
from cetane.engine.portable import PortableBackend
from cetane.engine.sampling import Sampler
from cetane.files import remove
from cetane.pipeline.export import export_contract
from cetane.schema.recipe import parse_recipe
from cetane.schema.slots import CONTRACTS
from common import WORK, bundle_of, report

PROMPT = 45
"""Tokens of the prompt: more than the window of the small Gemma, and no multiple of a width."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help="Hugging Face folders, GGUF files or hub ids")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    options = parser.parse_args()
    data = resources.files("cetane") / "data"
    models = options.models or [str(data / "zaya-tiny"), str(data / "gemma-tiny")]
    rows, result = [], {}
    for model in models:
        checkpoint = open_checkpoint(model)
        routed = ["decode", "verify"] if checkpoint.config["model_type"] == "zaya" else []
        for contract in CONTRACTS:
            name = f"host-{Path(model).stem[:12]}-{contract}"
            content = {
                "name": name,
                "layout": {"kind": "per-layer" if routed else "chunks", "routed": routed},
                "cache": {"contract": contract, "context": 128},
                "tokens": {"verify": 4, "prefill": 16},
                "head": {"slices": 2},
            }
            bundle = bundle_of(checkpoint, parse_recipe(content, name))
            rng = np.random.default_rng(0)
            prompt = [int(t) for t in rng.integers(1, bundle.plan.vocab, PROMPT)]
            engine = Engine(bundle.plan, PortableBackend(bundle), bundle.tables())
            stop = bundle.tokenizer.eos_ids
            wanted = list(
                generate(engine.session(), prompt, Sampler(), options.tokens, stop)
            )  # fmt: skip
            folder = WORK / f"{name}-contract"
            remove(folder)
            export_contract(bundle.path, folder)
            command = [sys.executable, "-m", "cetane.bridge", str(folder / "host.py"),
                       *map(str, prompt), "--new", str(options.tokens)]  # fmt: skip
            started = time.perf_counter()
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            given = [int(token) for token in done.stdout.split()]
            lines = len((folder / "host.py").read_text().splitlines())
            result[name] = {"equal": given == wanted, "tokens": len(given), "lines": lines}
            seconds = time.perf_counter() - started
            rows.append([Path(model).name[:24], contract, f"{len(given)} of {len(wanted)}",
                         given == wanted, lines, f"{seconds:.0f} s"])  # fmt: skip
            print(rows[-1], file=sys.stderr, flush=True)
    columns = ["model", "contract", "tokens", "equal", "lines", "time"]
    report("tokens of the NumPy host equal to the engine's", columns, rows, result, options.json)


if __name__ == "__main__":
    main()
