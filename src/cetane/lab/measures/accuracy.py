"""Measures of accuracy: against the Hugging Face model, and of the two sides with each other."""

from collections.abc import Mapping

import numpy as np

from cetane.engine.engine import Engine
from cetane.engine.generate import generate
from cetane.engine.portable import PortableBackend
from cetane.engine.sampling import Sampler
from cetane.gates import metrics
from cetane.gates.golden import golden
from cetane.gates.quality import perplexity
from cetane.gates.reference import reference_of, would_choose
from cetane.lab.experiment import ArmName
from cetane.lab.sides import Findings, Side, Sides, figure, measure_of_both, measure_of_side


@measure_of_side("quality")
def quality(side: Side) -> Findings:
    """Perplexity and agreement with the Hugging Face model, on the workload's text."""
    tokens = side.workload.tokens(side.bundle)
    quality = perplexity(side.bundle, side.checkpoint, tokens, side.progress)
    note = f"{side.workload.spec.text}; the Hugging Face model: {quality.reference_perplexity:.4g}"
    values = {
        "perplexity": quality.perplexity,
        "perplexity_ratio": quality.ratio,
        "kl": quality.kl,
        "top1": quality.top1,
    }
    return Findings({n: figure(n, v, n=quality.tokens, note=note) for n, v in values.items()})


@measure_of_side("golden")
def gate(side: Side) -> Findings:
    """The golden gate: every mode, past every window and width."""
    result = golden(side.bundle, side.checkpoint, side.progress, prompts=1, greedy_tokens=16)
    failed = [check for check in result.checks if not check.passed]
    values = {
        "golden": 1 - len(failed) / len(result.checks),
        "hidden_cosine": min((score.cosine for score in result.shards), default=1.0),
        "golden_kl": max(score.kl for score in result.logits),
        "golden_top1": min(score.top1 for score in result.logits),
    }
    worst = "; ".join(f"{c.name} {c.value:.4g} (limit {c.limit:g})" for c in failed[:5])
    texts = {"golden": f"{len(failed)} of {len(result.checks)} checks fail: {worst}"}
    count = sum(map(len, result.probes.values()))
    figures = {name: figure(name, value, n=count) for name, value in values.items()}
    return Findings(figures, texts if failed else {})


def engine_of(side: Side) -> Engine:
    """The side's engine in fp32, since a comparison should not round activations."""
    return Engine(side.bundle.plan, PortableBackend(side.bundle), side.bundle.tables())


def cut(prompts: Mapping[str, list[int]], *sides: Side) -> dict[str, list[int]]:
    """The prompts, by name, cut so that an answer has room on each of the sides."""
    room = min(side.recipe.cache.context - side.workload.spec.new_tokens for side in sides)
    return {name: ids[:room] for name, ids in prompts.items()}


def answers(side: Side, engine: Engine, prompts: Mapping[str, list[int]]) -> dict[str, list[int]]:
    """The side's greedy answers to prompts, as token ids by the prompt's name."""
    modes = engine.plan.plain_modes
    count, stop = side.workload.spec.new_tokens, side.bundle.tokenizer.eos_ids
    return {
        name: list(generate(engine.session(modes), ids, Sampler(), count, stop))
        for name, ids in prompts.items()
    }


@measure_of_side("smoke")
def smoke(side: Side) -> Findings:
    """Answers to read, and the share of their tokens that the Hugging Face model also chooses."""
    prompts = cut(side.workload.prompts(side.bundle), side)
    said = answers(side, engine_of(side), prompts)
    told = {name: tokens for name, tokens in said.items() if tokens}
    agreed, distinct = [], []
    reference = reference_of(side.checkpoint)
    for name, tokens in told.items():
        observed = reference.run([[*prompts[name], *tokens]])[0]
        agreed.append(float(would_choose(observed.logits, prompts[name], tokens).mean()))
        distinct.append(len(set(tokens)) / len(tokens))
    figures = {
        "smoke_greedy": figure(
            "smoke_greedy", float(np.mean(agreed)) if agreed else 0.0, n=len(prompts)
        ),
        "smoke_distinct": figure(
            "smoke_distinct", float(np.mean(distinct)) if distinct else 0.0, n=len(prompts)
        ),
    }
    decode = side.bundle.tokenizer.decode
    return Findings(figures, {f"smoke {name}": decode(tokens) for name, tokens in said.items()})


@measure_of_both("agreement")
def agreement(sides: Sides) -> dict[ArmName, Findings]:
    """The agreement of the candidate's greedy tokens, and of its logits for the baseline's
    answers."""
    baseline, candidate = sides.baseline, sides.candidate
    ours, theirs = engine_of(candidate), engine_of(baseline)
    prompts = cut(sides.workload.prompts(baseline.bundle), baseline, candidate)
    wanted = answers(baseline, theirs, prompts)
    answered = answers(candidate, ours, prompts)
    same, cosines = [], []
    for name, tokens in wanted.items():
        pairs = list(zip(tokens, answered[name], strict=False))
        same += [a == b for a, b in pairs] + [False] * (len(tokens) - len(pairs))
        ids = [*prompts[name], *tokens]
        if not baseline.recipe.head.choose and not candidate.recipe.head.choose:
            mine, others = ours.session().feed(ids, "all"), theirs.session().feed(ids, "all")
            assert mine is not None and others is not None
            cosines.append(metrics.cosine(mine, others))
    figures = {"same_tokens": figure("same_tokens", float(np.mean(same)), n=len(same))}
    if cosines:
        every = np.concatenate(cosines)
        figures["logit_cosine"] = figure("logit_cosine", float(every.min()), n=len(every))
    return {"candidate": Findings(figures)}
