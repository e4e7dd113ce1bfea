"""Opens the drafters that a user chose, and their controller."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from platform import node
from shlex import quote
from typing import Annotated

from pydantic import Field

from cetane import __version__
from cetane.bundle import Bundle
from cetane.bundle.draft_heads import DraftHead
from cetane.engine.engine import Engine
from cetane.engine.open import open_backend, open_engine
from cetane.engine.sampling import Sampler
from cetane.errors import CetaneError
from cetane.files import cache_dir, is_kept, json_sha256, read_json, write_cache
from cetane.schema.draft_head import KINDS
from cetane.schema.manifest import TOKENIZER
from cetane.schema.plan import Plan
from cetane.speculate.controller import Controller
from cetane.speculate.draft_heads.drafter import drafter_of, open_drafter
from cetane.speculate.draft_heads.runner import Eagle3Runner, MedusaRunner, open_runner
from cetane.speculate.draft_model import DraftModel
from cetane.speculate.drafter import Drafter
from cetane.speculate.ngram import Ngram, PublishedNgram
from cetane.speculate.speculator import Speculator
from cetane.speculate.suffix import EarlierAnswers, Suffix
from cetane.speculate.timing import measure_calls
from cetane.speculate.triforce import TriForce
from cetane.threads import available
from cetane.validation import Data, validated

LOOKUPS = ("ngram", "suffix", "union", "ngram-published")
"""`union` is suffix and ngram together: the controller takes the more promising draft."""
AUTO = "auto"
"""The default choice: look-ups in this process's texts, and the bundle's best draft head. Without a
head, the model drafts for itself where it can."""
PLAIN = "none"
"""The word for no drafter."""
NAMES = (AUTO, PLAIN, *LOOKUPS, TriForce.name, *KINDS)


@dataclass(frozen=True)
class DrafterOptions:
    """A user's choice of a drafter and its options."""

    drafter: str = AUTO
    """One of `NAMES`, or the path of a bundle with the same tokenizer."""
    ngram_min: int = 1
    ngram_max: int = 8
    draft_tokens: int | None = None
    """The most tokens of a draft; None for one less than the narrowest verifying call takes."""


def open_drafters(
    options: DrafterOptions, bundle: Bundle, sampler: Sampler, backend: str, remember: bool = True
) -> list[Drafter]:
    """The chosen drafters, in order of preference.

    With `remember`, a suffix trie that was asked for by name is kept between runs, by tokenizer.
    Raises CetaneError for an unknown drafter, or one that does not fit the bundle.
    """
    check_drafter(options.drafter, bundle)
    ngram = Ngram(options.ngram_min, options.ngram_max)
    owner = tokenizer_hash(bundle)
    texts = cache_dir() / "suffixes" / f"{owner[:16]}.trie" if remember else None
    match options.drafter:
        case "ngram":
            return [ngram]
        case "ngram-published":
            return [PublishedNgram(options.ngram_min, options.ngram_max)]
        case "suffix":
            return [Suffix(EarlierAnswers(texts, owner))]
        case "union":
            return [Suffix(EarlierAnswers(texts, owner)), ngram]
        case TriForce.name:
            return [ngram, TriForce(bundle.plan)]
    if options.drafter == AUTO:
        head = open_best_head(bundle, backend)
        return default_drafters(options, bundle.plan, EarlierAnswers(), head)
    draft_heads = draft_heads_of(bundle)
    if options.drafter in draft_heads:
        draft_head = draft_heads[options.drafter]
        return [open_drafter(draft_head, bundle, open_backend(draft_head, backend))]
    return [DraftModel(open_smaller(options.drafter, bundle, backend), sampler)]


def check_drafter(name: str, bundle: Bundle) -> None:
    """Raise CetaneError for a drafter that is not there. It opens none: that takes seconds."""
    if name in (AUTO, *LOOKUPS, TriForce.name) or name in draft_heads_of(bundle):
        return
    if name in KINDS:
        raise CetaneError(
            f"{bundle.path} has no {name} draft head",
            f"cetane train-head {quote(str(bundle.path))} {name} makes one; "
            "cetane add-head takes one of another bundle",
        )
    if not Path(name).exists():
        names = ", ".join(known for known in NAMES if known != PLAIN)
        raise CetaneError(
            f"no drafter {name!r}, and no such folder: {name}",
            f"known: {names}, or the path of a bundle",
        )


def draft_heads_of(bundle: Bundle) -> dict[str, DraftHead]:
    """A bundle's draft heads, by the names of their drafters."""
    return {str(kind): draft_head for kind, draft_head in bundle.draft_heads().items()}


def open_smaller(name: str, bundle: Bundle, backend: str) -> Engine:
    """The engine of another bundle, at the path `name`, that drafts for this one. Raises
    CetaneError if it does not fit."""
    other = Bundle(Path(name))
    other.verify()
    same = tokenizer_hash(other) == tokenizer_hash(bundle)
    if not same or other.plan.vocab != bundle.plan.vocab:
        raise CetaneError(f"{name}: its tokenizer differs from that of {bundle.path}")
    if other.plan.forgets:
        raise CetaneError(
            f"{name}: its windows are states, which keep no token to go back to",
            'port it with cache.sliding = "readonly"',
        )
    return open_engine(other, backend)


def default_drafters(
    options: DrafterOptions,
    plan: Plan,
    answers: EarlierAnswers,
    head: MedusaRunner | Eagle3Runner | None,
) -> list[Drafter]:
    """The drafters of `auto`, with the bundle's opened draft head. Without one, the model drafts
    for itself in long texts, if its plan can do so."""
    drafters: list[Drafter] = [Suffix(answers), Ngram(options.ngram_min, options.ngram_max)]
    if head is not None:
        drafters.append(drafter_of(head))
    elif TriForce.refusal(plan) is None:
        drafters.append(TriForce(plan))
    return drafters


def open_best_head(bundle: Bundle, backend: str) -> MedusaRunner | Eagle3Runner | None:
    """Open the draft head that drafts by default, if the bundle has one."""
    heads = bundle.draft_heads()
    best = next((heads[kind] for kind in reversed(KINDS) if kind in heads), None)
    return None if best is None else open_runner(best, bundle, open_backend(best, backend))


def tokenizer_hash(bundle: Bundle) -> str:
    """sha256 of the tokenizer's file. If it is equal, two bundles have the same tokens."""
    record = bundle.manifest.files.get(f"{TOKENIZER}/tokenizer.json")
    if record is None:
        raise CetaneError(f"{bundle.path}: no tokenizer.json, which drafters need")
    return record.sha256


Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class KeptTimes(Data):
    """Seconds of calls on one machine, by their width."""

    seconds: dict[int, Annotated[list[Seconds], Field(min_length=1)]]


def call_times(engine: Engine, longest: int) -> dict[int, list[float]]:
    """Measured seconds of the engine's calls, by width. The engine's clocks restart after that."""
    costs = measure_calls(engine.session(), 1 + longest)
    engine.shards.restart_clocks()
    return costs


def known_controller(engine: Engine, longest: int, bundle: Bundle, backend: str) -> Controller:
    """A controller that starts from the times of an earlier process, if there was one.

    So only a bundle's first run on a machine waits for measurements. All later calls are measured
    as they come. `backend` is the name by which the engine's backend was opened.
    """
    machine = [node(), available(), __version__, engine.session().counts(1 + longest)]
    key = json_sha256([bundle.digest, longest, engine.backend.name, backend, *machine])
    path = cache_dir() / "call-times" / f"{key}.json"
    with suppress(CetaneError):
        if is_kept(path):
            return Controller(validated(KeptTimes, read_json(path), str(path)).seconds)
    times = call_times(engine, longest)
    write_cache(path, KeptTimes(seconds=times).model_dump_json())
    return Controller(times)


def longest_draft(options: DrafterOptions, engine: Engine) -> int:
    """The most tokens of a draft: the user's number, else one less than the narrowest verifying
    call takes. Raises CetaneError for a bundle without such a call, or a number out of range."""
    wider = [step.tokens for step in engine.plan.modes.values() if step.tokens > 1]
    if not wider:
        raise CetaneError(
            "the bundle has no call wider than one token", "port with tokens.verify = 4 or 8"
        )
    if options.draft_tokens is None:
        return min(wider) - 1
    if not 1 <= options.draft_tokens < max(wider):
        raise CetaneError(
            f"--draft-tokens {options.draft_tokens}: must be 1 to {max(wider) - 1}, one less than "
            "the widest call"
        )
    return options.draft_tokens


def open_speculator(
    options: DrafterOptions, bundle: Bundle, engine: Engine, sampler: Sampler, backend: str
) -> Speculator | None:
    """The chosen drafters under one speculator, with a controller; None for plain decoding.

    `auto` is plain for a bundle without a verifying call.
    """
    if options.drafter == PLAIN or (options.drafter == AUTO and not verifies(engine)):
        return None
    longest = longest_draft(options, engine)
    drafters = open_drafters(options, bundle, sampler, backend)
    return Speculator(drafters, longest, known_controller(engine, longest, bundle, backend))


def verifies(engine: Engine) -> bool:
    """Whether the plan has a call that takes drafts."""
    return any(mode.tokens > 1 for mode in engine.plan.modes.values())
