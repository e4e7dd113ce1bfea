"""Human text beside a model's own, to fit on: a user's, or the documentation of Python.

A model's own text begins with a random word, so most of it is plain prose. Weights that were fitted
on it alone lost twice as much on technical text. Measured with SmolLM2 in four bits, on the
documentation of modules that are not read here: a KL of 0.109 without this text, and of 0.054 with
it.
"""

from __future__ import annotations

import platform
import pydoc
import re
from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache

import torch
from torch import Tensor

from cetane.checkpoint import Checkpoint, Tokenizer
from cetane.compress.recipe_file import TextFile
from cetane.errors import CetaneError
from cetane.planner import Planner

MODULES = (
    "calendar", "csv", "decimal", "email.message", "fractions", "heapq", "http.client", "inspect",
    "pathlib", "random", "re", "shutil", "socket", "sqlite3", "statistics", "string", "subprocess",
    "tarfile", "tempfile", "textwrap", "threading", "typing", "unittest", "urllib.request",
    "zipfile",
)  # fmt: skip
"""The modules that are read. Experiments and benchmarks judge on none of them
(`cetane.lab.workload`)."""
EDITION = platform.python_version()
"""What the documentation depends on. Its hash would say the same, but takes seconds to make."""
VARIES = re.compile(r" at 0x[0-9a-f]+|\nFILE\n.*|\n    tempdir = .*")
"""What differs between two processes or machines: addresses of objects, and paths."""
SLICES, SLICE = 64, 1 << 16
"""The most slices of a user's text, and the characters of a slice: together about a million tokens.
Fitting reads 90,000 at most, and a text of 256 MB would take minutes to encode."""
LENGTH, LEAST = 256, 8
"""The most tokens of a window, and the fewest windows that a user's text must have."""


def documentation() -> list[str]:
    """The documentation of `MODULES`, and the topics of the language's reference, as far as this
    Python has them. It is the same in every process."""
    found = []
    for name in MODULES:
        with suppress(ImportError, pydoc.ErrorDuringImport):  # this Python lacks a C library
            found.append(VARIES.sub("", pydoc.plain(pydoc.render_doc(name))))
    with suppress(ImportError):
        from pydoc_data.topics import topics

        found += topics.values()
    return found


def spread(text: str) -> list[str]:
    """A user's text, or evenly spaced slices of a long one: more than fitting reads."""
    if len(text) <= SLICES * SLICE:
        return [text]
    starts = (number * (len(text) - SLICE) // (SLICES - 1) for number in range(SLICES))
    return [text[start : start + SLICE] for start in starts]


def windows_of(texts: Iterable[str], tokenizer: Tokenizer, start: int, length: int) -> Tensor:
    """Windows of texts, int64 `(N, length)`, in a mixed order that is always the same.

    Every other window begins with the token `start`, as a model's own text does.
    """
    tokens = torch.tensor([token for text in texts for token in tokenizer.encode(text)])
    windows = tokens[: len(tokens) // length * length].reshape(-1, length)
    windows = windows[torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))]
    windows[::2, 0] = start
    return windows


def check_text(checkpoint: Checkpoint, planner: Planner) -> None:
    """Raise CetaneError for a text that cannot be read or is too short: now, not after the model
    was loaded."""
    if planner.recipe.compression.text is None:
        return
    count, length = human_text(checkpoint, planner).shape
    if count < LEAST:
        raise CetaneError(
            f"compression.text: too short, with {count} windows of {length} tokens",
            f"give a text of {LEAST} windows or more",
        )


def human_text(checkpoint: Checkpoint, planner: Planner) -> Tensor:
    """Windows of the recipe's text, else of documentation, int64 `(N, length)`."""
    return windows(checkpoint, planner.recipe.compression.text, length_of(planner))


@lru_cache(maxsize=1)
def windows(checkpoint: Checkpoint, given: TextFile | None, length: int) -> Tensor:
    """`human_text`, kept for the next step that reads it: the plan reads it first, and to encode
    4 MB takes seconds."""
    texts = documentation() if given is None else spread(given.read())
    return windows_of(texts, checkpoint.tokenizer, start_token(checkpoint), length)


def start_token(checkpoint: Checkpoint) -> int:
    """The token that texts begin with."""
    start, ends = checkpoint.tokenizer.bos_id, checkpoint.tokenizer.eos_ids
    return next(iter(ends), 0) if start is None else start


def length_of(planner: Planner) -> int:
    """The tokens of a window."""
    return min(LENGTH, planner.model.max_context)
