"""Every cache contract and every layout gives transformers' own greedy tokens, in fp16."""

import sys
import time
from typing import Any

from cetane.checkpoint import open_checkpoint
from cetane.engine.generate import generate
from cetane.engine.open import open_engine
from cetane.engine.sampling import Sampler
from cetane.gates.probes import chat_prompts
from cetane.gates.reference import Reference
from cetane.schema.recipe import parse_recipe
from common import agreement, arguments, bundle_of, report

VARIANTS = [
    ("chunks", "readonly"), ("chunks", "blend"), ("chunks", "shift"), ("chunks", "stateful"),
    ("per-block", "readonly"), ("single", "readonly"),
]  # fmt: skip


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=5)
    options = parser.parse_args()
    checkpoint = open_checkpoint(options.model)
    reference = Reference(checkpoint)
    rows: list[list[Any]] = []
    result: dict[str, Any] = {}
    for layout, contract in VARIANTS:
        name = f"{layout}-{contract}"
        content = {"name": name, "layout": {"kind": layout}, "cache": {"contract": contract},
                   "head": {"slices": 2}}  # fmt: skip
        bundle = bundle_of(checkpoint, parse_recipe(content, name))
        engine = open_engine(bundle, "portable")
        started = time.perf_counter()
        shares = []
        for prompt in chat_prompts(bundle.tokenizer, options.prompts):
            tokens = list(
                generate(engine.session(["decode", "prefill"]), prompt, Sampler(), options.tokens)
            )
            shares.append(agreement(reference, prompt, tokens))
            print(f"{name}: {shares[-1]:.3f}", file=sys.stderr)
        result[name] = {"agreement": shares, "equal": min(shares) == 1.0}
        rows.append([layout, contract, min(shares), f"{time.perf_counter() - started:.0f} s"])
    result["all_equal"] = all(entry["equal"] for entry in list(result.values()))
    title = f"greedy tokens equal to transformers', {options.prompts} x {options.tokens}"
    report(title, ["layout", "contract", "worst prompt", "time"], rows, result, options.json)


if __name__ == "__main__":
    main()
