"""A trie of token sequences with counts, of bounded size, kept in a file between runs."""

import hashlib
import struct
from array import array
from collections.abc import Sequence
from heapq import heappop, heappush
from pathlib import Path

import numpy as np

from cetane.errors import CetaneError
from cetane.files import disk_errors, open_regular, replacing

MAGIC = b"cetane-trie-1\n"
HEADER = struct.Struct("<qq32s32s")
"""Number of nodes, clock, sha256 of the rest, and sha256 of the tokens' owner."""
LARGEST_COUNT = 1 << 30
"""The largest count and clock. Their 32 bits hold twice as much."""
ROOT = 0
FIELDS = 4
"""The integers of a node in a file: parent, token, count, last use."""


class Trie:
    """Counts of every run of up to `depth` tokens; node 0 is the empty run.

    A full trie has a successor. The successor drops the half of the nodes that was met least, and
    longest ago. It halves all counts, so that runs still in use survive. A parent is met at least
    as often as its child, and as late, so the rest is a trie too. The full trie stays unchanged,
    since a look-up may still read it.
    """

    def __init__(self, depth: int = 16, most: int = 100_000) -> None:
        if depth < 2 or most < 2 * depth:
            raise CetaneError(f"a trie of {most} nodes, {depth} deep, has no room for a text")
        self.depth, self.most, self.clock = depth, most, 0
        self.children: dict[int, int] = {}
        """Node by parent and token: `parent << 32 | token`."""
        self.parent, self.token = array("i", [ROOT]), array("i", [0])
        self.count, self.used = array("i", [0]), array("i", [0])
        self.best = array("i", [ROOT])
        """The most frequent child of each node, the newest of equals; ROOT if it has none."""
        self.second = array("i", [ROOT])
        """The most frequent of its other children."""

    def __len__(self) -> int:
        return len(self.count)

    def insert(self, tokens: Sequence[int]) -> "Trie":
        """Count every run of a text. Returns the trie to use from now: this one or its
        successor."""
        trie = self
        for start in range(len(tokens)):
            run = tokens[start : start + trie.depth]
            if len(trie) + len(run) > trie.most:
                trie = trie.successor()
            trie.clock += 1
            trie.count[ROOT] += 1
            node = ROOT
            for token in run:
                node = trie.step(node, token)
        return trie

    def step(self, node: int, token: int) -> int:
        """The child for a token, counted once more."""
        key = node << 32 | token
        child = self.children.get(key)
        if child is None:
            child = len(self)
            for column, value in (
                (self.parent, node), (self.token, token), (self.count, 0), (self.used, 0),
                (self.best, ROOT), (self.second, ROOT),
            ):  # fmt: skip
                column.append(value)
            self.children[key] = child
        self.count[child] += 1
        self.used[child] = self.clock
        self._rank(node, child)
        return child

    def _rank(self, node: int, child: int) -> None:
        """Keep the two most frequent children of a node, after one was counted."""
        best, second = self.best[node], self.second[node]
        if child == best:
            return
        if best == ROOT or self.count[child] >= self.count[best]:
            self.best[node], self.second[node] = child, best
        elif second in (ROOT, child) or self.count[child] >= self.count[second]:
            self.second[node] = child

    def find(self, tokens: Sequence[int]) -> int | None:
        """The node of a run; None if the run is unknown."""
        node = ROOT
        for token in tokens:
            child = self.children.get(node << 32 | token)
            if child is None:
                return None
            node = child
        return node

    def follow(
        self, node: int, most: int, threshold: float, branches: bool = False
    ) -> tuple[list[int], list[int], float]:
        """The likeliest tokens after a run, their parents (as in `Draft`), and the expected number
        of right ones.

        They end before the chance of a token, and of all before it, falls below `threshold`. With
        `branches`, two tokens may follow one, so they are a tree, its likeliest tokens first.
        """
        tokens: list[int] = []
        parents: list[int] = []
        expected = 0.0
        waiting: list[tuple[float, int, int]] = []

        def add(above: int, chance: float, place: int) -> None:
            for child in (self.best[above], self.second[above])[: 1 + branches]:
                if child != ROOT:
                    share = chance * self.count[child] / self.count[above]
                    if share >= threshold:
                        heappush(waiting, (-share, place, child))

        add(node, 1.0, -1)
        while waiting and len(tokens) < most:
            chance, place, child = heappop(waiting)
            tokens.append(self.token[child])
            parents.append(place)
            expected -= chance
            add(child, -chance, len(tokens) - 1)
        return tokens, parents, expected

    def successor(self) -> "Trie":
        """A trie of the more frequent half of the nodes."""
        count, used = np.array(self.count), np.array(self.used)
        order = np.lexsort((-used[1:], -count[1:])) + 1  # stable, and parents come first
        kept = np.sort(np.append(order[: self.most // 2], ROOT))
        rows = np.stack([np.array(c) for c in (self.parent, self.token, self.count, self.used)])
        rows = rows[:, kept]
        rows[0] = np.searchsorted(kept, rows[0])
        rows[2] = np.maximum(rows[2] // 2, 1)
        result = Trie(self.depth, self.most)
        result.clock = self.clock
        result._fill(rows)
        return result

    def _fill(self, rows: np.ndarray[tuple[int, int], np.dtype[np.int32]]) -> None:
        """Take nodes from a matrix of `FIELDS` rows, in which parents come before children."""
        made = [array("i", row.astype(np.int32).tobytes()) for row in rows]
        parent, token, _, _ = made
        self.parent, self.token, self.count, self.used = made
        self.best = array("i", bytes(4 * len(parent)))
        self.second = array("i", self.best)
        self.children = {}
        for node in range(1, len(parent)):
            self.children[parent[node] << 32 | token[node]] = node
            self._rank(parent[node], node)

    def save(self, path: Path, owner: str) -> None:
        """Write the trie; `owner` is the sha256 of the tokens' tokenizer. A kill leaves the earlier
        file unchanged."""
        rows = np.stack([np.array(c) for c in (self.parent, self.token, self.count, self.used)])
        body = rows.astype("<i4").tobytes()
        header = HEADER.pack(
            len(self), self.clock, hashlib.sha256(body).digest(), bytes.fromhex(owner)
        )
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as temporary:
                temporary.write_bytes(MAGIC + header + body)

    def load(self, path: Path, owner: str) -> None:
        """Read a file of `save`. Raises CetaneError if it is damaged, too large, or of another
        owner."""
        start = len(MAGIC) + HEADER.size
        longest = start + 4 * FIELDS * self.most
        try:
            with open_regular(path) as file:
                content = file.read(longest + 1)
        except OSError as error:
            raise CetaneError(f"cannot read {path}: {error.strerror}") from error
        body = content[start:]
        hint = "remove it to start anew"
        if not content.startswith(MAGIC) or len(content) < start or len(content) > longest:
            raise CetaneError(f"{path}: not a suffix trie of at most {self.most} nodes", hint)
        nodes, clock, digest, whose = HEADER.unpack(content[len(MAGIC) : start])
        if len(body) != 4 * FIELDS * nodes or hashlib.sha256(body).digest() != digest:
            raise CetaneError(f"{path}: damaged: its hash differs", hint)
        if whose.hex() != owner:
            raise CetaneError(f"{path}: belongs to another tokenizer", hint)
        rows = np.frombuffer(body, "<i4").reshape(FIELDS, nodes)
        parent, token, count, used = rows
        valid = (
            nodes > 0
            and 0 <= clock < LARGEST_COUNT
            and (token >= 0).all()
            and (count[1:] > 0).all()
            and (count < LARGEST_COUNT).all()
            and (used >= 0).all()
            and (parent >= 0).all()
            and (parent[1:] < np.arange(1, nodes)).all()
        )
        if not valid:
            raise CetaneError(f"{path}: not a suffix trie", hint)
        self._fill(rows.copy())
        self.clock = clock
