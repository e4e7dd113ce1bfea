"""Predictions of a plan's speed on a chip: the work of every call of a mode, and its terms.

No port with some kinds of work was measured. The same rates price these:

- `readonly` takes the cache in, does not give it out, and copies it once to append the new columns.
- A cache of 8 bits comes in with its scales. A cast first reads it and writes fp16.
- Tokens are routed as if every expert were equally likely.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from cetane.compress import Format
from cetane.errors import CetaneError
from cetane.families import Block, Head, Lookup, Part, Weight
from cetane.hardware.chips import Chip, find_chip, load_chips
from cetane.perf.cost import Rates, Term, Work, costs_of, load_fit, on_chip, terms, total
from cetane.perf.shapes import COPIES, HALF
from cetane.perf.slow_forms import streamed_as
from cetane.planner import BlockCall, CachePlan, Planner
from cetane.planner.weights import format_of
from cetane.schema.recipe import Mode
from cetane.schema.slots import ContractName

Counts = Mapping[Format, int]
"""The number of weights, by their format."""
CROSSES: dict[ContractName, int] = {
    "readonly": 1,
    "blend": 2,
    "shift": 2,
    "stateful": 0,
    "stateful-blend": 0,
    "stateful-shift": 0,
}
"""The number of times that a cache crosses the program's border, in or out."""
COPIED: dict[ContractName, int] = {
    "readonly": COPIES["shift"],
    "blend": COPIES["blend"],
    "shift": COPIES["shift"],
    "stateful": COPIES["copy"],
    "stateful-blend": COPIES["blend"],
    "stateful-shift": COPIES["shift"],
}
"""The number of reads and writes of a cache inside the program, before attention reads it once."""
GREEDY = Work(calls=0, host=1)
"""The host's work for a step: one token, chosen greedily."""
CHOICE = 3
"""The numbers for each token of a head that chooses: its row, in two parts, and its logit."""


@dataclass(frozen=True)
class Prediction:
    """The predicted milliseconds of a call of a mode."""

    mode: Mode
    tokens: int
    context: int
    terms: Mapping[Term, float]
    ms: float
    low: float | None
    high: float | None
    """The range that held most left-out measurements; None for a chip without measurements."""

    @property
    def binds(self) -> Term:
        """The largest term, which bounds the speed."""
        return max(self.terms, key=lambda term: self.terms[term])

    @property
    def tok_s(self) -> float:
        """Tokens a second, if all tokens of the call are kept."""
        return 1000 * self.tokens / self.ms


def rates_of(chip: Chip) -> Rates:
    """The rates of a chip, from the fit that ships."""
    fit = load_fit()
    return on_chip(fit.rates, chip, find_chip(fit.chip))


class Predictor:
    """Predicts plans of one model, and keeps all that does not depend on the recipe."""

    def __init__(self, chip: Chip) -> None:
        """Raises CetaneError for a chip without a weight stream: no other chip's stands for it."""
        if not chip.stream:
            known = ", ".join(name for name, one in load_chips().items() if one.stream)
            raise CetaneError(
                f"{chip.no_speed}, so no speed is predicted", f"there are figures of {known}"
            )
        self.chip, self.fit = chip, load_fit()
        self.rates: Rates = rates_of(chip)
        self.costs = costs_of(self.rates)
        self._listed: dict[str, list[tuple[str, Weight]]] = {}
        self._counts: dict[tuple[str, str], Counts] = {}

    def predict(self, planner: Planner, mode: Mode, context: int | None = None) -> Prediction:
        """A call of a mode, with caches of `context` slots; None for the recipe's context.

        A call of `prefill` is one before a prompt's last, without logits.
        """
        context = context or planner.recipe.cache.context
        named = terms(self.works(planner, mode, context, mode == "prefill"), self.costs)
        ms, errors = total(named), self.fit.errors
        known = bool(self.chip.devices)
        return Prediction(
            mode=mode,
            tokens=planner.recipe.tokens.by_mode()[mode],
            context=context,
            terms=named,
            ms=ms,
            low=ms * errors.low if known else None,
            high=ms * errors.high if known else None,
        )

    def works(self, planner: Planner, mode: Mode, context: int, silent: bool = False) -> list[Work]:
        """The work of the host, and of every call of a mode, or of every silent one."""
        tokens, memory = planner.recipe.tokens.by_mode()[mode], planner.memory.at(context)
        works = [GREEDY]
        for call in planner.calls(mode, silent):
            count, weights = len(call.blocks), self.streamed(planner, call.blocks)
            if call.routed:
                one = {bits: number / count for bits, number in weights.items()}
                expert = replace(call, blocks=call.blocks[:1])
                work = self.call(planner, expert, one, tokens, memory)
                works.append(work.times(distinct(count, tokens, call.routed)))
            else:
                works.append(self.call(planner, call, weights, tokens, memory))
        return works

    def call(
        self,
        planner: Planner,
        call: BlockCall,
        weights: Mapping[float, float],
        tokens: int,
        memory: CachePlan,
    ) -> Work:
        """The work of one call that streams these weights, by their bits."""
        tables = [block for block in call.blocks if isinstance(block, Lookup)]
        looked_up = tokens * self.nbytes(planner, tables) / planner.model.vocab  # a row each
        reading = [cached_keys(call, tokens, memory), shared_keys(planner, call, tokens, memory)]
        return Work(
            tokens=tokens,
            weights=weights,
            attention_macs=sum(work.attention_macs for work in reading),
            memory=looked_up + sum(work.memory for work in reading),
            border=sum(work.border for work in reading)
            + HALF * tokens * channels_across(planner, call.blocks),
        )

    def streamed(self, planner: Planner, blocks: Sequence[Block]) -> dict[float, float]:
        """The number of weights that a call of these blocks multiplies, by their bits; those of
        slow forms count more. Tables are looked up, not multiplied."""
        counts: dict[float, float] = {}
        multiplied = [block for block in blocks if not isinstance(block, Lookup)]
        for form, count in self.counts(planner, multiplied).items():
            bits, slower = streamed_as(form, self.chip.id)
            counts[bits] = counts.get(bits, 0) + count * slower
        return counts

    def nbytes(self, planner: Planner, blocks: Sequence[Block]) -> float:
        """Bytes of these blocks' weights, without scales and palettes."""
        return sum(form.bits / 8 * count for form, count in self.counts(planner, blocks).items())

    def counts(self, planner: Planner, blocks: Sequence[Block]) -> Counts:
        """The number of these blocks' weights, by their format.

        The blocks follow each other in the model, so the first and the last tell which they are.
        """
        if not blocks:
            return {}
        formats = planner.recipe.compression
        rows = blocks[0].stop - blocks[0].start if isinstance(blocks[0], Head) else 0
        key = (f"{blocks[0].name} {blocks[-1].name} {rows}", formats.model_dump_json())
        if key not in self._counts:
            counts: dict[Format, int] = {}
            for block in blocks:
                for _, weight in self._list(block):
                    form = format_of(weight, formats)
                    counts[form] = counts.get(form, 0) + weight.elements
            self._counts[key] = counts
        return self._counts[key]

    def _list(self, block: Block) -> list[tuple[str, Weight]]:
        """The paths of a block's weights, with these."""
        root = block.root
        if isinstance(block, Head):  # a head of the same name may have other rows
            return list(block.weights())
        if root.name not in self._listed:
            self._listed[root.name] = list(root.weights())
        used = tuple(f"{path}." for path in block.modules_used) if isinstance(block, Part) else ""
        return [item for item in self._listed[root.name] if item[0].startswith(used)]


def cached_keys(call: BlockCall, tokens: int, memory: CachePlan) -> Work:
    """Attention to a call's caches: what it multiplies, moves, and takes across the border."""
    if not any(block.keeps for block in call.blocks):
        return Work()
    macs = moved = border = 0
    for cache in memory.caches(call.segment, tokens):
        group, contract = memory.groups[cache.group], cache.form.contract
        visible = memory.visible(cache.group, tokens)
        wide = 2 * HALF * prod(cache.shape)
        held = 2 * cache.layers * group.heads * cache.slots * memory.head_nbytes(cache.group)
        moved += (1 + COPIED[contract]) * wide
        moved += held + wide if held < wide else 0  # a cast reads one and writes the other
        border += CROSSES[contract] * held
        macs += 2 * cache.layers * group.query * group.dim * visible * tokens
    return Work(attention_macs=macs, memory=moved, border=border)


def shared_keys(planner: Planner, call: BlockCall, tokens: int, memory: CachePlan) -> Work:
    """Attention to shared tensors, which are keys or values in fp16, as `cached_keys`."""
    macs = moved = border = 0
    for tensor, name in planner.model.shared.items():
        group, visible = memory.groups[name], memory.visible(name, tokens)
        readers = sum(tensor in block.reads for block in call.blocks)
        wide = HALF * group.heads * group.dim * visible
        moved += readers * wide
        border += wide if tensor in call.shared else 0
        macs += readers * group.query * group.dim * visible * tokens
    return Work(attention_macs=macs, memory=moved, border=border)


def channels_across(planner: Planner, blocks: Sequence[Block]) -> int:
    """The channels of the hidden tensors and logits that blocks read and write, for one token."""
    channels, choose = planner.model.channels, planner.recipe.head.choose
    named = {name for block in blocks for name in (*block.reads, *block.writes)}
    heads = [block for block in blocks if isinstance(block, Head)]
    logits = sum(CHOICE if choose else head.stop - head.start for head in heads)
    return sum(channels.get(name, 0) for name in named) + logits


def distinct(experts: int, tokens: int, chosen: int = 1) -> float:
    """The expected number of different experts that `tokens` tokens choose, if all are equally
    likely and each token takes `chosen`."""
    return experts * (1 - (1 - min(1.0, chosen / experts)) ** tokens)
