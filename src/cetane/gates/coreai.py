"""The gate of a Core AI asset: the logits from Apple's own runtime must be the bundle's.

Asset and bundle hold the same codes of weights. So a difference means a wrong graph, or that the
runtime reads the graph in another way.
"""

from pathlib import Path

import numpy as np

from cetane.bundle import Bundle
from cetane.engine.backend import Array
from cetane.engine.engine import Engine
from cetane.engine.portable import PortableBackend
from cetane.export.coreai import AssetRunner, contexts
from cetane.gates import metrics
from cetane.gates.limits import limits
from cetane.gates.probes import text_tokens
from cetane.gates.verdict import Check, at_least, at_most
from cetane.schema.interface import Mask
from cetane.schema.plan import Plan
from cetane.validation import Data

POSITIONS, BEYOND = (3, 11, 12, 80), 44
"""The places at which logits are compared, in fed tokens. 3 is a first call. 11 and 12 compute a
block again. 80 needs every function of a context. One more place lies `BEYOND` tokens after the end
of the first context if an asset has a second one, and after the end of each window. Core AI's CPU
interpreter is slow, so the places are few, and of a third context only the end is judged."""
ENDING = 64
"""The last tokens of the longest context, which are judged with nothing before them: one call. The
asset holds the angles of every position."""
WIDEST = 1024
"""The widest window whose end is judged. SmolLM2 takes half a CPU second a token, so a window of
4,096 would take half an hour."""
TOO_WIDE = (
    "no judged text was longer than the windows of {} tokens: Apple's runtime would take too long"
)


class CoreAIResult(Data):
    """The outcome: at each place, the cosine and KL of the logits, and the margin of the choice.

    The margin says how far the asset's best token is below the bundle's, in nats of the bundle's
    logits."""

    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)


def judge_coreai(bundle: Bundle, asset: Path) -> CoreAIResult:
    """Compare an asset with the bundle from which it was exported, whose head must give logits.

    The bundle runs in fp32, the asset in fp16 as it is written. A choice may differ where the
    bundle's own two best tokens are a tie.
    """
    plan = bundle.plan
    first, *longer = contexts(plan.recipe.cache.context)
    ends = [window for window in windows(plan) if window <= WIDEST] + [first] * bool(longer)
    places = sorted({*POSITIONS, *(min(end + BEYOND, plan.recipe.cache.context) for end in ends)})
    tokens = text_tokens(bundle.tokenizer, max(places[-1], ENDING))
    engine = Engine(plan, PortableBackend(bundle), bundle.tables())
    ours = engine.session().feed(tokens[: places[-1]], "all")
    assert ours is not None
    checks, fed = list[Check](), 0
    with AssetRunner(asset) as runner:
        for place in places:
            theirs, fed = runner.feed(tokens[fed:place]), place
            checks += place_checks(f"after {place} tokens", theirs, ours[place - 1])
        if places[-1] < plan.recipe.cache.context:
            first = plan.recipe.cache.context - ENDING
            runner.start(first)
            theirs = runner.feed(tokens[:ENDING])
            last = engine.session(start=first).feed(tokens[:ENDING], "last")
            assert last is not None
            checks += place_checks("at the end of the context", theirs, last)
    return CoreAIResult(checks=tuple(checks))


def place_checks(where: str, theirs: Array, truth: Array) -> list[Check]:
    """The checks of one token's logits `(V,)`: the asset's, and the bundle's."""
    limit = limits()
    cosine = float(metrics.cosine(theirs[None], truth[None])[0])
    kl = float(metrics.divergence(theirs[None], truth[None])[0])  # sees a wrong scale
    cost = float(truth.max() - truth[int(np.argmax(theirs))])
    return [
        at_least(f"cosine {where}", cosine, limit.fp16.logit_cosine),
        at_most(f"KL {where}", kl, limit.fp16.kl),
        at_most(f"margin of the choice {where}", cost, limit.evidence.margin),
    ]


def windows(plan: Plan) -> list[int]:
    """The windows of a plan's masks that are shorter than its context, ascending."""
    sources = (item.source for function in plan.functions.values() for item in function.inputs)
    found = {source.window or 0 for source in sources if isinstance(source, Mask)}
    return sorted(window for window in found if 0 < window < plan.recipe.cache.context)


def unjudged(plan: Plan) -> list[str]:
    """What no place shows, as warnings."""
    wide = [f"{window:,}" for window in windows(plan) if window > WIDEST]
    return [TOO_WIDE.format(" and ".join(wide))] if wide else []
