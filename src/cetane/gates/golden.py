"""Agreement with the Hugging Face model: chained through the whole stack, in every mode.

What shards hand on and logits come from programs that round as an fp16 machine would; every mode
that ships is fed whole sequences that go past its width, so positions beyond 0 and beyond the
prefill length are always compared. One shard is in memory at a time, and one module of the
reference. Greedy decoding runs as a user runs it, on the fast executor.
"""

import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import resources
from itertools import zip_longest

import numpy as np

from cetane.bundle import Bundle
from cetane.bundle.tables import TokenRows
from cetane.checkpoint import Checkpoint, Tokenizer
from cetane.engine.authored import embedding_rows
from cetane.engine.backend import Array
from cetane.engine.call import columns
from cetane.engine.engine import Engine
from cetane.engine.generate import generate
from cetane.engine.portable import PortableBackend
from cetane.engine.sampling import Sampler
from cetane.engine.session import gather
from cetane.families import Truth
from cetane.files import Progress
from cetane.gates import metrics
from cetane.gates.probes import Probe, chat_prompts, random_probe, text_probe
from cetane.gates.reference import RESIDENT, Observed, Reference, choices
from cetane.planner import Planner
from cetane.schema.function import Route, Step
from cetane.schema.plan import Plan
from cetane.schema.recipe import Mode
from cetane.validation import Data

SEEDS = (1,)
NEAR_LIMIT = 32752.0
"""Half of the largest fp16: a residual stream beyond it is worth a warning."""
TEXT = (
    "The quick brown fox jumps over the lazy dog while the rain keeps falling on the old town. "
    "In 1969, two astronauts walked on the Moon; a third waited in orbit. "
    "def add(a, b):\n    return a + b\n"
)


class ShardScore(Data):
    """A tensor that a shard hands on, against the truth, over all probes."""

    shard: str
    tensor: str
    truth: str
    """Path of the Hugging Face module."""
    mode: Mode
    cosine: float
    """Smallest of the probes' means over tokens."""
    cosine_min: float
    """Smallest of any token."""
    psnr: float
    by_position: tuple[float, ...] = ()
    """Smallest cosine of the probes at every position, to 7 decimals: fp16 errs by some 1e-6."""


class LogitScore(Data):
    """Logits, against the truth, over all tokens of all probes; of those that the head has, if it
    lacks some. Its port and its choice are judged apart: `top1` and `top5` count where it has the
    truth's best token, `best` says how often that is, so they agree on `top1 * best` of all."""

    mode: Mode
    cosine: float
    cosine_min: float
    psnr: float
    kl: float
    kl_max: float
    top1: float
    top5: float
    best: float = 1.0
    absent: float = 0.0
    """Mean probability that the truth gives to tokens that the head lacks."""


class Range(Data):
    """The residual stream of the truth after a block, over all probes, as the bundle scales it."""

    block: str
    largest: float
    """Largest magnitude of any channel of any token."""


class Check(Data):
    """One value against its threshold."""

    name: str
    value: float
    limit: float
    passed: bool


class GoldenResult(Data):
    """The outcome of the golden gate."""

    passed: bool
    fingerprint: str
    """Of the checkpoint that was compared with."""
    checks: tuple[Check, ...]
    shards: tuple[ShardScore, ...]
    logits: tuple[LogitScore, ...]
    ranges: tuple[Range, ...]
    warnings: tuple[str, ...]
    greedy: tuple[float, ...]
    """Share of tokens of each chat prompt that are the truth's own greedy choice."""
    probes: dict[str, tuple[int, ...]]
    greedy_tokens: int


def golden(
    bundle: Bundle,
    checkpoint: Checkpoint,
    progress: Progress,
    prompts: int = 2,
    greedy_tokens: int = 32,
) -> GoldenResult:
    """Compare a bundle with the checkpoint's Hugging Face model."""
    plan, planner = bundle.plan, Planner(checkpoint, bundle.plan.recipe)
    table = bundle.tables().tokens
    rows = embedding_rows(planner, checkpoint) if table is None else table
    probes = make_probes(rows, bundle.tokenizer, plan)
    modes: list[Mode] = list(plan.modes)
    warnings = []
    if resident_bytes(planner) > RESIDENT:
        prompts = 0
        warnings.append("greedy decoding was left out: the whole model would not fit in memory")
    room = max(plan.recipe.cache.context // 2, plan.recipe.cache.context - greedy_tokens)
    questions = [ids[:room] for ids in chat_prompts(bundle.tokenizer, prompts)]
    steps = 3

    # The reference comes last: it and the programs are never in memory together.
    progress(", ".join(modes), 0, steps)
    engine = Engine(plan, PortableBackend(bundle, "fp16"), bundle.tables(), resident=False)
    found = observe(engine, planner, modes, probes)
    progress("greedy decoding", 1, steps)
    answers = answer(bundle, questions, greedy_tokens)

    progress("reference", 2, steps)
    wanted = {
        block.name: truth
        for block in planner.model.layers
        if (truth := block.truths().get("hidden"))
    }
    handed = {truth for mode in modes for seen in found[mode] for truth in seen.tensors}
    asked = [[*q, *a] for q, a in zip(questions, answers, strict=True)]
    results = Reference(checkpoint).run(
        [*(probe.tokens for probe in probes), *asked], list(handed | set(wanted.values()))
    )
    scale = planner.model.residual_scale
    truths = [
        replace(seen, tensors={name: rows * (scale or 1.0) for name, rows in seen.tensors.items()})
        for seen in results[: len(probes)]
    ]
    greedy = tuple(
        float(choices(result.logits, question, tokens).mean())
        for result, question, tokens in zip(results[len(probes) :], questions, answers, strict=True)
    )
    shards = [s for mode in modes for s in shard_scores(planner, mode, found[mode], truths)]
    logits = [logit_score(mode, found[mode], truths, engine.plan.choosable) for mode in modes]
    ranges = [
        Range(block=name, largest=max(float(np.abs(t.tensors[truth]).max()) for t in truths))
        for name, truth in wanted.items()
    ]
    warnings += [
        f"{found.block}: the residual stream reaches {found.largest:.0f}; fp16 ends at 65504"
        + (f"; family.residual_scale is {scale:g} and can be smaller" if scale else "")
        for found in ranges
        if found.largest > NEAR_LIMIT
    ]
    progress("done", steps, steps)

    checks = tuple(judge(plan, shards, logits, greedy))
    return GoldenResult(
        passed=all(check.passed for check in checks),
        fingerprint=checkpoint.fingerprint,
        checks=checks,
        shards=tuple(shards),
        logits=tuple(logits),
        ranges=tuple(ranges),
        warnings=tuple(warnings),
        greedy=greedy,
        probes={probe.name: probe.tokens for probe in probes},
        greedy_tokens=greedy_tokens,
    )


def resident_bytes(planner: Planner) -> int:
    """Bytes of all weights in fp32, as the fast executor holds them."""
    blocks = (*planner.model.layers, *planner.heads)
    return sum(4 * weight.elements for block in blocks for _, weight in block.weights())


def answer(bundle: Bundle, prompts: list[list[int]], length: int) -> list[list[int]]:
    """Greedy answers as a user gets them: prompts by prefill, then single tokens."""
    modes: list[Mode] = [mode for mode in bundle.plan.modes if mode != "verify"]
    engine = Engine(bundle.plan, PortableBackend(bundle), bundle.tables())
    return [list(generate(engine.session(modes), p, Sampler(), length)) for p in prompts]


def make_probes(embedding: TokenRows, tokenizer: Tokenizer, plan: Plan) -> list[Probe]:
    """A random sequence and a text, longer than one call of any mode if the context allows it."""
    widest = max(step.tokens for step in plan.modes.values())
    length = min(plan.recipe.cache.context, widest + widest // 8 + 5)
    excluded = {*tokenizer.eos_ids, *([tokenizer.bos_id or 0])}
    drawn = [random_probe(embedding, length, seed, excluded) for seed in SEEDS]
    return [*drawn, text_probe(tokenizer, TEXT, length)]


def observe(
    engine: Engine, planner: Planner, modes: list[Mode], probes: list[Probe]
) -> dict[Mode, list[Observed]]:
    """What the bundle computes for the probes in every mode, in the form of the truth.

    Single tokens take the rest where a mode's calls cannot be padded.
    """
    watched = [
        (mode, Watched(engine, planner, mode, probe.tokens)) for mode in modes for probe in probes
    ]
    engine.run([(w.session, w.calls) for _, w in watched])
    return {mode: [w.result() for m, w in watched if m == mode] for mode in modes}


class Watched:
    """A sequence on its way through the shards in one mode, and what they hand on."""

    def __init__(self, engine: Engine, planner: Planner, mode: Mode, tokens: Sequence[int]) -> None:
        self.session = engine.session([mode, "decode"], watch=[self.keep])
        self.truths = planner.truths(mode) | planner.truths("decode")
        self.seen: dict[Truth, list[Array]] = {}
        self.count = len(tokens)
        self.calls = self.session.prepare(tokens, "all")

    def keep(self, step: Step | Route, name: str, value: Array, tokens: int) -> None:
        truth = self.truths[step].get(name)
        if truth is not None:
            rows = columns(value)[:, :tokens].T.astype(np.float32)
            self.seen.setdefault(truth, []).append(rows)

    def result(self) -> Observed:
        logits = gather(self.calls, "all")
        assert logits is not None
        return Observed(logits, self.tensors())

    def tensors(self) -> dict[Truth, Array]:
        """What was handed on for all tokens; a call in another mode may hand on less."""
        found = {truth: np.concatenate(rows) for truth, rows in self.seen.items()}
        return {truth: rows for truth, rows in found.items() if len(rows) == self.count}


def shard_scores(
    planner: Planner, mode: Mode, found: list[Observed], truths: list[Observed]
) -> Iterator[ShardScore]:
    """How every tensor that shards hand on agrees in a mode."""
    for step, outputs in planner.truths(mode).items():
        for name, truth in outputs.items():
            if all(truth in observed.tensors for observed in found):
                pairs = [
                    (a.tensors[truth], b.tensors[truth]) for a, b in zip(found, truths, strict=True)
                ]
                yield shard_score(step.shard, name.removesuffix("_out"), truth, mode, pairs)


def shard_score(
    shard: str, tensor: str, truth: Truth, mode: Mode, pairs: list[tuple[Array, Array]]
) -> ShardScore:
    """The score of a tensor over the probes, pairs of `(n, C)`: what was found, and the truth."""
    cosines = [metrics.cosine(a, b) for a, b in pairs]
    return ShardScore(
        shard=shard,
        tensor=tensor,
        truth=truth[0],
        mode=mode,
        cosine=float(min(c.mean() for c in cosines)),
        cosine_min=float(min(c.min() for c in cosines)),
        psnr=float(min(metrics.psnr(a, b).mean() for a, b in pairs)),
        by_position=tuple(
            round(float(min(found)), 7) for found in zip_longest(*cosines, fillvalue=1.0)
        ),
    )


def logit_score(
    mode: Mode, found: list[Observed], truths: list[Observed], tokens: Array
) -> LogitScore:
    """The score in a mode, of a head that has some tokens."""
    ours = np.concatenate([truth.logits for truth in found])
    theirs = np.concatenate([truth.logits for truth in truths])
    has = np.isin(theirs.argmax(1), tokens)
    top1, top5 = (metrics.contains_top(ours[has], theirs[has], k) for k in (1, 5))
    kept = np.exp(metrics.log_softmax(theirs)[:, tokens]).sum(1)
    ours, theirs = ours[:, tokens], theirs[:, tokens]
    kl, cosines = metrics.divergence(ours, theirs), metrics.cosine(ours, theirs)
    return LogitScore(
        mode=mode,
        cosine=float(cosines.mean()),
        cosine_min=float(cosines.min()),
        psnr=float(metrics.psnr(ours, theirs).mean()),
        kl=float(kl.mean()),
        kl_max=float(kl.max()),
        top1=float(top1.mean()) if has.any() else 0.0,
        top5=float(top5.mean()) if has.any() else 0.0,
        best=float(has.mean()),
        absent=max(0.0, float(1 - kept.mean())),
    )


def judge(
    plan: Plan, shards: list[ShardScore], logits: list[LogitScore], greedy: tuple[float, ...]
) -> Iterator[Check]:
    """Every figure against the threshold for the bundle's compression."""
    limits = thresholds(plan)
    yield from judge_shards(shards, limits)
    for score in logits:
        if plan.recipe.head.subset is not None:
            yield at_least(f"best token in the head ({score.mode})", score.best, limits["best"])
        if plan.recipe.head.choose:  # there is nothing else to compare
            yield at_least(f"top-1 agreement ({score.mode})", score.top1, limits["top1"])
            continue
        yield at_least(f"logit cosine ({score.mode})", score.cosine, limits["logit_cosine"])
        yield at_least(f"logit PSNR dB ({score.mode})", score.psnr, limits["logit_psnr"])
        limit = limits["kl"]
        yield Check(name=f"KL ({score.mode})", value=score.kl, limit=limit,
                    passed=score.kl <= limit)  # fmt: skip
        yield at_least(f"top-1 agreement ({score.mode})", score.top1, limits["top1"])
        yield at_least(f"top-5 containment ({score.mode})", score.top5, limits["top5"])
    if greedy:
        yield at_least("greedy tokens (worst prompt)", min(greedy), limits["greedy"])


def judge_shards(shards: list[ShardScore], limits: dict[str, float]) -> Iterator[Check]:
    """Every tensor that a shard hands on, in its worst mode."""
    for shard, tensor in dict.fromkeys((score.shard, score.tensor) for score in shards):
        own = [s.cosine for s in shards if (s.shard, s.tensor) == (shard, tensor)]
        yield at_least(f"{tensor} cosine ({shard})", min(own), limits["hidden_cosine"])


def at_least(name: str, value: float, limit: float) -> Check:
    return Check(name=name, value=value, limit=limit, passed=value >= limit)


def thresholds(plan: Plan) -> dict[str, float]:
    """The limits for a plan's bits per weight, rounded down to a row of the table."""
    text = resources.files("cetane.gates").joinpath("thresholds.toml").read_text()
    table: dict[str, dict[str, float]] = tomllib.loads(text)
    return table[str(max(bits for bits in map(int, table) if bits <= plan.mean_bits))]
