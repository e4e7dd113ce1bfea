"""SuffixDecoding (arXiv 2411.04975): proposes the tokens that most often followed in earlier texts.

A trie gets a text when it is complete. The n-gram drafter covers repetitions within one text.
"""

import threading
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue

from cetane.engine.session import Session
from cetane.engine.verify import NO_DRAFT, Draft
from cetane.speculate.drafter import Drafter
from cetane.speculate.trie import Trie


class Suffix(Drafter):
    """Proposes the most frequent tokens after a suffix of the text.

    A proposal ends where the chance of all its tokens falls to `threshold`. Of all suffixes in the
    trie, the one with the most promising tokens wins. A thread inserts complete texts while steps
    run programs, so no step waits for it. A look-up may read a growing trie: nodes are complete
    before they are linked.
    """

    name = "suffix"

    def __init__(
        self, trie: Trie | None = None, threshold: float = 0.1, path: Path | None = None,
        owner: str = "",
    ) -> None:  # fmt: skip
        """`path`: the file that keeps the trie between runs. `owner`: sha256 of the tokenizer of
        its tokens. Raises CetaneError for a file that is not a trie of this owner."""
        super().__init__()
        self.trie, self.threshold = trie or Trie(), threshold
        self.path, self.owner = path, owner
        if path is not None and path.exists():
            self.trie.load(path, owner)
        self.inserted = 0
        self.queue: SimpleQueue[list[int] | None] = SimpleQueue()
        self.thread = threading.Thread(target=self._insert, daemon=True)
        self.thread.start()

    def _insert(self) -> None:
        while (tokens := self.queue.get()) is not None:
            self.trie = self.trie.insert(tokens)

    def begin(self, session: Session, tokens: Sequence[int]) -> None:
        super().begin(session, tokens)
        self.inserted = len(self.tokens)  # only the model's own text is learned

    def propose(self, most: int) -> Draft:
        trie = self.trie
        longest = min(trie.depth // 2, len(self.tokens))
        best: list[int] = []
        promise, matched = 0.0, 0
        for length in range(longest, 0, -1):
            node = trie.find(self.tokens[-length:])
            if node is not None:
                tokens, expected = trie.follow(node, most, self.threshold)
                if expected > promise:
                    best, promise, matched = tokens, expected, length
        return Draft(tuple(best), f"{self.name}-{matched}") if best else NO_DRAFT

    def end(self) -> None:
        """Hand the new text to the trie, with the tokens just before it."""
        start = max(0, self.inserted - self.trie.depth // 2)
        self.queue.put(self.tokens[start:])
        self.inserted = len(self.tokens)

    def close(self) -> None:
        """Wait until all texts are inserted, and save the trie."""
        self.queue.put(None)
        self.thread.join()
        if self.path is not None:
            self.trie.save(self.path, self.owner)
