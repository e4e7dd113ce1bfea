"""Samples for calibration: inputs of the engine's own calls on real text, or random numbers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cetane.bundle import Bundle
from cetane.checkpoint import Tokenizer
from cetane.engine.backend import Arrays, Backend, OpenShard
from cetane.engine.call import Running
from cetane.engine.engine import Engine
from cetane.engine.generate import generate
from cetane.engine.portable import PortableBackend
from cetane.engine.sampling import Sampler
from cetane.engine.session import Session
from cetane.gates.probes import asked, windows
from cetane.prompts import suite
from cetane.schema.function import ShardPlan
from cetane.schema.interface import FromCache

CALIBRATING = ("chat", "code", "qa", "summarise")
"""The categories of the 34 prompts that calibrate; the others are held out."""
ANSWER = 16
"""The number of tokens that the model answers to each prompt."""
TAIL = 6
"""The number of tokens left for narrower calls after calls of the widest function."""
RANDOM_CALLS, SPREAD = 5, 0.1
"""The number of random calls, and the standard deviation of every input, masks and caches too.
CoreML-LLM's `conversion/build_w8a8.py` calibrated with these (experiment 3.9)."""

Samples = dict[str, list[Arrays]]
"""Inputs of a shard's calls, by function."""


def prompts(tokenizer: Tokenizer, calibrating: bool) -> list[list[int]]:
    """The prompts that calibrate, or the held-out ones, in the model's chat form."""
    return [
        asked(tokenizer, prompt)
        for category, group in suite().items()
        if (category in CALIBRATING) == calibrating
        for prompt in group
    ]


def held_out(bundle: Bundle, tokens: int) -> list[tuple[int, ...]]:
    """The first `tokens` tokens of the held-out prompts, in windows of the whole context."""
    joined = [token for prompt in prompts(bundle.tokenizer, False) for token in prompt]
    return windows(joined[:tokens], bundle.plan.recipe.cache.context)


def conversations(bundle: Bundle) -> list[list[int]]:
    """The prompts that calibrate, each with the beginning of the bundle's own greedy answer."""
    room = bundle.plan.recipe.cache.context
    engine = Engine(bundle.plan, PortableBackend(bundle), bundle.tables())
    texts = []
    for prompt in prompts(bundle.tokenizer, True):
        question = prompt[: max(1, room - ANSWER)]
        answer = generate(engine.session(bundle.plan.plain_modes), question, Sampler(), ANSWER)
        texts.append([*question, *answer][:room])
    return texts


def random_samples(shard: ShardPlan) -> Samples:
    """Normal numbers for every input of a shard's decode function, as in the published port."""
    draw = np.random.default_rng(0)
    decode = next(function for function in shard.functions if function.tokens == 1)
    return {
        decode.name: [
            {
                item.name: (draw.standard_normal(item.shape) * SPREAD).astype(np.float16)
                for item in decode.inputs
            }
            for _ in range(RANDOM_CALLS)
        ]
    }


class CallRecorder:
    """A backend that keeps the inputs of all calls of its programs."""

    def __init__(self, backend: Backend) -> None:
        self.backend, self.name, self.dtype = backend, backend.name, backend.dtype
        self.by_rows = False
        self.samples: Samples = {}

    def open(self, shard: str) -> "Recorded":
        return Recorded(self.backend.open(shard), self)

    def keep(self, function: str, inputs: Arrays) -> None:
        """Keep a copy of inputs in the program's types; later calls write into the caches."""
        kept = {n: v.astype(np.float16 if v.dtype.kind == "f" else v.dtype)
                for n, v in inputs.items()}  # fmt: skip
        self.samples.setdefault(function, []).append(kept)


@dataclass
class Recorded:
    """A program whose calls are kept."""

    program: OpenShard
    recorder: CallRecorder

    def make_state(self, function: str) -> Any:
        return self.program.make_state(function)

    def call(self, function: str, inputs: Arrays, state: Any) -> Arrays:
        self.recorder.keep(function, inputs)
        return self.program.call(function, inputs, state)


class Traces:
    """The calls of some texts, run through the shards of a bundle, one shard after the other.

    All calls are full. A padded column sees nothing, so its values are no activations of the model.
    """

    def __init__(self, bundle: Bundle, texts: Sequence[Sequence[int]]) -> None:
        self.recorder = CallRecorder(PortableBackend(bundle))
        self.engine = Engine(bundle.plan, self.recorder, bundle.tables(), resident=False)
        self.work = [filled(self.engine.session(), text) for text in texts]

    def shard(self, name: str) -> Samples:
        """The inputs of a shard's calls. Call it once for each shard, in the plan's order."""
        self.recorder.samples = {}
        self.engine.run(self.work, [name])
        for session, _ in self.work:  # later shards do not read this one's caches
            for function in self.engine.plan.by_name[name].functions:
                for item in function.inputs:
                    if isinstance(item.source, FromCache):
                        session.memory.caches.pop(item.source.name, None)
        return self.recorder.samples


def filled(session: Session, text: Sequence[int]) -> tuple[Session, list[Running]]:
    """The full calls of a text's beginning: first the widest, then narrower ones."""
    calls: list[Running] = []
    widest = max(session.widths)
    if len(text) > widest:
        text = text[: len(text) // widest * widest + TAIL]
    for width in reversed(session.widths):
        while len(text) >= width:  # one call at a time: fewer tokens might be padded to a wider one
            calls += session.prepare(text[:width], "all")
            text = text[width:]
    return session, calls
