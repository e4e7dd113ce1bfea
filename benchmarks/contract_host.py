"""The NumPy host of `cetane export --layout contract` gives the engine's tokens, in a process of
its own, for every cache contract. Without arguments: the two small trained models that come with
cetane, ZAYA with routed experts and Gemma 4 with windows and shared caches."""

import argparse
import subprocess
import sys
import time
from importlib import resources
from itertools import product
from pathlib import Path

import numpy as np

from cetane.bundle import Bundle
from cetane.checkpoint import Checkpoint, open_checkpoint
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


def built(checkpoint: Checkpoint, contract: str, name: str) -> Bundle:
    """A bundle with a cache contract; a ZAYA's runs chosen experts where it can."""
    routed = ["decode", "verify"] if checkpoint.config["model_type"] == "zaya" else []
    content = {
        "name": name,
        "layout": {"kind": "per-layer" if routed else "chunks", "routed": routed},
        "cache": {"contract": contract, "context": 128},
        "tokens": {"verify": 4, "prefill": 16},
        "head": {"slices": 2},
    }
    return bundle_of(checkpoint, parse_recipe(content, name))


def engine_tokens(bundle: Bundle, prompt: list[int], count: int) -> list[int]:
    """The engine's greedy answer."""
    engine = Engine(bundle.plan, PortableBackend(bundle), bundle.tables())
    stop = bundle.tokenizer.eos_ids
    return list(generate(engine.session(), prompt, Sampler(), count, stop))


def host_tokens(folder: Path, prompt: list[int], count: int) -> tuple[list[int], float]:
    """The host's greedy answer, in a process of its own, and the seconds that it took."""
    command = [sys.executable, "-m", "cetane.bridge", str(folder / "host.py"),
               *map(str, prompt), "--new", str(count)]  # fmt: skip
    started = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [int(token) for token in done.stdout.split()], time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help="Hugging Face folders, GGUF files or hub ids")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    options = parser.parse_args()
    data = resources.files("cetane") / "data"
    models = options.models or [str(data / "zaya-tiny"), str(data / "gemma-tiny")]
    rows, result = [], {}
    for model, contract in product(models, CONTRACTS):
        name = f"host-{Path(model).stem[:12]}-{contract}"
        bundle = built(open_checkpoint(model), contract, name)
        rng = np.random.default_rng(0)
        prompt = [int(t) for t in rng.integers(1, bundle.plan.vocab, PROMPT)]
        wanted = engine_tokens(bundle, prompt, options.tokens)
        folder = WORK / f"{name}-contract"
        remove(folder)
        export_contract(bundle.path, folder)
        given, seconds = host_tokens(folder, prompt, options.tokens)
        lines = len((folder / "host.py").read_text().splitlines())
        result[name] = {"equal": given == wanted, "tokens": len(given), "lines": lines}
        rows.append([Path(model).name[:24], contract, f"{len(given)} of {len(wanted)}",
                     given == wanted, lines, f"{seconds:.0f} s"])  # fmt: skip
        print(rows[-1], file=sys.stderr, flush=True)
    columns = ["model", "contract", "tokens", "equal", "lines", "time"]
    report("tokens of the NumPy host equal to the engine's", columns, rows, result, options.json)


if __name__ == "__main__":
    main()
