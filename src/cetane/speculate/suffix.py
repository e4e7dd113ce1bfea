"""SuffixDecoding (arXiv 2411.04975): what followed the last tokens in earlier outputs, with counts.

The text that is being written is the n-gram drafter's; a trie gets it when it is complete.
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
    """For every suffix of the text that the trie knows, what came after it most often; the
    continuation with most expected tokens is proposed, up to where its chance falls to
    `threshold`.

    Complete texts are inserted by a thread, so a step never waits for an insertion; the thread
    works while a step is inside a program. A look-up may meet a trie that is just growing: nodes
    are complete before they are linked.
    """

    name = "suffix"

    def __init__(
        self, trie: Trie | None = None, threshold: float = 0.1, path: Path | None = None,
        owner: str = "",
    ) -> None:  # fmt: skip
        """`path`: where the trie is kept between runs, as the `owner`'s (a sha256); CetaneError if
        the file there is not one."""
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
        self.inserted = len(self.tokens)  # of a prompt only what the model says is learned

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
        """Hand the text over, with the tokens before it that lead to it."""
        start = max(0, self.inserted - self.trie.depth // 2)
        self.queue.put(self.tokens[start:])
        self.inserted = len(self.tokens)

    def close(self) -> None:
        """Finish what is to be inserted, and save."""
        self.queue.put(None)
        self.thread.join()
        if self.path is not None:
            self.trie.save(self.path, self.owner)
