"""The folder of `cetane export --layout anemll`, played by ANEMLL's own rules: every greedy token
is transformers' choice, past a window and past the end of the context.

    PYTHONPATH=. python benchmarks/anemll_host.py MODEL MODEL --context 512 1024

Each token is compared with transformers' logits for the tokens that the host has in its context.
Weights are rounded to fp16 on both sides. A token differs only if its logit is not the largest;
`tie` is the largest distance of such a logit.
"""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

import cetane.bridge
from cetane.checkpoint import Checkpoint, open_checkpoint
from cetane.export.anemll import check, export
from cetane.export.anemll.host import ChatHost, Folder
from cetane.schema.recipe import parse_recipe
from common import WORK, report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+", help="Hugging Face folders, GGUF files or hub ids")
    parser.add_argument("--context", type=int, nargs="+", default=[512, 1024])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--beyond", type=int, default=64, help="tokens after the context is full")
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    options = parser.parse_args()
    WORK.mkdir(parents=True, exist_ok=True)
    rows, result = [], {}
    for model in options.models:
        checkpoint = open_checkpoint(model)
        for context in options.context:
            one = played(checkpoint, context, options.batch, options.beyond)
            result[f"{checkpoint.model_name}-{context}"] = one
            rows.append([checkpoint.model_name[:30], context, *one.values()])
            print(rows[-1], file=sys.stderr, flush=True)
    columns = ["model", "context", "window", "prompt", "tokens", "kept at the end", "different",
               "tie", "problems", "seconds"]  # fmt: skip
    title = "tokens of the played ANEMLL host that are not transformers' greedy choice"
    report(title, columns, rows, result, options.json)


def played(checkpoint: Checkpoint, context: int, batch: int, beyond: int) -> dict[str, Any]:
    """Export a model, play it past the end of its context, and compare every token."""
    name = f"anemll-{checkpoint.model_name.replace('/', '-')}-{context}"
    recipe = parse_recipe(
        {
            "name": name,
            "layout": {"kind": "chunks", "chunks": 2},
            "cache": {"context": context},
            "tokens": {"prefill": batch},
        },
        name,
    )
    folder = WORK / name
    if not folder.is_dir():
        export(recipe, checkpoint, folder, lambda what, *_: print(what, file=sys.stderr))
    length = context * 2 // 3 + 17  # past a window of 512, and no multiple of a batch
    host = opened(folder)
    started = time.perf_counter()
    steps = host.generate(text_tokens(checkpoint, length), context - 2 - length + beyond)
    seconds = time.perf_counter() - started
    different, tie = compared(checkpoint, steps)
    return {
        "window": host.folder.window, "prompt": length, "tokens": len(steps),
        "kept": host.shifts, "different": different, "tie": tie,
        "problems": len(check(folder)), "seconds": round(seconds, 1),
    }  # fmt: skip


def text_tokens(checkpoint: Checkpoint, count: int) -> list[int]:
    """Tokens of prose, repeated as often as needed."""
    text = Path(__file__).parents[1] / "docs" / "tutorial.md"
    ids = checkpoint.tokenizer.encode(text.read_text())
    return (ids * (count // len(ids) + 1))[:count]


def opened(folder: Path) -> ChatHost:
    """The folder on the bridge."""
    cetane.bridge.install()
    import coremltools as ct

    return ChatHost(Folder(folder, lambda path, f: ct.models.MLModel(str(path), function_name=f)))


@torch.inference_mode()
def compared(checkpoint: Checkpoint, steps: list[tuple[list[int], int]]) -> tuple[int, float]:
    """The number of tokens that transformers would not choose, and their largest distance."""
    config = dict(checkpoint.config)
    settings = transformers.AutoConfig.for_model(config.pop("model_type"), **config)
    model = transformers.AutoModelForCausalLM.from_config(settings, dtype=torch.float32).eval()
    for name, tensor in model.state_dict().items():
        if name in checkpoint:
            tensor.copy_(checkpoint.read(name).half().float())
    model.tie_weights()
    wrong, tie, start = 0, 0.0, 0
    while start < len(steps):  # one run for all steps in which the context only grows
        stop = start + 1
        while stop < len(steps) and len(steps[stop][0]) == len(steps[stop - 1][0]) + 1:
            stop += 1
        first, longest = len(steps[start][0]), steps[stop - 1][0]
        logits = model(torch.tensor([longest]), use_cache=False).logits[0, first - 1 :].numpy()
        for row, (_, token) in zip(logits, steps[start:stop], strict=True):
            if int(row.argmax()) != token:
                wrong, tie = wrong + 1, max(tie, float(row.max() - row[token]))
        start = stop
    return wrong, tie


if __name__ == "__main__":
    np.seterr(all="ignore")
    main()
