"""The search for key/value heads that may stream, and what streaming costs in recall."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cetane.checkpoint import SeenByHeads, Tokenizer
from cetane.errors import CetaneError
from cetane.families import streaming_layers
from cetane.files import Progress, disk_errors, make_folder_of, silent, write_json
from cetane.gates.probes import english
from cetane.pipeline.request import Request, check_named_file
from cetane.planner import Planner, as_recipe_asks
from cetane.schema.streaming import HeadScores, ScoreMethod, Streaming, load_scores

if TYPE_CHECKING:
    from cetane.fitting.pass_keys import PassKeys

SHARES = (1.0, 0.75, 0.5, 0.25)
"""Shares of heads that keep all tokens, which are judged."""
TEXTS = {"mass": 4, "gates": 40}
"""The number of texts that score heads, by method. `gates` takes one training step on each."""
SCORED = 768
"""The most tokens of a text that scores heads. A text that judges recall may be longer."""
LEAST = 384
"""The fewest tokens of a text that judges recall. Heads that stream see 320 of them."""
FIRST = 1000
"""The seed of the first text that scores heads. Texts that judge have the seeds from 0 on."""
GATE_SINKS, GATE_WINDOW = 64, 128
"""The first and the last tokens that a gated head sees. The window of `Streaming` would hold a
third of so short a text."""
TAUGHT = 10
"""Pass keys in each text that scores heads."""
REPEATED = 16
"""Times that the text for hiding keys is repeated."""


@dataclass(frozen=True)
class JudgedShare:
    """One share of heads that keep all tokens."""

    full: float
    cache_bytes: int
    """Bytes of keys and values at the recipe's context, in fp16."""
    found: int
    """Pass keys that the model found, of those that it was asked for."""
    asked: int


@dataclass(frozen=True)
class HeadsResult:
    """Scores, and what shares of the heads cost."""

    scores: HeadScores
    context: int
    judged: Sequence[JudgedShare]
    tokens: int
    """Tokens of each text that hides pass keys for the judgement."""
    streaming: Streaming


def find_heads(
    request: Request,
    output: Path,
    method: ScoreMethod = "mass",
    tokens: int = 1024,
    texts: int = 4,
    keys: int = 1,
    steps: int | None = None,
    progress: Progress = silent,
) -> HeadsResult:
    """Score the heads of a model by a method, and write the scores to `output`.

    Then count the pass keys that the model finds in `texts` texts of `tokens` tokens, `keys` in
    each, with several shares of the heads. `steps` replaces the number of texts that score. Raises
    CetaneError, before any of that, for a model or a recipe of which no head can stream.
    """
    from cetane.fitting.pass_keys import hide
    from cetane.gates.reference import Reference

    layers = scored_layers(request)
    sizes = cache_sizes(request, layers)
    check_heads_request(request, output, tokens)
    tokenizer = request.checkpoint.tokenizer
    hay, count = haystack(tokenizer), TEXTS[method] if steps is None else steps
    lessons = scoring_texts(request, hay, tokens, count)
    asked = [hide(tokenizer, hay, tokens, seed, keys) for seed in range(texts)]
    reference = Reference(request.checkpoint)
    if method == "gates" and not reference.resident:
        raise CetaneError(
            "--method gates: the model is too large to train gates on this machine",
            "--method mass takes one layer at a time",
        )
    scores = score(request, reference.model, layers, lessons, method, progress)
    make_folder_of(output)
    with disk_errors(output):
        write_json(output, scores.model_dump(mode="json"))
    streaming = Streaming(scores=scores)
    shares = [streaming.model_copy(update={"full": share}) for share in SHARES]
    judged = [judge(reference.model, one, sizes, asked, progress) for one in shares]
    return HeadsResult(scores, request.recipe.cache.context, judged, tokens, streaming)


def check_heads_request(request: Request, output: Path, tokens: int) -> None:
    """Raise CetaneError for more tokens than the model reads, for too few to judge, and for an
    output that cannot be written."""
    model = request.planner.model
    if model.max_context < LEAST:
        raise CetaneError(
            f"texts that judge heads have {LEAST} tokens or more, but the model {model.ends}",
            "caches of so short a context need not stream",
        )
    if tokens > model.max_context:
        raise CetaneError(
            f"--tokens {tokens}: the model {model.ends}", f"give --tokens {model.max_context}"
        )
    if tokens < LEAST:
        raise CetaneError(f"--tokens {tokens}: too few to judge", f"give {LEAST} or more")
    check_named_file(output, load_scores)


def scoring_texts(request: Request, hay: list[int], tokens: int, count: int) -> list[PassKeys]:
    """The texts that score heads, of `tokens` tokens or all that such a text may have."""
    from cetane.fitting.pass_keys import hide

    most = min(SCORED, request.planner.model.max_context)
    advice = f"--tokens {most} gives them more" if tokens < most else "this tokenizer needs more"
    hint = f"texts that score heads hide {TAUGHT} keys, whatever --keys says; {advice}"
    tokenizer, length = request.checkpoint.tokenizer, min(most, tokens)
    return [hide(tokenizer, hay, length, FIRST + seed, TAUGHT, hint=hint) for seed in range(count)]


def scored_layers(request: Request) -> dict[int, int]:
    """The key/value heads of every layer that can stream. CetaneError if there is none."""
    recipe = request.recipe
    if recipe.cache.streaming is not None:
        raise CetaneError(
            f"recipe {recipe.name}: its heads stream already",
            "name one without cache.streaming",
        )
    layers = streaming_layers(request.planner.authored)
    if not layers:
        raise CetaneError(
            f"no layer of {request.checkpoint.source} sees all tokens through keys and values of "
            "its own heads",
            "its caches cannot become shorter in this way",
        )
    return layers


@dataclass(frozen=True)
class CacheSizes:
    """Bytes of keys and values at a recipe's context, in fp16."""

    whole: int
    """If all heads keep all tokens."""
    least: int
    """If all that can stream do."""
    heads: int
    """The number of heads that can stream. Their keys all have one size."""

    def nbytes(self, streaming: Streaming) -> int:
        """Bytes with a choice of heads."""
        full = sum(map(len, streaming.kept().values()))
        return self.least + (self.whole - self.least) * full // self.heads


def cache_sizes(request: Request, layers: Mapping[int, int], **seen: int) -> CacheSizes:
    """The sizes of a request's caches. CetaneError for a recipe whose caches cannot stream.

    `seen` are the sinks and the window of heads that stream, if not those of `Streaming`.
    """
    scores = HeadScores(
        source="",
        model_type="",
        method="mass",
        settings={},
        layers=tuple((0.0,) * layers.get(layer, 0) for layer in range(max(layers) + 1)),
    )
    recipe, context = request.recipe, request.recipe.cache.context
    cache = recipe.cache.model_copy(update={"streaming": Streaming(scores=scores, full=0, **seen)})
    wanted = recipe.model_copy(update={"cache": cache})
    planner = Planner(as_recipe_asks(request.checkpoint, wanted), wanted)
    return CacheSizes(
        request.planner.memory.own_nbytes(context),
        planner.memory.own_nbytes(context),
        sum(layers.values()),
    )


def haystack(tokenizer: Tokenizer) -> list[int]:
    """Tokens of an English text, over and over, for keys to be hidden in."""
    return tokenizer.encode_plain(english()) * REPEATED


def score(
    request: Request,
    model: Any,
    layers: Mapping[int, int],
    lessons: Sequence[PassKeys],
    method: ScoreMethod,
    progress: Progress,
) -> HeadScores:
    """The scores of a transformers model's heads by a method, from some texts."""
    from cetane.fitting.heads import CHARGE, RATE, gate_scores, mass_scores

    settings: dict[str, float] = {"texts": len(lessons), "tokens": len(lessons[0].whole[0])}
    if method == "mass":
        found = mass_scores(model, layers, lessons, progress)
    else:
        found = gate_scores(model, layers, lessons, GATE_SINKS, GATE_WINDOW, progress)
        settings |= {"sinks": GATE_SINKS, "window": GATE_WINDOW, "charge": CHARGE, "rate": RATE}
    checkpoint = request.checkpoint
    return HeadScores(
        source=Path(checkpoint.source).name,
        model_type=checkpoint.config["model_type"],
        method=method,
        settings=settings,
        layers=found,
    )


def judge(
    model: Any,
    streaming: Streaming,
    sizes: CacheSizes,
    asked: Sequence[PassKeys],
    progress: Progress,
) -> JudgedShare:
    """The bytes of a choice of heads, and the pass keys that the model finds with it."""
    from cetane.fitting.pass_keys import found
    from cetane.gates.streaming import StreamingAttention, attending

    seen, right = SeenByHeads(streaming.kept(), streaming.sinks, streaming.window), 0
    with attending(model, StreamingAttention(seen)):
        for number, text in enumerate(asked):
            progress(f"pass keys with {streaming.full:.0%} of the heads", number, len(asked))
            right += sum(found(model, text))
    questions = sum(len(text.questions) for text in asked)
    return JudgedShare(streaming.full, sizes.nbytes(streaming), right, questions)
