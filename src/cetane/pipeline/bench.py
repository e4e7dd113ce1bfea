"""The benchmark of drafting: a bundle's speed with drafts and without, measured on this machine.

The tokens of every answer are compared with plain generation.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from cetane.bundle import Bundle
from cetane.engine.open import open_engine
from cetane.engine.sampling import Sampler
from cetane.errors import CetaneError
from cetane.files import Progress, silent
from cetane.gates.probes import asked
from cetane.mil.fast import share_threads
from cetane.prompts import suite
from cetane.speculate.bench import Speed, Trial, compare
from cetane.speculate.controller import SLOWEST
from cetane.speculate.drafter import Drafter
from cetane.speculate.open import (
    AUTO,
    DrafterOptions,
    call_times,
    check_drafter,
    longest_draft,
    open_drafters,
)
from cetane.validation import guess

IDLE = 0.5
"""The load, in processes of the last minute, up to which a machine counts as idle."""


@dataclass(frozen=True)
class DraftingBenchmark:
    """The speed of generation with drafts, compared with plain generation."""

    bundle: Path
    longest: int
    """Most tokens of a draft."""
    seconds: Mapping[int, float]
    """Seconds of a call, by its number of tokens."""
    speeds: Sequence[Speed]
    """By category of prompts and by drafter."""
    idle: bool
    """Whether the machine had nothing else to do at the start. Then the clock judges; on a busy
    machine the number of calls does."""

    def pays(self, speed: Speed) -> bool | None:
        """Whether drafts keep the speed of plain decoding, up to `SLOWEST`; None without a speed.
        The ratio counts to two decimals: no time here is known better."""
        ratio = speed.ratio if self.idle else speed.by_calls
        return None if ratio is None else round(ratio, 2) >= SLOWEST

    @property
    def passed(self) -> bool:
        """Whether every token equals that of plain generation, and no category became slower than
        `SLOWEST` allows."""
        return all(speed.same and self.pays(speed) is not False for speed in self.speeds)

    def as_json(self) -> dict[str, Any]:
        return {
            "bundle": str(self.bundle),
            "draft_tokens": self.longest,
            "seconds": dict(self.seconds),
            "passed": self.passed,
            "judged_by": "clock" if self.idle else "calls",
            "speeds": [speed.model_dump(mode="json") for speed in self.speeds],
        }


def bench(
    bundle: str | Path,
    *,
    drafters: Sequence[str] = (AUTO,),
    categories: Sequence[str] = (),
    prompts: int | None = None,
    tokens: int = 64,
    rounds: int = 1,
    draft_tokens: int | None = None,
    adapter: str | None = None,
    backend: str = "auto",
    exclusive: bool = False,
    progress: Progress = silent,
) -> DraftingBenchmark:
    """Generate answers to the suite's prompts, plain and with every drafter.

    - The default of `drafters` is that of normal decoding.
    - `categories` are those of the suite, by default all.
    - `prompts` limits the prompts of each category, `tokens` the tokens of an answer.
    - `adapter` is that of all tokens; `exclusive` is as in `load`.

    CetaneError for an unknown category, drafter or adapter, for answers of one token, whose speed
    nothing tells, and for a prompt that is longer than the context.
    """
    if tokens < 2:
        raise CetaneError("an answer of one token has no speed", "ask for more: --max-new 64")
    idle = os.getloadavg()[0] < IDLE
    opened = Bundle(Path(bundle))
    opened.verify()
    opened.plan.on(adapter)  # this and the next two refuse before the bundle is opened
    for name in drafters:
        check_drafter(name, opened)
    ids = suite_tokens(opened, categories, prompts)
    if exclusive:
        share_threads()
    engine = open_engine(opened, backend)
    choices = [DrafterOptions(name, draft_tokens=draft_tokens) for name in drafters]
    longest = longest_draft(choices[0], engine)
    making: dict[str, Callable[[], list[Drafter]]] = {
        options.drafter: partial(open_drafters, options, opened, Sampler(), backend, remember=False)
        for options in choices
    }
    costs = call_times(engine, longest)
    trial = Trial(engine, tokens, opened.tokenizer.eos_ids, adapter)
    speeds = compare(trial, ids, making, costs, longest, rounds, progress)
    if all(speed.ratio is None for speed in speeds):
        raise CetaneError(
            "every answer ends with its first token, so there is no speed",
            "name other --categories",
        )
    seconds = {width: median(times) for width, times in costs.items()}
    return DraftingBenchmark(opened.path, longest, seconds, speeds, idle)


def suite_tokens(
    bundle: Bundle, categories: Sequence[str], most: int | None
) -> dict[str, list[list[int]]]:
    """The tokens of the suite's prompts, at most `most` of each category; of all, if none is named.

    CetaneError for an unknown category, and for a prompt that is longer than the context: it would
    end the benchmark after minutes.
    """
    known, context = suite(), bundle.plan.recipe.cache.context
    chosen = list(categories) or list(known)
    unknown = [name for name in chosen if name not in known]
    if unknown:
        near = guess(unknown[0], known)
        raise CetaneError(f"no category {unknown[0]!r}; {near}known: {', '.join(known)}")
    ids = {name: [asked(bundle.tokenizer, text) for text in known[name][:most]] for name in chosen}
    longest = {name: max(map(len, group)) for name, group in ids.items()}
    fitting = [name for name in ids if longest[name] <= context]
    for name in ids:
        if name not in fitting:
            other = f", or ask for --categories {','.join(fitting)}" if fitting else ""
            raise CetaneError(
                f"{name}: a prompt of {longest[name]} tokens, and a context of {context}",
                f"port with a larger --context{other}",
            )
    return ids
