"""SuffixDecoding (arXiv 2411.04975): proposes the most frequent tokens of earlier answers.

An answer enters the tries when it is complete. The n-gram drafter covers repetitions within a text.
"""

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cetane.engine.session import Session
from cetane.engine.verify import NO_DRAFT, Draft
from cetane.errors import CetaneError
from cetane.speculate.drafter import Drafter
from cetane.speculate.trie import Trie

log = logging.getLogger("cetane.speculate")


class EarlierAnswers:
    """The earlier answers of one model, for all drafters of this process.

    Each adapter has a trie of its own, since it answers in its own way. A trie is bounded, so old
    answers make room for new ones. A thread inserts answers while steps run programs, so a step
    waits for it a few milliseconds at most.
    """

    def __init__(self, path: Path | None = None, owner: str = "") -> None:
        """`path`: the file that keeps the base's trie between runs; None for this process only.
        `owner`: sha256 of the tokenizer of the tokens. Raises CetaneError for a file that is not a
        trie of this owner."""
        self.path, self.owner = path, owner
        self.tries: dict[str | None, Trie] = {None: Trie()}
        """The trie of every adapter that has answered, and of the base (None)."""
        if path is not None and path.exists():
            self.tries[None].load(path, owner)
        self.thread = ThreadPoolExecutor(1, "suffix")
        """It ends with this object: its thread holds no reference while it waits."""

    def trie(self, adapter: str | None) -> Trie:
        """An adapter's trie. It may grow during a look-up: nodes are complete before they are
        linked."""
        return self.tries.get(adapter) or self.tries.setdefault(adapter, Trie())

    def add(self, adapter: str | None, tokens: Sequence[int]) -> None:
        """Add a part of a text, which ends with an answer."""
        self.thread.submit(self._insert, adapter, list(tokens))

    def _insert(self, adapter: str | None, tokens: list[int]) -> None:
        self.tries[adapter] = self.trie(adapter).insert(tokens)

    def close(self) -> None:
        """Wait until all answers are inserted, and save the base's trie.

        A disk that takes no file is only a warning: the answers are complete."""
        self.thread.shutdown()
        if self.path is not None:
            try:
                self.tries[None].save(self.path, self.owner)
            except CetaneError as error:
                log.warning("these answers are not kept for the next run: %s", error)


class Suffix(Drafter):
    """Proposes the most frequent tokens after a suffix of the text.

    A proposal ends where the chance of all its tokens falls below `threshold`. It branches if the
    session takes trees. Of all suffixes in the trie, the one with the most promising tokens wins. A
    proposal's kind tells the length of the suffix, and whether it was met only once: such proposals
    are right less often.
    """

    name = "suffix"

    def __init__(self, answers: EarlierAnswers, threshold: float = 0.1) -> None:
        super().__init__()
        self.answers, self.threshold = answers, threshold
        self.added = 0
        """The number of the text's first tokens that are not for the trie, or already in it."""

    def begin(self, session: Session, tokens: Sequence[int]) -> None:
        super().begin(session, tokens)
        self.adapter = session.adapter
        self.added = len(self.tokens)  # only the model's own text is learned

    def propose(self, most: int) -> Draft:
        trie = self.answers.trie(self.adapter)
        longest = min(trie.depth // 2, len(self.tokens))
        best, promise = NO_DRAFT, 0.0
        for length in range(1, longest + 1):
            node = trie.find(self.tokens[-length:])
            if node is None:
                break  # nor does the trie have a longer suffix
            tokens, parents, expected = trie.follow(node, most, self.threshold, self.trees)
            if tokens and expected >= promise:
                kind = f"{self.name}-{length}{'-once' if trie.count[node] == 1 else ''}"
                best = Draft(tuple(tokens), kind, branches=tuple(parents))
                promise = expected
        return best

    def end(self) -> None:
        """Hand the new text to the trie, with the tokens just before it."""
        if len(self.tokens) > self.added:
            start = max(0, self.added - self.answers.trie(self.adapter).depth // 2)
            self.answers.add(self.adapter, self.tokens[start:])
        self.added = len(self.tokens)

    def close(self) -> None:
        self.answers.close()
