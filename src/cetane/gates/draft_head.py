"""The golden gate of a draft head: its shard against the torch head in fp32.

The features are those of the engine's own calls, on windows of text that training has not seen; the
shard runs as the drafter runs it, fed in pieces as tokens are accepted, every token of a draft the
text's own, so that one difference does not hide the next. The torch head judges whole windows in
parallel (`Head.teach`), as it was trained.
"""

from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from typing import get_args

import numpy as np
import torch

from cetane.bundle import Bundle
from cetane.bundle.draft_heads import HeadShard
from cetane.bundle.tables import Rows
from cetane.engine.backend import Array
from cetane.engine.engine import Engine
from cetane.engine.generate import open_engine
from cetane.engine.portable import PortableBackend
from cetane.files import Progress
from cetane.gates import metrics
from cetane.gates.limits import Arithmetic, limits
from cetane.gates.residency.audit import Audit, audit
from cetane.gates.residency.store import summary
from cetane.gates.residency.target import Target
from cetane.gates.verdict import Check, at_least
from cetane.mil import load
from cetane.schema.draft_head import SOURCE, HeadKind
from cetane.speculate.heads.modules import Head, load_head
from cetane.speculate.heads.runner import Eagle3Runner, MedusaRunner, open_runner
from cetane.speculate.heads.train import Windows, collect
from cetane.validation import Data

WINDOWS, DRAFTS = 3, 16
"""How many windows are judged at most, and drafts in each."""
PIECES = (5, 1, 2, 1, 4, 3)
"""Tokens between one draft and the next, in turn: as many as a call may accept, and more."""


class HeadScore(Data):
    """Agreement with the torch head, over all tokens of all drafts."""

    arithmetic: Arithmetic
    tokens: int
    cosine: float
    cosine_min: float
    top1: float


class HeadResult(Data):
    """The outcome of a head's golden gate."""

    passed: bool
    heads: dict[str, str]
    """Digest of the head that was judged, by its kind."""
    checks: tuple[Check, ...]
    scores: tuple[HeadScore, ...]


def judge_heads(bundle: Bundle, progress: Progress) -> dict[HeadKind, HeadResult]:
    """Judge all heads of a bundle, one after the other."""
    heads = bundle.heads()
    if not heads:
        return {}
    engine = open_engine(bundle, "portable")
    return {kind: judge_head(bundle, head, engine, progress) for kind, head in heads.items()}


def judge_head(bundle: Bundle, head: HeadShard, engine: Engine, progress: Progress) -> HeadResult:
    """Judge one head on features of an engine of its bundle, which keeps the result."""
    held = head.held_out()[:WINDOWS]
    windows = collect(engine, held.reshape(-1).tolist(), held.shape[1], progress)
    wanted = truth(load_head(head.file(SOURCE)), windows, bundle.tables().embedding)
    kinds: tuple[Arithmetic, ...] = get_args(Arithmetic)
    scores = []
    for done, arithmetic in enumerate(kinds):
        progress(f"{head.name} in {arithmetic}", done, len(kinds))
        runner = open_runner(head, bundle, PortableBackend(head, arithmetic))
        scores.append(score(arithmetic, drafted(runner, windows), wanted))
    checks = tuple(judge(scores))
    result = HeadResult(
        passed=all(check.passed for check in checks),
        heads={head.name: head.digest},
        checks=checks,
        scores=tuple(scores),
    )
    bundle.write_gate(f"golden-{head.name}", result.model_dump(mode="json"))
    return result


def audit_head(bundle: Bundle, head: HeadShard) -> Audit:
    """Where the head's ops are predicted to run; the bundle keeps the verdict."""
    found = audit({head.name: load(head.shard(head.name))}, Target())
    kept = summary(found) | {"heads": {head.name: head.digest}}
    bundle.write_gate(f"residency-{head.name}", kept)
    return found


def places(length: int, steps: int) -> Iterator[tuple[int, int]]:
    """Which tokens of a window are fed before each draft, from and up to: a prompt, then what a
    call accepted."""
    start, upto = 0, max(1, length // 4)
    for piece in islice(cycle(PIECES), DRAFTS):
        if upto + steps > length:
            return
        yield start, upto
        start, upto = upto, upto + piece


@torch.inference_mode()
def truth(head: Head, windows: Windows, embedding: Rows) -> Array:
    """The torch head's logits `(tokens, R)` for every token of every draft."""
    length, steps = windows.tokens.shape[1], head.config.steps
    embedded = torch.from_numpy(np.array(embedding[windows.tokens.numpy()], np.float32))
    made = head.teach(windows.features.float(), embedded)
    rows = [
        logits[window, upto - 1]
        for window in range(len(windows))
        for _, upto in places(length, steps)
        for logits in made
    ]
    return torch.stack(rows).numpy()


def drafted(runner: MedusaRunner | Eagle3Runner, windows: Windows) -> Array:
    """The shard's logits for the same tokens."""
    rows: list[Array] = []
    for features, tokens in zip(windows.features.float().numpy(), windows.tokens, strict=True):
        text = tokens.tolist()
        runner.forget()
        for start, upto in places(len(text), runner.steps):
            if isinstance(runner, MedusaRunner):
                rows.extend(runner.draft(features[upto - 1, -1]))
                continue
            rows.append(runner.follow(features[start:upto], text[start + 1 : upto + 1]))
            rows += [runner.step(token) for token in text[upto + 1 : upto + runner.steps]]
    return np.stack(rows)


def score(arithmetic: Arithmetic, found: Array, wanted: Array) -> HeadScore:
    cosines = metrics.cosine(found, wanted)
    return HeadScore(
        arithmetic=arithmetic,
        tokens=len(found),
        cosine=float(cosines.mean()),
        cosine_min=float(cosines.min()),
        top1=float(metrics.contains_top(found, wanted, 1).mean()),
    )


def judge(scores: Sequence[HeadScore]) -> Iterator[Check]:
    """Every figure against the threshold for its arithmetic."""
    for one in scores:
        limit = limits().draft_head[one.arithmetic]
        yield at_least(f"logit cosine ({one.arithmetic})", one.cosine_min, limit.logit_cosine)
        yield at_least(f"top-1 agreement ({one.arithmetic})", one.top1, limit.top1)
