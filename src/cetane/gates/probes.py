"""Probes: the tokens that the gates use, seeded, recorded and free of known traps.

A BOS token at the start exaggerates quantisation errors. So do tokens with unusually small
embeddings beside ordinary ones (ane-book, ZAYA experiments 30 and 31). Probes of structure and
compression have neither. Those of narrower arithmetic begin as prompts do: of all tokens, BOS comes
nearest to the end of fp16's range.
"""

import tomllib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Literal

import numpy as np

from cetane.bundle.tables import TokenRows
from cetane.checkpoint import Tokenizer
from cetane.engine.backend import Array
from cetane.engine.schedule import skips
from cetane.errors import CetaneError
from cetane.families import LONGEST_BLOCK
from cetane.files import shipped_text
from cetane.schema.plan import Plan
from cetane.schema.recipe import Mode

SEED = 1
ROWS = 1 << 14
"""The rows of the embedding that are in memory at a time."""
SMALL = 5.0
"""The percentile of embedding norms below which a token is not drawn."""
LEAST_OWN = 8
"""The least number of tokens that a mode itself takes at the start of a probe, and at its end."""
FEW = 32
"""The tokens of a sequence that is drawn for experts."""
DRAFTED = 16
"""The most tokens of a draft that is accepted in part or whole, unless narrower calls take it."""
AFTER = 1
"""The tokens that follow each draft."""
COUNTED = (1 << 11, 1 << 15, 1 << 16)
"""The positions up to which numbers of 16 bits count: fp16, signed and unsigned integers."""
WORK = 10**13
"""Products of weights and tokens that one text may cost: some minutes on two cores. A model of a
billion weights then reads 10,000 tokens, a larger one fewer."""
TEXT_PROBE = "text"
FAINT_PROBE = "faint"
EXPERTS_PROBE = "experts"
FAINT = 2.0**-10
"""The factor on the embeddings of a probe that shows a norm's epsilon. With ordinary embeddings an
epsilon has no effect."""

QUESTIONS = (
    "What is the capital of France?",
    "Write a Python function that reverses a string.",
    "Why is the sky blue?",
    "List three uses of a paper clip.",
    "Translate 'good morning' into Spanish and German.",
)


@dataclass(frozen=True)
class Probe:
    """A sequence to run and compare.

    Its first token is at position `start`, with nothing before it. Its embeddings are `scale` times
    the model's.
    """

    name: str
    tokens: tuple[int, ...]
    start: int = 0
    scale: float = 1.0


def structure_probes(
    embedding: TokenRows, tokenizer: Tokenizer, plan: Plan, filled: int, drawn_for_experts: int = 0
) -> list[Probe]:
    """The probes that show a wrong graph.

    - A text that fills caches with `filled` tokens, and uses every slot of every window again. At
      each smaller capacity it has filled that cache. Behind these are tokens for what a host does
      (`host_parts`).
    - The end of the context, with nothing before it.
    - Every crossing from one capacity to the next, and those of `borders`.
    - Embeddings so faint that every epsilon has an effect, if the host looks embeddings up.
    - Short sequences of random tokens, `drawn_for_experts` together: they take experts that a text
      does not take. Many are short, since tokens with few before them differ most.

    `embedding` is `(V, C)`.
    """
    context, widest = plan.recipe.cache.context, widest_tokens(plan)
    reused = max((group.count for group in plan.caches.values() if group.limited), default=0)
    tail = widest + widest // 2 + LEAST_OWN
    hosted = max(host_tokens(plan, mode) for mode in plan.modes)
    read = max(reused, filled)
    length = min(context, read + widest + tail + hosted)
    excluded = {*tokenizer.eos_ids, tokenizer.bos_id or 0}
    drawn = random_tokens(embedding, 2 * tail, SEED, excluded)
    probes = [
        Probe(TEXT_PROBE, text_tokens(tokenizer, length)),
        Probe("end of the context", drawn[: min(tail, context)], max(0, context - tail)),
    ]
    crossed = {capacity.tokens for capacity in plan.smaller}
    for at in sorted(crossed.union(borders(plan, read, context - tail))):
        start = max(0, at - tail)
        probes.append(Probe(f"beyond {at}", drawn[: context - start], start))
    if not plan.recipe.embedding.inside:
        probes.append(Probe(FAINT_PROBE, drawn[tail : tail + LEAST_OWN], scale=FAINT))
    size = min(FEW, context)
    others = random_tokens(embedding, -(-drawn_for_experts // size) * size, SEED + 1, excluded)
    for at in range(0, len(others), size):
        probes.append(Probe(f"{EXPERTS_PROBE} {at // size + 1}", others[at : at + size]))
    return probes


def borders(plan: Plan, least: int, most: int) -> set[int]:
    """The first and the last position, of those above `least` and up to `most`, at which attention
    begins a new block of keys; and those of `COUNTED`.

    One loop cuts and merges all blocks, so these two show what the others do. In caches that shift,
    newest keys are on the right: no short probe reaches a border.
    """
    size = plan.recipe.family.get("full_block") or LONGEST_BLOCK
    if all(slots.limited or slots.shifts for slots in plan.caches.values()):
        return set()
    every = range((least // size + 1) * size, most + 1, size)
    return {*every[:1], *every[-1:], *(at for at in COUNTED if least < at <= most)}


def widest_tokens(plan: Plan) -> int:
    """Tokens of the widest call."""
    return max(mode.tokens for mode in plan.modes.values())


def widest_mode(plan: Plan) -> Mode:
    """The mode of the widest call."""
    return max(plan.modes, key=lambda mode: plan.modes[mode].tokens)


HostWay = Literal["", "rewind", "draft", "tree", "last"]
"""How a host takes some tokens:

- as they come;
- after wrong tokens, from which it returns to a mark;
- from a call of which it accepts some tokens or all;
- from a call that holds a tree, of which it accepts one path;
- asking for the logits of the last token only."""


@dataclass(frozen=True)
class ProbePart:
    """A number of tokens of a probe, the mode that takes them, and how. If `judged`, their logits
    are compared."""

    mode: Mode
    tokens: int
    judged: bool = True
    way: HostWay = ""
    drafted: int = 0
    """The number of tokens of its draft or tree, right and wrong ones."""


def parts(
    plan: Plan, mode: Mode, length: int, crossed: Sequence[int] = ()
) -> tuple[ProbePart, ...]:
    """The parts of a probe of `length` tokens, in turn.

    The mode itself takes both ends; each ends with a call that is not full. So it does before and
    behind each number of tokens in `crossed`, ascending. In each gap between, it first makes a call
    without logits. The widest mode takes the other tokens, so the mode reads caches that another
    one wrote.
    """
    width, whole = plan.modes[mode].tokens, own_tokens(plan, mode)
    own = whole + width // 2
    last = length - own
    if last <= own:
        return (ProbePart(mode, length),)
    made, at = list[ProbePart](), 0
    for stop, following in pairwise([0, *(stop for stop in crossed if stop < last), last]):
        before, behind = max(at, stop - whole), min(stop + own, following)
        made += between(plan, mode, before - at)
        made += [ProbePart(mode, stop - before), ProbePart(mode, behind - stop)]
        at = behind
    made += [*between(plan, mode, last - at), ProbePart(mode, own)]
    return tuple(part for part in made if part.tokens)


def between(plan: Plan, mode: Mode, tokens: int) -> list[ProbePart]:
    """The parts of tokens that nobody judges."""
    silent = min(plan.modes[mode].tokens, tokens)
    return [
        ProbePart(mode, silent, judged=False),
        ProbePart(widest_mode(plan), tokens - silent, judged=False),
    ]


def own_tokens(plan: Plan, mode: Mode) -> int:
    """The tokens of whole calls of a mode: at least `LEAST_OWN`."""
    width = plan.modes[mode].tokens
    return -(-LEAST_OWN // width) * width


def whole_parts(plan: Plan, mode: Mode, room: int) -> tuple[ProbePart, ...]:
    """Whole calls of a mode, at most `room` tokens. If calls without logits skip layers, one comes
    first: it runs functions of its own."""
    own = min(own_tokens(plan, mode), room)
    chosen = plan.modes[mode]
    silent = min(chosen.tokens, room - own) if skips(plan, chosen) else 0
    made = ProbePart(mode, silent, judged=False), ProbePart(mode, own)
    return tuple(part for part in made if part.tokens)


def probe_parts(plan: Plan, mode: Mode, probe: Probe) -> tuple[ProbePart, ...]:
    """The parts of a probe: `parts`. Those of the text cross each capacity where it is full, and
    behind them are `host_parts`, if they fit. At the end of the context, the last calls are whole.

    Each mode takes all tokens for experts itself: its graph may be wrong in one expert alone."""
    length = len(probe.tokens)
    if probe.name.startswith(EXPERTS_PROBE):
        return (ProbePart(mode, length),)
    if probe.name != TEXT_PROBE:
        made = parts(plan, mode, length)
        ends = probe.start + length == plan.recipe.cache.context
        return full_at_the_end(plan, made) if ends else made
    hosted = host_parts(plan, mode) if holds_host_parts(plan, mode, length) else ()
    crossed = [capacity.tokens for capacity in plan.smaller]
    read = length - sum(part.tokens for part in hosted)
    return (*parts(plan, mode, read, crossed), *hosted)


def full_at_the_end(plan: Plan, made: tuple[ProbePart, ...]) -> tuple[ProbePart, ...]:
    """The same parts, with whole calls at the end. Behind them, a context has no room for a call
    that is not full, so `decode` would take its last tokens in every mode."""
    *before, last = made
    whole = min(own_tokens(plan, last.mode), last.tokens)
    split = replace(last, tokens=last.tokens - whole), replace(last, tokens=whole)
    return (*before, *(part for part in split if part.tokens))


def holds_host_parts(plan: Plan, mode: Mode, length: int) -> bool:
    """Whether a text of `length` tokens has room for `host_parts` behind others."""
    return length >= LEAST_OWN + host_tokens(plan, mode)


def host_parts(plan: Plan, mode: Mode) -> tuple[ProbePart, ...]:
    """Some tens of tokens that a mode takes as a host does when it drafts, rewinds or generates.

    They come last, so a host's fault shows in no other part. A state that reuses slots takes no
    marks. The last token's logits come from a full call, and from one that is not."""
    width = plan.modes[mode].tokens
    made = [] if plan.forgets else [ProbePart(mode, LEAST_OWN // 2, way="rewind")]
    if width > 1:
        made += draft_parts(plan, mode)
    return (*made, *(ProbePart(mode, count, way="last") for count in (width, max(1, width // 2))))


def draft_parts(plan: Plan, mode: Mode) -> Iterator[ProbePart]:
    """Drafts of which a mode accepts one token, half of them and all; then two trees.

    The first draft fills a call. One tree leaves a column of padding, unless a narrower call would
    take it.
    """
    width = plan.modes[mode].tokens
    least = 1 + max((own.tokens for own in plan.modes.values() if own.tokens < width), default=1)
    most = max(min(width, DRAFTED), least)
    for accepted, drafted in dict.fromkeys([(1, width), (-(-most // 2), most), (most, most)]):
        yield ProbePart(mode, accepted + AFTER, way="draft", drafted=drafted)
    for drafted in dict.fromkeys([most, max(most - 1, least)]):
        yield ProbePart(mode, len(tree_path(drafted)) + AFTER, way="tree", drafted=drafted)


def tree_path(count: int) -> range:
    """The accepted columns in a tree of `count` tokens: every other one, to the last.

    Beside each is a wrong token with the same parent.
    """
    return range(1 - count % 2, count, 2)


def tree_parents(count: int) -> list[int]:
    """The parents of a tree of `count` tokens: all are in `tree_path`, or before the tree."""
    return [max(-1, column - 1 - (column + count) % 2) for column in range(count)]


def host_tokens(plan: Plan, mode: Mode) -> int:
    """The number of tokens of `host_parts`."""
    return sum(part.tokens for part in host_parts(plan, mode))


def random_tokens(
    embedding: TokenRows, length: int, seed: int, excluded: set[int]
) -> tuple[int, ...]:
    """Random tokens with ordinary embeddings, all equally likely; `embedding (V, C)`."""
    norms = row_norms(embedding)
    usable = np.flatnonzero(norms >= np.percentile(norms, SMALL))
    usable = usable[~np.isin(usable, sorted(excluded))]
    drawn = np.random.default_rng(seed).choice(usable, length)
    return tuple(int(token) for token in drawn)


def row_norms(embedding: TokenRows) -> Array:
    """Norms `(V,)` of the rows of an embedding."""
    return np.concatenate(
        [
            np.linalg.norm(np.asarray(embedding[start : start + ROWS], dtype=np.float32), axis=1)
            for start in range(0, embedding.shape[0], ROWS)
        ]
    )


@cache
def texts() -> str:
    """The text that judges ports."""
    content = tomllib.loads(shipped_text("gates/texts.toml"))
    return "\n".join(text["content"].strip() + "\n" for text in content["text"])


def english() -> str:
    """An English text for choices before a build. The gates judge the result on `texts()`."""
    return shipped_text("data/texts/english.txt")


def text_tokens(tokenizer: Tokenizer, length: int, text: str = "") -> tuple[int, ...]:
    """The first `length` tokens of a text, by default `texts()`; repeated if it is shorter.

    A BOS token in front is left out. Raises CetaneError if no token is left.
    """
    tokens = tokenizer.encode(text or texts())
    if tokenizer.bos_id is not None and tokens[:1] == [tokenizer.bos_id]:
        tokens = tokens[1:]
    if not tokens:
        raise CetaneError(
            "the tokenizer makes no token of the English text by which ports are judged",
            "give a checkpoint with the tokenizer of its model",
        )
    repeated = tokens * (-(-length // len(tokens)))
    return tuple(repeated[:length])


def begun(tokenizer: Tokenizer, length: int, text: str = "", up_to: int = 0) -> tuple[int, ...]:
    """`text_tokens` behind a BOS token, if the model has one: as prompts begin. `length` counts
    both. The text ends with its token `up_to`, if so many tokens reach no further."""
    first = () if tokenizer.bos_id is None else (tokenizer.bos_id,)
    own = length - len(first)
    stop = max(own, up_to + 1)
    return (*first, *text_tokens(tokenizer, stop, text)[stop - own :])


def text_windows(tokenizer: Tokenizer, plan: Plan, start: int, stop: int) -> list[Probe]:
    """The text from one position to another, in windows that fit the context.

    Each window begins anew, without the text before it. It has one token more than judged
    positions: the last token is only a target.
    """
    context = plan.recipe.cache.context
    size = min(context - 1, stop - start)
    tokens = text_tokens(tokenizer, stop + 1)
    return [
        Probe(f"text from {at}", tokens[at : min(at + size, stop) + 1])
        for at in range(start, stop, size)
    ]


def windows(tokens: Sequence[int], context: int) -> list[tuple[int, ...]]:
    """Tokens in windows of at most `context`; a last window of one token is left out."""
    pieces = [tuple(tokens[start : start + context]) for start in range(0, len(tokens), context)]
    return [piece for piece in pieces if len(piece) > 1]


def chat_prompts(tokenizer: Tokenizer, count: int) -> list[list[int]]:
    """Questions in the model's chat form."""
    return [asked(tokenizer, question) for question in QUESTIONS[:count]]


def asked(tokenizer: Tokenizer, question: str) -> list[int]:
    """A question in the model's chat template. It is plain text if there is none, and if the
    template refuses a question alone: some want a system message, or parts in place of a text."""
    if tokenizer.has_chat_template:
        with suppress(CetaneError):
            return tokenizer.chat([{"role": "user", "content": question}])
    return tokenizer.encode(question)
