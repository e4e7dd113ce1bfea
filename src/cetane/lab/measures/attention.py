"""Measures of attention that sees a part of the keys, in the Hugging Face model: of heads that
stream, and of keys that are chosen. They need no bundle."""

import torch

from cetane.checkpoint import SeenByHeads
from cetane.fitting.heads import PLAIN
from cetane.fitting.pass_keys import found, hide
from cetane.gates.quality import read_tokens
from cetane.gates.reference import Reference
from cetane.gates.streaming import StreamingAttention, attending
from cetane.lab.experiment import ArmName
from cetane.lab.sides import Findings, Sides, figure, measure_of_both
from cetane.lab.sparse import CHOOSERS, DECODED, Sparse, against, both_texts, run
from cetane.pipeline.heads import haystack

TEXTS = 4
"""Texts that hide a pass key."""


@measure_of_both("pass_keys")
def pass_keys(sides: Sides) -> dict[ArmName, Findings]:
    """Pass keys in texts of the workload's tokens, with each side's heads. Those that the plain
    model does not find do not count."""
    checkpoint = sides.workload.checkpoint
    tokenizer, model = checkpoint.tokenizer, Reference(checkpoint).model
    hay, tokens = haystack(tokenizer), sides.workload.spec.tokens
    texts = [hide(tokenizer, hay, tokens, seed) for seed in range(TEXTS)]

    def answers(attention: StreamingAttention) -> list[bool]:
        with attending(model, attention):
            return [answer for text in texts for answer in found(model, text)]

    known = answers(PLAIN)
    count = sum(known)
    findings: dict[ArmName, Findings] = {}
    for name, side in sides.by_arm.items():
        streaming, right = side.recipe.cache.streaming, known
        if streaming is not None:
            seen = SeenByHeads(streaming.kept(), streaming.sinks, streaming.window)
            right = answers(StreamingAttention(seen))
        share = sum(a and b for a, b in zip(known, right, strict=True)) / count if count else None
        note = f"{sum(right)} of {len(right)} found in texts of {tokens} tokens, plain {count}"
        findings[name] = Findings({"pass_keys": figure("pass_keys", share, n=count, note=note)})
    return findings


@measure_of_both("sparse")
def sparse(sides: Sides) -> dict[ArmName, Findings]:
    """Divergence and equal choices with the keys that each side reads, on the workload's text and
    on one that repeats its beginning."""
    workload = sides.workload
    length, path = workload.spec.tokens, workload.setting.text(workload.spec)
    ids = read_tokens(workload.checkpoint.tokenizer, path, length)
    model = Reference(workload.checkpoint).model
    findings: dict[ArmName, Findings] = {name: Findings() for name in sides.by_arm}
    for kind, text in both_texts(ids, length).items():
        target = torch.tensor(text[1:])[-DECODED + 1 :]
        full = run(model, text, Sparse())
        for name, side in sides.by_arm.items():
            chosen = side.arm.sparse
            attention = Sparse()
            if chosen is not None:
                attention = Sparse(CHOOSERS[chosen.keys], chosen.budget)
            _, kl, same = against(run(model, text, attention), full, target)
            note = "all keys" if chosen is None else f"{chosen.budget} of {length} keys"
            ending = f"_{kind}" if kind else ""
            for metric, value in (("sparse_kl", kl), ("sparse_same", same)):
                full_name = metric + ending
                findings[name].figures[full_name] = figure(full_name, value, n=DECODED, note=note)
    return findings
