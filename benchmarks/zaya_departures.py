"""What each departure of the published ZAYA port costs, alone and with the others, in fp32.

The authored modules run in exact arithmetic. So only the departures are seen, no rounding and no
compression. The published port's recipes come last, still without their compression.
"""

import sys
from typing import Any

import numpy as np

from cetane.checkpoint import Checkpoint, open_checkpoint
from cetane.engine.authored import authored_engine
from cetane.engine.engine import Engine
from cetane.engine.generate import generate
from cetane.engine.sampling import Sampler
from cetane.families.zaya_departures import DEPARTURES
from cetane.gates import metrics
from cetane.gates.quality import read_tokens
from cetane.gates.reference import Observed, Reference
from cetane.planner import Planner
from cetane.schema.recipe import load_recipe, parse_recipe
from common import all_logits, arguments, report, standard_library_text

CONTEXT = 512
PUBLISHED = ("zaya-exp29-probe", "zaya-exp30", "zaya-exp31")
"""Experiments 34 and 35 are experiment 31 with other shapes and another compression."""


def variants() -> dict[str, list[str]]:
    """Departures by name of what is measured."""
    alone = {name: [name] for name in DEPARTURES}
    published = {name: load_recipe(name).family["departures"] for name in PUBLISHED}
    return {"none": []} | alone | published


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--tokens", type=int, default=2049, help="how much text")
    parser.add_argument("--prompt", default="try:\n    import foo\nexcept")
    options = parser.parse_args()
    checkpoint = open_checkpoint(options.model)
    tokens = read_tokens(checkpoint.tokenizer, standard_library_text(), options.tokens)
    windows = [tokens[i : i + CONTEXT] for i in range(0, len(tokens) - 1, CONTEXT)]
    reference = Reference(checkpoint)
    last = f"model.layers.{reference.model.config.num_hidden_layers - 1}", 0
    truths = [reference.run([window], [last])[0] for window in windows]
    truth = perplexity([t.logits for t in truths], windows)
    rows: list[list[Any]] = []
    result: dict[str, Any] = {"reference_perplexity": truth}
    for name, departures in variants().items():
        engine = port(checkpoint, departures)
        found = measure(engine, windows, truths)
        found["text"] = complete(engine, checkpoint, options.prompt)
        result[name] = found
        rows.append([name, *found.values()])
        print(f"{name}: {found}", file=sys.stderr)
    title = f"departures from ZAYA, reference perplexity {truth:.3f}, {len(tokens)} tokens"
    columns = ["departures", "perplexity", "KL", "top-1", f"after {options.prompt!r}"]
    report(title, columns, rows, result, options.json)


def port(checkpoint: Checkpoint, departures: list[str]) -> Engine:
    """The authored modules with some departures."""
    content = {
        "name": "departures",
        "family": {"departures": departures},
        "cache": {"context": CONTEXT},
        "tokens": {"verify": 0, "prefill": 64},
        "layout": {"kind": "single"},
    }
    return authored_engine(Planner(checkpoint, parse_recipe(content, "departures")), checkpoint)


def measure(engine: Engine, windows: list[list[int]], truths: list[Observed]) -> dict[str, Any]:
    """Agreement with the truth over all windows."""
    logits = [all_logits(engine.session(), window) for window in windows]
    ours = np.concatenate(logits)
    theirs = np.concatenate([t.logits for t in truths])
    return {
        "perplexity": perplexity(logits, windows),
        "kl": float(metrics.divergence(ours, theirs).mean()),
        "top1": float(metrics.contains_top(ours, theirs, 1).mean()),
    }


def perplexity(logits: list[Any], windows: list[list[int]]) -> float:
    losses = [
        -np.take_along_axis(metrics.log_softmax(rows[:-1]), np.asarray(window[1:])[:, None], 1)
        for rows, window in zip(logits, windows, strict=True)
    ]
    return float(np.exp(np.concatenate(losses).mean()))


def complete(engine: Engine, checkpoint: Checkpoint, prompt: str) -> str:
    """Greedy continuation of a prompt."""
    ids = checkpoint.tokenizer.encode(prompt)
    return checkpoint.tokenizer.decode(list(generate(engine.session(), ids, Sampler(), 24)))


if __name__ == "__main__":
    main()
