"""The choice of a head's tokens, for a smaller head.

The head keeps the tokens of some texts, and the tokens that the model itself chooses after them. It
also keeps the tokens without which some texts could not be written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from cetane.checkpoint import Tokenizer
from cetane.errors import CetaneError
from cetane.files import Progress, disk_errors, make_folder_of, sha256, silent
from cetane.gates.quality import read_tokens
from cetane.gates.reference import Reference, reference_of
from cetane.pipeline.request import Request, check_named_file
from cetane.planner import Planner
from cetane.planner.weights import format_of
from cetane.schema.subset import Subset, TextCoverage, as_ranges, load_subset

if TYPE_CHECKING:
    from cetane.schema.subset import Ids

WINDOW = 256
"""Tokens of one forward pass of the model."""
HELD_OUT = 10
"""One window in ten judges the choice, unless the user gives another text for that."""
UNIT = 256
"""A head's rows are a multiple of this: 8 slices of whole palette groups."""
LONGEST = 1 << 26
"""The most tokens of a text."""


@dataclass(frozen=True)
class CoveredText:
    """A text, and the model's choices after some of its tokens."""

    name: str
    sha256: str
    tokens: Ids
    choices: Ids

    def covered_by(self, tokens: Ids) -> TextCoverage:
        """The coverage of this text by a subset."""
        return TextCoverage(
            name=self.name,
            sha256=self.sha256,
            tokens=len(self.tokens),
            covered=int(np.isin(self.tokens, tokens).sum()),
            choices=len(self.choices),
            choices_covered=int(np.isin(self.choices, tokens).sum()),
        )


def covered_text(tokenizer: Tokenizer, path: Path) -> CoveredText:
    """The tokens of a file; CetaneError if it cannot be read or has fewer than two."""
    tokens = np.asarray(read_tokens(tokenizer, path, LONGEST), np.int64)
    return CoveredText(path.name, sha256(path), tokens, np.zeros(0, np.int64))


def split(text: CoveredText) -> tuple[CoveredText, CoveredText]:
    """Two parts of a text: one to choose from, and one held out, evenly from the whole text.

    CetaneError for a text that is too short.
    """
    held = np.arange(len(text.tokens)) // WINDOW % HELD_OUT == HELD_OUT - 1
    if not held.any():
        raise CetaneError(
            f"{text.name}: fewer than {HELD_OUT * WINDOW} tokens, too few to hold some out",
            "give a longer text, or another one with --held-out",
        )
    return replace(text, tokens=text.tokens[~held]), replace(text, tokens=text.tokens[held])


def with_choices(
    texts: Sequence[CoveredText], reference: Reference, count: int, progress: Progress
) -> list[CoveredText]:
    """The texts with the model's greedy choices after about `count` of their tokens.

    The tokens are in windows, taken evenly from all texts.
    """
    windows = [
        (index, text.tokens[start : start + WINDOW])
        for index, text in enumerate(texts)
        for start in range(0, len(text.tokens), WINDOW)
    ]
    wanted = min(len(windows), -(-count // WINDOW))
    choices: list[list[Ids]] = [[] for _ in texts]
    for done, at in enumerate(np.linspace(0, len(windows) - 1, wanted).round().astype(int)):
        progress("the model's choices", done, wanted)
        index, window = windows[at]
        choices[index].append(reference.run([window.tolist()])[0].logits.argmax(1))
    empty = np.zeros(0, np.int64)
    return [
        replace(text, choices=np.concatenate([empty, *made]))
        for text, made in zip(texts, choices, strict=True)
    ]


def ranked(texts: Sequence[CoveredText], vocabulary: int, necessary: set[int]) -> Ids:
    """All tokens, the most useful first.

    The necessary tokens come first, then those with the largest share of the texts and of the
    choices together. Equal shares are in the order of ids: in most tokenizers, by frequency.
    """
    worth = np.sum(shares(texts, vocabulary), axis=0)
    worth[[token for token in necessary if token < vocabulary]] = np.inf
    return np.argsort(-worth, kind="stable")


def shares(texts: Sequence[CoveredText], vocabulary: int) -> list[np.ndarray]:
    """Every token's share of the texts, and of the choices where there are any."""
    streams = [
        np.concatenate([text.tokens for text in texts]),
        np.concatenate([text.choices for text in texts]),
    ]
    counts = [np.bincount(s, minlength=vocabulary)[:vocabulary] for s in streams if len(s)]
    return [count / count.sum() for count in counts]


def fewest(texts: Sequence[CoveredText], order: Ids, necessary: int, coverage: float) -> int:
    """The size of the smallest head with this coverage of the texts and of the choices.

    A head keeps the first tokens of `order`, at least the `necessary` ones.
    """
    reached = [np.cumsum(share[order]) for share in shares(texts, len(order))]
    needed = max(int(np.searchsorted(r, coverage - 1e-12)) + 1 for r in reached)
    return min(len(order), -(-max(necessary, needed) // UNIT) * UNIT)


def make_subset(
    order: Ids,
    size: int,
    tokenizer: Tokenizer,
    texts: Sequence[CoveredText],
    held_out: Sequence[CoveredText],
) -> Subset:
    """The subset of the first `size` tokens of an order, with its coverage of the texts."""
    tokens = np.sort(order[:size])
    return Subset(
        vocabulary=len(order),
        tokens=as_ranges(tokens),
        tokenizer=tokenizer.digest,
        texts=tuple(text.covered_by(tokens) for text in texts),
        held_out=tuple(text.covered_by(tokens) for text in held_out),
    )


@dataclass(frozen=True)
class HeadSize:
    """One size of a head: its tokens, its bytes, and the shares of the texts that it can write."""

    tokens: int
    chosen: bool
    head_bytes: int
    texts: float | None
    """Share of the tokens of the texts for choosing. None, here and below, if none were counted."""
    choices: float | None
    """Share of the model's own choices after those tokens."""
    held_out: float | None
    held_out_choices: float | None


@dataclass(frozen=True)
class VocabularyResult:
    """A chosen subset, and heads of other sizes for comparison."""

    subset: Subset
    necessary: int
    """Tokens that always stay: special ones, bytes, single characters."""
    sizes: Sequence[HeadSize]

    @property
    def reached(self) -> float | None:
        """The share of the held-out texts that the subset covers."""
        return share(self.subset.held_out, "covered", "tokens")


def choose_vocabulary(
    request: Request,
    texts: Sequence[Path],
    output: Path,
    *,
    held_out: Sequence[Path] = (),
    coverage: float = 0.999,
    choices: int = 4096,
    progress: Progress = silent,
) -> VocabularyResult:
    """Choose the fewest tokens that cover a share of some texts, and of the model's own choices.

    Without `held_out`, a tenth of the texts judges the choice. The model's choices are computed
    after about `choices` tokens; 0 leaves them out. Writes the subset to `output`. CetaneError for
    a text that is unreadable or too short, and for an `output` that takes no such file.
    """
    planner, tokenizer = request.planner, request.checkpoint.tokenizer
    check_named_file(output, load_subset)
    chosen = [covered_text(tokenizer, path) for path in texts]
    if held_out:
        held = [covered_text(tokenizer, path) for path in held_out]
    else:
        parts = [split(text) for text in chosen]
        chosen, held = [part for part, _ in parts], [part for _, part in parts]
    if choices:
        reference = reference_of(request.checkpoint)
        chosen = with_choices(chosen, reference, choices, progress)
        held = with_choices(held, reference, choices, progress)
    sizes = HeadSizes(request, chosen, held)
    count = fewest(chosen, sizes.order, len(sizes.necessary), coverage)
    subset = sizes.subset(count)
    make_folder_of(output)
    with disk_errors(output):
        subset.save(output)
    vocab, least = planner.model.vocab, len(sizes.necessary)
    shown = sorted({least, count, vocab // 8, vocab // 4, vocab // 2, vocab})
    rows = [sizes.size(n, chosen=n == count) for n in shown if n >= min(least, vocab)]
    return VocabularyResult(subset, least, rows)


class HeadSizes:
    """Heads of any size, all from one order of tokens."""

    def __init__(
        self, request: Request, texts: Sequence[CoveredText], held: Sequence[CoveredText]
    ) -> None:
        self.planner: Planner = request.planner
        self.tokenizer = request.checkpoint.tokenizer
        self.texts, self.held = texts, held
        self.necessary = self.tokenizer.necessary()
        self.order = ranked(texts, self.planner.model.vocab, self.necessary)

    def subset(self, tokens: int) -> Subset:
        return make_subset(self.order, tokens, self.tokenizer, self.texts, self.held)

    def size(self, tokens: int, chosen: bool) -> HeadSize:
        """The bytes and the coverage of a head with the first `tokens` tokens."""
        subset = self.subset(tokens)
        return HeadSize(
            tokens=tokens,
            chosen=chosen,
            head_bytes=self.head_bytes(subset),
            texts=share(subset.texts, "covered", "tokens"),
            choices=share(subset.texts, "choices_covered", "choices"),
            held_out=share(subset.held_out, "covered", "tokens"),
            held_out_choices=share(subset.held_out, "choices_covered", "choices"),
        )

    def head_bytes(self, subset: Subset) -> int:
        """Bytes of a head's weights in the recipe's formats."""
        (head,) = self.planner.model.heads(1, subset.ids)
        formats = self.planner.recipe.compression
        return sum(
            format_of(weight, formats).nbytes(weight.shape)
            for _, weight in head.weights()
            if weight.kind
        )


def share(texts: Sequence[TextCoverage], part: str, whole: str) -> float | None:
    """The covered share of some texts; None if nothing was counted."""
    total = sum(getattr(text, whole) for text in texts)
    return sum(getattr(text, part) for text in texts) / total if total else None
