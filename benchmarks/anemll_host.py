"""The folder of `cetane export --layout anemll`, played by ANEMLL's own rules: every greedy token
is transformers' choice, past a window and past the end of the context.

    PYTHONPATH=. python benchmarks/anemll_host.py MODEL --context 1024

Each token is compared with transformers' logits for the tokens that the host has in its context.
Weights are rounded to fp16 on both sides. A token differs only if its logit is not the largest;
`tie` is the largest distance of such a logit.
"""

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tests.export.anemll_host import Folder, Host

import cetane.bridge
from cetane.checkpoint import Checkpoint, open_checkpoint
from cetane.export.anemll import check, export
from cetane.schema.recipe import parse_recipe
from common import WORK, arguments, report


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--prompt", type=int, help="tokens; by default past two thirds")
    parser.add_argument("--beyond", type=int, default=64, help="tokens after the first shift")
    options = parser.parse_args()
    checkpoint = open_checkpoint(options.model)
    name = f"anemll-{Path(options.model).stem[:16]}-{options.context}"
    recipe = parse_recipe(
        {
            "name": name,
            "layout": {"kind": "chunks", "chunks": 2},
            "cache": {"context": options.context},
            "tokens": {"prefill": options.batch},
        },
        name,
    )
    folder = WORK / name
    WORK.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    if not folder.is_dir():
        export(recipe, checkpoint, folder, lambda what, *_: print(what, file=sys.stderr))
    problems = check(folder)
    made = time.perf_counter() - started
    length = options.prompt or options.context * 2 // 3 + 17
    prompt = text_tokens(checkpoint, length)
    host = opened(folder)
    started = time.perf_counter()
    count = options.context - 2 - length + options.beyond
    steps = host.generate(prompt, count)
    played = time.perf_counter() - started
    wrong, tie = compared(checkpoint, steps)
    window = host.folder.window
    result: dict[str, Any] = {
        "problems": problems, "tokens": count, "different": wrong, "tie": tie,
        "shifts": host.shifts, "window": window,
    }  # fmt: skip
    report(
        "tokens of the played ANEMLL host that differ from transformers' greedy choice",
        ["model", "context", "window", "prompt", "tokens", "kept at the end", "different", "tie",
         "export", "run"],
        [[Path(options.model).name[:30], options.context, window or "-", length, count,
          host.shifts, wrong, tie, f"{made:.0f} s", f"{played:.0f} s"]],
        result,
        options.json,
    )  # fmt: skip


def text_tokens(checkpoint: Checkpoint, count: int) -> list[int]:
    """Tokens of prose, repeated as often as needed."""
    text = Path(__file__).parents[1] / "docs" / "tutorial.md"
    ids = checkpoint.tokenizer.encode(text.read_text())
    return (ids * (count // len(ids) + 1))[:count]


def opened(folder: Path) -> Host:
    """The folder on the bridge."""
    cetane.bridge.install()
    import coremltools as ct

    return Host(Folder(folder, lambda path, f: ct.models.MLModel(str(path), function_name=f)))


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
