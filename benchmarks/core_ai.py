"""Real models in Apple's Core AI runtime, on this CPU, against transformers.

    python benchmarks/core_ai.py MODEL BUNDLE [--write FOLDER] [--greedy N]

`BUNDLE` is a port of the checkpoint `MODEL`, with a context of a power of two. It is exported; the
asset reads a text and then writes `N` tokens greedily. Cosines are those of its logits to the
logits of transformers in fp32, whose weights are the checkpoint's. Nothing here is a speed: the
runtime interprets on a CPU. The last line is a row of docs/how-to/core-ai.md.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch

from cetane.bundle import Bundle
from cetane.checkpoint import open_checkpoint
from cetane.export.coreai import AssetRunner, export
from cetane.gates.probes import text_tokens
from cetane.gates.reference import reference_of

PLACES = (3, 11, 12, 80)


def measure(model: str, bundle: Bundle, greedy: int, folder: Path) -> None:
    """Export, run, and print one row."""
    checkpoint = open_checkpoint(model)
    reference = reference_of(checkpoint)
    tokens = list(text_tokens(bundle.tokenizer, PLACES[-1]))

    def judge(asset: Path) -> tuple[list[float], list[int]]:
        truth = reference.run([tokens])[0].logits
        cosines, fed = [], 0
        with AssetRunner(asset) as runner:
            for place in PLACES:
                logits, fed = runner.feed(tokens[fed:place]), place
                row = truth[place - 1]
                cosines.append(float(row @ logits / np.linalg.norm(row) / np.linalg.norm(logits)))
                print(f"after {place} tokens: cosine {cosines[-1]:.7f}", flush=True)
            answer = []
            for _ in range(greedy):
                answer.append(int(logits.argmax()))
                logits = runner.feed(answer[-1:])
        return cosines, answer

    target = folder / bundle.path.name
    warnings, (cosines, answer) = export(
        bundle, checkpoint, target, judge, lambda name, done, total: print(name, done, total)
    )
    with torch.no_grad():
        truth = reference.run([tokens + answer])[0].logits[len(tokens) - 1 : -1]
    same = sum(int(row.argmax()) == token for row, token in zip(truth, answer, strict=True))
    (asset,) = target.glob("*.aimodel")
    for warning in warnings:
        print("warning:", warning)
    worst = min(cosines)
    print(
        f"| {bundle.path.name} | {bundle.plan.recipe.compression.default} "
        f"| {worst:.6f} | {same} of {greedy} | {size(asset):.0f} MB | {size(bundle.path):.0f} MB |"
    )


def size(folder: Path) -> float:
    """Megabytes of a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--greedy", type=int, default=16)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.write or Path(scratch)
        measure(given.model, Bundle(given.bundle), given.greedy, folder)


if __name__ == "__main__":
    main()
