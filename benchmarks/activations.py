"""W8A8 and W4A8 of a whole model, by every way of calibrating: cosines of shards and perplexity on
documentation of Python's standard library, against the Hugging Face model.

What `cetane quantize-activations` does, for all rows of the table in
docs/explanation/activations.md.
"""

import sys

from cetane.activations import NAIVE, Options, quantize_activations
from cetane.bundle import Bundle
from cetane.checkpoint import Checkpoint, open_checkpoint
from cetane.gates.activations import ActivationScores, judge, judge_score
from cetane.gates.probes import windows
from cetane.gates.quality import read_tokens
from cetane.planner import as_recipe_asks
from cetane.schema.changes import override
from cetane.schema.recipe import load_recipe
from common import WORK, arguments, bundle_of, report, standard_library_text

ALL, INPUTS = Options(tensors="all"), Options()
VARIANTS: dict[str, tuple[str, bool, Options | None]] = {
    "W8A16": ("int8", False, None),
    "W8A8 naive": ("int8", False, NAIVE),
    "W8A8 all, last sample": ("int8", False, ALL.model_copy(update={"ranges": "last"})),
    "W8A8 all": ("int8", False, ALL),
    "W8A8 all, SmoothQuant": ("int8", False, ALL.model_copy(update={"smooth": True})),
    "W8A8 inputs": ("int8", False, INPUTS),
    "W8A16 turned": ("int8", True, None),
    "W8A8 turned, all": ("int8", True, ALL),
    "W8A8 turned, inputs": ("int8", True, INPUTS),
    "W4A16": ("palette4", False, None),
    "W4A8 all": ("palette4", False, ALL),
    "W4A8 inputs": ("palette4", False, INPUTS),
}
"""The recipe of the weights, whether channels are turned, and the quantization."""


def progress(what: str, done: int, total: int) -> None:
    print(f"{what} ({done}/{total})", file=sys.stderr)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    options = parser.parse_args()
    checkpoint = open_checkpoint(options.model)
    bundles: dict[bool, dict[str, Bundle]] = {False: {}, True: {}}
    sources: dict[bool, Checkpoint] = {}
    for name in options.only:
        weights, turn, how = VARIANTS[name]
        named = {"compression.rotate": turn, "name": f"{weights}-turned" if turn else weights}
        recipe = override(load_recipe(weights), named)
        sources[turn] = as_recipe_asks(checkpoint, recipe)
        made = bundle_of(sources[turn], recipe)
        if how is not None:
            print(name, file=sys.stderr)
            target = WORK / name.lower().replace(",", "").replace(" ", "-")
            made, _ = quantize_activations(made, target, how, progress, sources[turn], force=True)
        bundles[turn][name] = made
    first = next(one for some in bundles.values() for one in some.values())
    ids = read_tokens(first.tokenizer, standard_library_text(), options.tokens)
    texts = windows(ids, first.plan.recipe.cache.context)
    judged = [judge(bundles[turn], source, texts, progress) for turn, source in sources.items()]
    found = {name: scores for scores in judged for name in scores.bundles}
    columns = ["what", *(score.shard for score in next(iter(judged[0].bundles.values())).shards)]
    columns += ["worst token", "perplexity", "KL", "top-1", "gate"]
    rows = [row(name, found[name]) for name in options.only]
    perplexity = judged[0].reference_perplexity
    title = f"{judged[0].tokens} tokens, the model's perplexity {perplexity:.3f}"
    whole = {n: one.bundles[n].model_dump(mode="json") for n, one in found.items()}
    report(title, columns, rows, {"reference": perplexity, "bundles": whole}, options.json)


def row(name: str, scores: ActivationScores) -> list[object]:
    """Mean cosines of the shards, the worst of any token, the quality and the verdict: every bundle
    here promises `good`."""
    score = scores.bundles[name]
    return [
        name,
        *(f"{shard.cosine:.4f}" for shard in score.shards),
        f"{min(shard.cosine_min for shard in score.shards):.4f}",
        score.perplexity,
        score.logits.kl,
        score.logits.top1,
        "pass" if all(one.passed for one in judge_score(scores, name, "good")) else "FAIL",
    ]


if __name__ == "__main__":
    main()
