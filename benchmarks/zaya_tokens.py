"""fp16 programs of a ZAYA against transformers: experts in one graph and routed, T = 1 and T = 4.

Every program rounds as an fp16 machine would. Decoding takes its own tokens, one at a time; the
calls of four read the same text, and must choose the same next tokens.
"""

import time
from typing import Any

import numpy as np

from cetane.checkpoint import open_checkpoint
from cetane.engine.engine import Engine
from cetane.engine.generate import generate
from cetane.engine.portable import PortableBackend
from cetane.engine.sampling import Sampler
from cetane.gates.golden import golden
from cetane.gates.reference import Reference, would_choose
from cetane.schema.recipe import Recipe, load_recipe
from common import agreement, all_logits, arguments, bundle_of, report

PROMPTS = ("def __init__(self", "import os\n", "class Parser:\n    ", "    for name in ")


def recipes() -> dict[str, Recipe]:
    """The shipped layouts, with fp16 weights and a context that is soon full."""
    made = {}
    for kind, name in (("dense", "zaya-int4"), ("routed", "zaya-routed")):
        content = load_recipe(name).model_dump(exclude={"compression"})
        content |= {"name": f"zaya-fp16-{kind}", "cache": {"context": 512}}
        made[kind] = Recipe.model_validate(content)
    return made


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--tokens", type=int, default=128)
    options = parser.parse_args()
    checkpoint = open_checkpoint(options.model)
    reference = Reference(checkpoint)
    rows: list[list[Any]] = []
    result: dict[str, Any] = {}
    for kind, recipe in recipes().items():
        bundle = bundle_of(checkpoint, recipe)
        gate = golden(bundle, checkpoint, lambda *_: None, prompts=0)
        cosine = min(score.cosine for score in gate.shards)
        engine = Engine(bundle.plan, PortableBackend(bundle, "fp16"), bundle.tables())
        found: dict[str, Any] = {"cosine": cosine, "decode": [], "verify": []}
        started = time.perf_counter()
        for prompt in PROMPTS:
            ids = bundle.tokenizer.encode(prompt)
            tokens = list(generate(engine.session(["decode"]), ids, Sampler(), options.tokens))
            found["decode"].append(agreement(reference, ids, tokens))
            logits = all_logits(engine.session(["verify", "decode"]), [*ids, *tokens])
            found["verify"].append(float(would_choose(logits, ids, tokens).mean()))
        found["seconds"] = time.perf_counter() - started
        result[kind] = found
        rows.append([kind, cosine, min(found["decode"]), min(found["verify"]), found["seconds"]])
    columns = [
        "experts",
        "smallest cosine",
        "T = 1, worst prompt",
        "T = 4, worst prompt",
        "seconds",
    ]
    title = f"greedy tokens equal to transformers', {len(PROMPTS)} x {options.tokens}"
    result["equal"] = all(
        np.min(found["decode"]) == np.min(found["verify"]) == 1.0 for found in result.values()
    )
    report(title, columns, rows, result, options.json)


if __name__ == "__main__":
    main()
