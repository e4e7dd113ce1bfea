"""Agreement with the Hugging Face model: chained through the whole stack, in every mode.

Hidden states and logits come from programs that round as an fp16 machine would; every mode that
ships is fed whole sequences that go past its width, so positions beyond 0 and beyond the prefill
length are always compared. Greedy decoding runs as a user runs it, on the fast executor.
"""

import tomllib
from collections.abc import Iterator
from importlib import resources
from typing import Any

import numpy as np

from cetane.build import Progress
from cetane.bundle import Bundle
from cetane.checkpoint import Checkpoint
from cetane.engine.engine import Engine
from cetane.engine.generate import generate
from cetane.engine.portable import PortableBackend
from cetane.engine.sampling import Sampler
from cetane.families.base import Head
from cetane.families.flow import Data
from cetane.gates import metrics
from cetane.gates.probes import Probe, chat_prompts, random_probe, text_probe
from cetane.gates.reference import Reference, Truth
from cetane.plan import Plan, Planner
from cetane.recipe import Mode

SEEDS = (1,)
TEXT = (
    "The quick brown fox jumps over the lazy dog while the rain keeps falling on the old town. "
    "In 1969, two astronauts walked on the Moon; a third waited in orbit. "
    "def add(a, b):\n    return a + b\n"
)


class ShardScore(Data):
    """Hidden states after a shard, against the truth, over all probes."""

    shard: str
    mode: Mode
    cosine: float
    """Smallest of the probes' means over tokens."""
    cosine_min: float
    """Smallest of any token."""
    psnr: float


class LogitScore(Data):
    """Logits, against the truth, over all tokens of all probes."""

    mode: Mode
    cosine: float
    cosine_min: float
    psnr: float
    kl: float
    kl_max: float
    top1: float
    top5: float


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
    planner = Planner(checkpoint, bundle.plan.recipe)
    probes = make_probes(bundle)
    context = bundle.plan.recipe.cache.context
    room = max(context // 2, context - greedy_tokens)  # questions leave place for an answer
    questions = [ids[:room] for ids in chat_prompts(bundle.tokenizer, prompts)]
    modes: list[Mode] = list(bundle.plan.modes)
    steps = 2 + len(modes)

    # The reference comes last and once: it and the programs are never in memory together.
    boundaries = shard_outputs(planner)
    found: dict[Mode, list[Truth]] = {}
    for index, mode in enumerate(modes):
        progress(mode, index, steps)
        found[mode] = observe(bundle, mode, probes, boundaries)
    progress("greedy decoding", len(modes), steps)
    answers = answer(bundle, questions, greedy_tokens)

    progress("reference", 1 + len(modes), steps)
    reference = Reference(checkpoint)
    truths = [reference.run(probe.tokens, list(boundaries.values())) for probe in probes]
    greedy = tuple(
        float(reference.agrees(prompt, tokens).mean())
        for prompt, tokens in zip(questions, answers, strict=True)
    )
    shards = [s for mode in modes for s in shard_scores(mode, boundaries, found[mode], truths)]
    logits = [logit_score(mode, found[mode], truths) for mode in modes]
    progress("done", steps, steps)

    checks = tuple(judge(bundle.plan, shards, logits, greedy))
    return GoldenResult(
        passed=all(check.passed for check in checks),
        fingerprint=checkpoint.fingerprint,
        checks=checks,
        shards=tuple(shards),
        logits=tuple(logits),
        greedy=greedy,
        probes={probe.name: probe.tokens for probe in probes},
        greedy_tokens=greedy_tokens,
    )


def answer(bundle: Bundle, prompts: list[list[int]], length: int) -> list[list[int]]:
    """Greedy answers as a user gets them: prompts by prefill, then single tokens."""
    modes: list[Mode] = [mode for mode in bundle.plan.modes if mode != "verify"]
    engine = Engine(bundle.plan, PortableBackend(bundle), bundle.tables(), modes)
    return [list(generate(engine.session(), prompt, Sampler(), length)) for prompt in prompts]


def make_probes(bundle: Bundle) -> list[Probe]:
    """A random sequence and a text, longer than one call of any mode if the context allows it."""
    plan = bundle.plan
    widest = max(step.tokens for step in plan.modes.values())
    length = min(plan.recipe.cache.context, widest + widest // 8 + 5)
    excluded = {*bundle.tokenizer.eos_ids, *([bundle.tokenizer.bos_id or 0])}
    table = bundle.tables().embedding
    drawn = [random_probe(table, length, seed, excluded) for seed in SEEDS]
    return [*drawn, text_probe(bundle.tokenizer, TEXT, length)]


def shard_outputs(planner: Planner) -> dict[str, str]:
    """Path of the Hugging Face module whose output each shard of layers ends with."""
    return {
        name: blocks[-1].prefix.removesuffix(".")
        for name, blocks in planner.members.items()
        if not isinstance(blocks[-1], Head)
    }


def observe(
    bundle: Bundle, mode: Mode, probes: list[Probe], boundaries: dict[str, str]
) -> list[Truth]:
    """What the bundle computes for the probes in a mode, in the form of the truth.

    Single tokens take the rest where a mode's calls cannot be padded.
    """
    backend = PortableBackend(bundle, "fp16")
    engine = Engine(bundle.plan, backend, bundle.tables(), [mode, "decode"])
    return [observe_one(engine, probe, boundaries) for probe in probes]


def observe_one(engine: Engine, probe: Probe, boundaries: dict[str, str]) -> Truth:
    session = engine.session()
    seen: dict[str, list[Any]] = {path: [] for path in boundaries.values()}

    def watch(shard: str, name: str, value: Any, tokens: int) -> None:
        if shard in boundaries and name == "hidden_out":
            columns = value.reshape(engine.plan.hidden, -1)[:, :tokens]
            seen[boundaries[shard]].append(columns.T.astype(np.float32))

    session.watch = watch
    logits = session.feed(probe.tokens, "all")
    assert logits is not None
    return Truth(logits, {path: np.concatenate(rows) for path, rows in seen.items()})


def shard_scores(
    mode: Mode, boundaries: dict[str, str], found: list[Truth], truths: list[Truth]
) -> Iterator[ShardScore]:
    for shard, path in boundaries.items():
        pairs = [(a.hidden[path], b.hidden[path]) for a, b in zip(found, truths, strict=True)]
        cosines = [metrics.cosine(a, b) for a, b in pairs]
        yield ShardScore(
            shard=shard,
            mode=mode,
            cosine=float(min(c.mean() for c in cosines)),
            cosine_min=float(min(c.min() for c in cosines)),
            psnr=float(min(metrics.psnr(a, b).mean() for a, b in pairs)),
        )


def logit_score(mode: Mode, found: list[Truth], truths: list[Truth]) -> LogitScore:
    ours = np.concatenate([truth.logits for truth in found])
    theirs = np.concatenate([truth.logits for truth in truths])
    kl, cosines = metrics.divergence(ours, theirs), metrics.cosine(ours, theirs)
    return LogitScore(
        mode=mode,
        cosine=float(cosines.mean()),
        cosine_min=float(cosines.min()),
        psnr=float(metrics.psnr(ours, theirs).mean()),
        kl=float(kl.mean()),
        kl_max=float(kl.max()),
        top1=float(metrics.contains_top(ours, theirs, 1).mean()),
        top5=float(metrics.contains_top(ours, theirs, 5).mean()),
    )


def judge(
    plan: Plan, shards: list[ShardScore], logits: list[LogitScore], greedy: tuple[float, ...]
) -> Iterator[Check]:
    """Every figure against the threshold for the bundle's compression."""
    limits = thresholds(plan)
    for name in dict.fromkeys(score.shard for score in shards):
        cosine = min(score.cosine for score in shards if score.shard == name)
        yield at_least(f"hidden cosine ({name})", cosine, limits["hidden_cosine"])
    for score in logits:
        yield at_least(f"logit cosine ({score.mode})", score.cosine, limits["logit_cosine"])
        yield at_least(f"logit PSNR dB ({score.mode})", score.psnr, limits["logit_psnr"])
        limit = limits["kl"]
        yield Check(name=f"KL ({score.mode})", value=score.kl, limit=limit,
                    passed=score.kl <= limit)  # fmt: skip
        yield at_least(f"top-1 agreement ({score.mode})", score.top1, limits["top1"])
        yield at_least(f"top-5 containment ({score.mode})", score.top5, limits["top5"])
    if greedy:
        yield at_least("greedy tokens (worst prompt)", min(greedy), limits["greedy"])


def at_least(name: str, value: float, limit: float) -> Check:
    return Check(name=name, value=value, limit=limit, passed=value >= limit)


def thresholds(plan: Plan) -> dict[str, float]:
    """The limits for a plan's bits per weight, rounded down to a row of the table."""
    text = resources.files("cetane.gates").joinpath("thresholds.toml").read_text()
    table: dict[str, dict[str, float]] = tomllib.loads(text)
    return table[str(max(bits for bits in map(int, table) if bits <= plan.mean_bits))]
