"""Two builders into one output, one after the other by a lag, of one recipe and of two.

One builds, the other is told who does, and the bundle is whole.

python benchmarks/two_builders.py [--runs 50]
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from tests.conftest import build_model, build_tokenizer, tiny_recipe

from cetane.bundle import Bundle
from cetane.checkpoint import Checkpoint, open_checkpoint
from cetane.errors import CetaneError
from cetane.pipeline.build import build
from cetane.schema.recipe import Recipe

LAGS = (0.0, 0.2, 0.5, 1.0, 2.0)
"""Seconds."""


def started(checkpoint: Checkpoint, recipe: Recipe, target: Path, lag: float, said: Path) -> int:
    """A process that waits, builds, and writes what came of it; its id."""
    child = os.fork()
    if child:
        return child
    time.sleep(lag)
    try:
        build(checkpoint, recipe, target, lambda *_: None)
        said.write_text("built")
    except CetaneError as error:
        said.write_text(error.message)
    except BaseException as error:
        said.write_text(f"{type(error).__name__}: {error}")
    os._exit(0)


def command(*arguments: str) -> int:
    """A command of cetane in a process of its own, which is forked: nothing is imported again."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    from cetane.cli import main

    sys.argv = ["cetane", *arguments]
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    try:
        main()
    except SystemExit as end:
        os._exit(int(end.code or 0))
    os._exit(1)


def run(checkpoint: Checkpoint, recipes: list[Recipe], lag: float, root: Path) -> tuple[str, str]:
    """What became of two builders, and what is wrong with it, if anything is."""
    folder = Path(tempfile.mkdtemp(dir=root))
    target, said = folder / "out", [root / "first", root / "second"]
    children = [
        started(checkpoint, recipe, target, wait, file)
        for recipe, wait, file in zip(recipes, (0.0, lag), said, strict=True)
    ]
    for child in children:
        os.waitpid(child, 0)
    ends = [file.read_text() for file in said]
    told = [f"is being written by process {child} " for child in reversed(children)]
    kinds = [
        "built" if end == "built" else "told who builds" if who in end
        else "told that another one is there" if "is a bundle of another" in end else end
        for end, who in zip(ends, told, strict=True)
    ]  # fmt: skip
    bundle = Bundle(target)
    bundle.verify()
    makers = [r for r, kind in zip(recipes, kinds, strict=True) if kind == "built"]
    wrong = [
        what
        for what, holds in {
            "nobody built": makers,
            "a mixed recipe": bundle.plan.recipe in makers,
            "two built two recipes": len({recipe.name for recipe in makers}) == 1,
            "something is left": [path.name for path in folder.iterdir()] == ["out"],
            "info fails": command("info", str(target)) == 0,
            "run fails": command("run", str(target), "--max-new", "2", "hello") == 0,
        }.items()
        if not holds
    ]
    return f"{kinds[0]}; {kinds[1]}", ", ".join(wrong)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=50)
    options = parser.parse_args()
    torch.set_num_threads(1)
    ends: dict[str, Counter[str]] = {}
    problems = []
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        os.environ["CETANE_CACHE"] = str(root / "cache")
        build_model("llama").save_pretrained(root / "model")
        build_tokenizer().save_pretrained(root / "model")
        checkpoint = open_checkpoint(root / "model")
        one = tiny_recipe(verify=None, prefill=None, layout={"kind": "per-block"}, context=64)
        other = one.model_copy(update={"name": "other", "tensor_layout": "ct1"})
        for number in range(options.runs):
            lag = LAGS[number % len(LAGS)]
            same = number // len(LAGS) % 2 == 0
            what, wrong = run(checkpoint, [one, one if same else other], lag, root)
            key = f"{lag:g} s, {'one recipe' if same else 'two recipes'}"
            ends.setdefault(key, Counter())[what] += 1
            problems += [f"{key}: {wrong}"] if wrong else []
            print(json.dumps([key, what, wrong]), flush=True)
    print("| lag, recipes | what became of the first and the second | runs |\n| --- | --- | ---: |")
    for key, counted in ends.items():
        for what, count in counted.items():
            print(f"| {key} | {what} | {count} |")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
