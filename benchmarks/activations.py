"""W8A8 and W4A8 of a whole model, by every way of calibrating: cosines of shards and perplexity on
documentation of Python's standard library, against the Hugging Face model.

What `cetane quantize-activations` does, for all rows of the table in
docs/explanation/activations.md.
"""

import sys

from cetane.activations import NAIVE, Options, quantize_activations, windows
from cetane.bundle import Bundle
from cetane.checkpoint import open_checkpoint
from cetane.gates.activations import LIMIT, Score, judge
from cetane.gates.quality import read_tokens
from cetane.schema.recipe import load_recipe
from common import WORK, arguments, bundle_of, report, standard_library_text

VARIANTS: dict[str, tuple[str, Options | None]] = {
    "W8A16": ("int8", None),
    "W8A8 naive": ("int8", NAIVE),
    "W8A8 real, last sample": ("int8", Options(ranges="last")),
    "W8A8 real": ("int8", Options()),
    "W8A8 real, SmoothQuant": ("int8", Options(smooth=True)),
    "W4A16": ("palette4", None),
    "W4A8 real": ("palette4", Options()),
}


def progress(what: str, done: int, total: int) -> None:
    print(f"{what} ({done}/{total})", file=sys.stderr)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    options = parser.parse_args()
    checkpoint = open_checkpoint(options.model)
    bundles: dict[str, Bundle] = {}
    for name in options.only:
        recipe, how = VARIANTS[name]
        bundles[name] = bundle_of(checkpoint, load_recipe(recipe))
        if how is not None:
            print(name, file=sys.stderr)
            target = WORK / name.lower().replace(",", "").replace(" ", "-")
            bundles[name], _ = quantize_activations(
                bundles[name], target, how, progress, checkpoint, force=True
            )
    first = next(iter(bundles.values()))
    ids = read_tokens(first.tokenizer, standard_library_text(), options.tokens)
    texts = windows(ids, first.plan.recipe.cache.context)
    scores = judge(bundles, checkpoint, texts, progress)
    shards = [score.shard for score in next(iter(scores.bundles.values())).shards]
    columns = ["what", *shards, "worst token", "perplexity", "KL", "top-1", "gate"]
    rows = [row(name, score) for name, score in scores.bundles.items()]
    title = f"{scores.tokens} tokens, the model's perplexity {scores.reference_perplexity:.3f}"
    report(title, columns, rows, scores.model_dump(mode="json"), options.json)


def row(name: str, score: Score) -> list[object]:
    """Mean cosines of the shards, the worst of any token, and the quality."""
    return [
        name,
        *(f"{shard.cosine:.4f}" for shard in score.shards),
        f"{min(shard.cosine_min for shard in score.shards):.4f}",
        score.perplexity,
        score.logits.kl,
        score.logits.top1,
        "pass" if score.cosine >= LIMIT else "FAIL",
    ]


if __name__ == "__main__":
    main()
