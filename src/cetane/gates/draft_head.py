"""The golden gate of a draft head: its shard against the torch draft head in fp32.

Both read the hidden states of the engine's own calls, on windows of text outside the training. The
shard runs as in a drafter: it follows the text in pieces, since a target accepts tokens in pieces.
It gets the tokens of the text in place of its own drafts, so one difference does not hide the next.
The torch draft head takes whole windows at once (`TorchDraftHead.teach`), as in training.

A draft head with a cache reads its windows once more at the end of the context. Its attention knows
only distances between tokens, so its truth is the same there.
"""

from collections.abc import Iterator, Sequence
from itertools import chain, cycle, islice
from typing import NamedTuple, get_args

import numpy as np
import torch

from cetane.bundle import Bundle
from cetane.bundle.draft_heads import MAKE_AGAIN, DraftHead
from cetane.bundle.tables import TokenRows
from cetane.engine.backend import Array
from cetane.engine.engine import Engine
from cetane.engine.open import open_engine
from cetane.engine.portable import PortableBackend
from cetane.errors import CetaneError
from cetane.files import Progress
from cetane.gates import metrics
from cetane.gates.limits import DraftHeadArithmetic, limits
from cetane.gates.port import stored_constants
from cetane.gates.readings import NEAR_ANGLE
from cetane.gates.residency.audit import Audit, audit
from cetane.gates.residency.store import summary
from cetane.gates.residency.target import Target
from cetane.gates.verdict import Check, at_least, at_most
from cetane.gates.weights import wrong_among
from cetane.mil import load
from cetane.schema.draft_head import SOURCE, DraftHeadKind
from cetane.speculate.draft_heads.features import tapped_shards
from cetane.speculate.draft_heads.modules import TorchDraftHead, load_draft_head
from cetane.speculate.draft_heads.planner import (
    DraftHeadPlanner,
    DraftHeadWeights,
    draft_head_model,
)
from cetane.speculate.draft_heads.runner import Eagle3Runner, MedusaRunner, open_runner
from cetane.speculate.draft_heads.windows import Windows, collect
from cetane.validation import Data

WINDOWS, DRAFTS = 3, 16
"""The most windows that are judged, and the most drafts in each."""


class DraftHeadScore(Data):
    """Agreement with the torch draft head, over all tokens of all drafts."""

    arithmetic: DraftHeadArithmetic
    tokens: int
    cosine: float
    cosine_min: float
    top1: float
    one_logit: float = 0.0
    """The largest error of any logit, over the root mean square of its row. Older results lack
    it."""


class DraftHeadResult(Data):
    """The outcome of a draft head's golden gate."""

    passed: bool
    heads: dict[str, str]
    """The digest of the judged draft head, by its kind."""
    checks: tuple[Check, ...]
    scores: tuple[DraftHeadScore, ...]


def judge_draft_heads(bundle: Bundle, progress: Progress) -> dict[DraftHeadKind, DraftHeadResult]:
    """Judge all draft heads of a bundle, by kind; empty without draft heads."""
    draft_heads = bundle.draft_heads()
    if not draft_heads:
        return {}
    engine = open_engine(bundle, "portable")
    results = {}
    for kind, draft_head in draft_heads.items():
        results[kind] = judge_draft_head(bundle, draft_head, engine, progress)
        keep_verdict(bundle, results[kind])
    return results


def judge_draft_head(
    bundle: Bundle, draft_head: DraftHead, engine: Engine, progress: Progress
) -> DraftHeadResult:
    """Judge one draft head, in its bundle or beside it, on hidden states of the bundle's engine."""
    trained = load_trained(draft_head)
    held = draft_head.held_out()[:WINDOWS]
    windows = collect(engine, held.reshape(-1).tolist(), held.shape[1], progress)
    functions = {function.name: function for function in draft_head.manifest.functions}
    follow = functions.get("follow")
    width, steps = follow.tokens if follow else 1, draft_head.manifest.steps
    drafts = [*drafts_of(len(held), held.shape[1], steps, width)]
    wanted = truth(trained, windows, drafts, bundle.tables().embedding)
    kinds: tuple[DraftHeadArithmetic, ...] = get_args(DraftHeadArithmetic)
    starts = window_starts(draft_head, held.shape[1])
    ways = [False, True] if "read" in functions else [False]
    scores = []
    for done, arithmetic in enumerate(kinds):
        progress(f"{draft_head.name} in {arithmetic}", done, len(kinds))
        backend = PortableBackend(draft_head, arithmetic)
        runners = [open_runner(draft_head, bundle, backend, start) for start in starts]
        logits = [drafted(runner, windows, drafts, wide) for runner in runners for wide in ways]
        scores.append(score(arithmetic, np.concatenate(logits), np.tile(wanted, (len(logits), 1))))
    checks = (
        *same_interface(draft_head, trained, tapped_shards(engine.plan)),
        same_constants(draft_head, trained),
        *judge(scores),
    )
    return DraftHeadResult(
        passed=all(check.passed for check in checks),
        heads={draft_head.name: draft_head.digest},
        checks=checks,
        scores=tuple(scores),
    )


def keep_verdict(bundle: Bundle, result: DraftHeadResult) -> None:
    """Keep the result of a draft head in its bundle."""
    (kind,) = result.heads
    bundle.write_gate(f"golden-{kind}", result.model_dump(mode="json"))


def audit_draft_head(bundle: Bundle, draft_head: DraftHead) -> Audit:
    """The audit of a draft head: the predicted places of its ops. The bundle keeps the verdict."""
    audited = audit({draft_head.name: load(draft_head.shard(draft_head.name))}, Target())
    kept = summary(audited) | {"heads": {draft_head.name: draft_head.digest}}
    bundle.write_gate(f"residency-{draft_head.name}", kept)
    return audited


def load_trained(draft_head: DraftHead) -> TorchDraftHead:
    """The torch draft head. Raises CetaneError if it does not fit the draft head's manifest."""
    path, manifest = draft_head.file(SOURCE), draft_head.manifest
    trained = load_draft_head(path)
    ours = manifest.kind, manifest.rows, manifest.steps, draft_head.plan.hidden
    config = trained.config
    theirs = config.kind, config.rows, config.steps, config.hidden
    for what, own, other in zip(("kind", "rows", "steps", "hidden"), ours, theirs, strict=True):
        if own != other:
            raise CetaneError(
                f"{path}: trained with {what} {other}, but the manifest has {own}", MAKE_AGAIN
            )
    return trained


def same_interface(
    draft_head: DraftHead, trained: TorchDraftHead, shards: Sequence[str]
) -> Iterator[Check]:
    """The checks of vocabulary, taps and rotary tables. A drafter reads them beside the shard, so
    no logits show a wrong one; of a table they show the positions of a window. `shards` are those
    that `tapped_shards` names."""
    context = draft_head.plan.recipe.cache.context
    right = draft_head_model(trained.config, (), context).rotary
    wrong = [
        np.abs(table - right[name].cos_sin(context).numpy()).max() > NEAR_ANGLE
        for name, table in draft_head.rotary().items()
    ]
    tokens = draft_head.vocabulary() != trained.vocabulary.numpy()
    taps = draft_head.manifest.taps != tuple(shards[tap] for tap in trained.config.taps)
    yield at_most("tokens that are not the trained ones", float(tokens.sum()), 0)
    yield at_most("other shards tapped than in training", float(taps), 0)
    yield at_most("rotary tables that are not the trained ones", float(sum(wrong)), 0)


def same_constants(draft_head: DraftHead, trained: TorchDraftHead) -> Check:
    """The check of the shard's constants, bit for bit: one element of many moves no logit beyond
    the limits."""
    planner, weights = DraftHeadPlanner(trained.config, draft_head.plan), DraftHeadWeights(trained)
    every = [*stored_constants(draft_head, planner, draft_head.name)]
    wrong = [*wrong_among(every, weights, planner.recipe.compression)]
    return at_most("constants that are not the trained ones", float(len(wrong)), 0)


def window_starts(draft_head: DraftHead, length: int) -> list[int]:
    """The positions at which windows begin: 0, and where a window fills the last slot of a cache.

    Both are one where a window fills the context. No draft reads the last token of a window.
    """
    context = draft_head.plan.recipe.cache.context
    ends = [max(0, context - (length - 1))] if draft_head.manifest.caches else []
    return list(dict.fromkeys([0, *ends]))


class Place(NamedTuple):
    """The tokens of a window that a draft follows: those of earlier drafts, and its own from number
    `start` up to `stop`."""

    window: int
    start: int
    stop: int


def drafts_of(windows: int, length: int, steps: int, width: int) -> Iterator[Place]:
    """All drafts in windows of `length` tokens. A call that follows accepted tokens takes `width`.

    Of every window, the first draft follows a prompt, a quarter of the window. The others follow
    from one token to one more than a call takes, in turn: each column of the call gives logits. The
    last draft ends the window.
    """
    pieces = cycle(range(1, width + 2))
    for window in range(windows):
        start, last = 0, length - steps
        for piece in islice(chain([max(1, length // 4)], pieces), DRAFTS - 1):
            if start + piece >= last:
                break
            yield Place(window, start, start + piece)
            start += piece
        yield Place(window, start, last)


@torch.inference_mode()
def truth(
    draft_head: TorchDraftHead, windows: Windows, drafts: Sequence[Place], embedding: TokenRows
) -> Array:
    """The logits `(tokens, R)` of the torch draft head, for every token of every draft."""
    embedded = torch.from_numpy(np.array(embedding[windows.tokens.numpy()], np.float32))
    made = draft_head.teach(windows.features.float(), embedded)
    rows = [logits[window, stop - 1] for window, _, stop in drafts for logits in made]
    return torch.stack(rows).numpy()


def drafted(
    runner: MedusaRunner | Eagle3Runner, windows: Windows, drafts: Sequence[Place], wide: bool
) -> Array:
    """The shard's logits `(tokens, R)`, in the order of `truth`. Prompts are read in `wide` calls,
    or as accepted tokens are."""
    features, tokens = windows.features.float().numpy(), windows.tokens.tolist()
    rows: list[Array] = []
    for window, start, stop in drafts:
        if not start:
            runner.forget()
        read, text = features[window], tokens[window]
        if isinstance(runner, MedusaRunner):
            rows.extend(runner.draft(read[stop - 1, -1]))
            continue
        runner.wide = wide
        rows.append(runner.follow(read[start:stop], text[start + 1 : stop + 1]))
        rows += [runner.step(token) for token in text[stop + 1 : stop + runner.steps]]
    return np.stack(rows)


def score(arithmetic: DraftHeadArithmetic, logits: Array, wanted: Array) -> DraftHeadScore:
    cosines = metrics.cosine(logits, wanted)
    return DraftHeadScore(
        arithmetic=arithmetic,
        tokens=len(logits),
        cosine=float(cosines.mean()),
        cosine_min=float(cosines.min()),
        top1=float(metrics.contains_top(logits, wanted, 1).mean()),
        one_logit=min(float(metrics.largest(logits, wanted).max()), metrics.WORST),
    )


def judge(scores: Sequence[DraftHeadScore]) -> Iterator[Check]:
    """The checks of every figure against the limit for its arithmetic."""
    for one in scores:
        limit = limits().draft_head[one.arithmetic]
        yield at_least(f"logit cosine ({one.arithmetic})", one.cosine_min, limit.logit_cosine)
        yield at_least(f"top-1 agreement ({one.arithmetic})", one.top1, limit.top1)
        yield at_most(f"one logit ({one.arithmetic})", one.one_logit, limit.one_logit)
