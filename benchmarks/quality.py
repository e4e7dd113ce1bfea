"""Size and quality of compressed bundles: the golden gate, and perplexity on documentation of
Python's standard library, each against the Hugging Face model."""

import sys

from cetane.checkpoint import open_checkpoint
from cetane.gates.golden import golden
from cetane.gates.quality import perplexity, read_tokens
from cetane.schema.recipe import load_recipe
from common import arguments, bundle_of, report, standard_library_text


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--recipes", nargs="+", default=["fp16", "int8", "default", "palette4"])
    parser.add_argument("--tokens", type=int, default=20_000)
    options = parser.parse_args()
    checkpoint = open_checkpoint(options.model)
    text = standard_library_text()

    def progress(what: str, done: int, total: int) -> None:
        print(f"{what} ({done}/{total})", file=sys.stderr)

    rows, result = [], {}
    for name in options.recipes:
        bundle = bundle_of(checkpoint, load_recipe(name))
        gate = golden(bundle, checkpoint, progress)
        tokens = read_tokens(bundle.tokenizer, text, options.tokens)
        quality = perplexity(bundle, checkpoint, tokens, progress)
        score = gate.logits[0]
        hidden = min(s.cosine for s in gate.shards)
        result[name] = {
            "weight_bytes": bundle.plan.weight_bytes,
            "passed": gate.passed,
            "hidden_cosine": hidden,
            "golden_kl": max(s.kl for s in gate.logits),
            "golden_top1": min(s.top1 for s in gate.logits),
            "golden_top5": min(s.top5 for s in gate.logits),
            "greedy": gate.greedy,
        } | quality.model_dump()
        rows.append([
            name, f"{bundle.plan.weight_bytes / 1e6:.0f}", "pass" if gate.passed else "FAIL",
            f"{hidden:.6f}", score.kl, score.top1, min(gate.greedy), quality.perplexity,
            quality.reference_perplexity, quality.top1,
        ])  # fmt: skip
    columns = ["recipe", "MB", "gate", "hidden cosine", "KL", "top-1", "greedy", "perplexity",
               "reference", "top-1 on text"]  # fmt: skip
    report(f"quality on {options.tokens} tokens", columns, rows, result, options.json)


if __name__ == "__main__":
    main()
