"""Are the files beside a bundle's shards right? Tables of rows and angles, bit for bit, and the
tokenizer."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from cetane.bundle.rows import EncodedRows
from cetane.bundle.tables import Tables, TokenRows
from cetane.checkpoint import Tokenizer
from cetane.checkpoint.tokenizer import ROLES
from cetane.engine.authored import host_tables
from cetane.families import Weights
from cetane.gates.weights import WrongWeight
from cetane.planner import Planner

ROWS = 4096
"""The rows of a table that are in memory at a time."""


def wrong_tables(planner: Planner, weights: Weights, tables: Tables) -> Iterator[WrongWeight]:
    """The host's embeddings and rotary tables that differ from the model's."""
    truth = host_tables(planner, weights)
    for name, table in planner.model.rotary.items():
        wanted = table.cos_sin(planner.recipe.cache.context).numpy()
        if not np.array_equal(wanted, tables.rotary[name]):
            yield WrongWeight(shard="tables", label=f"rotary-{name}", parameter="",
                              problem="its angles are not the model's")  # fmt: skip
    pairs: dict[str, tuple[TokenRows | None, TokenRows]] = {
        name: (tables.others.get(name), rows) for name, rows in truth.others.items()
    }
    if tables.tokens is not None:
        pairs["tokens"] = tables.tokens, truth.embedding
    for name, (given, wanted_rows) in pairs.items():
        if given is None or not same_rows(given, wanted_rows):
            yield WrongWeight(shard="tables", label=f"embedding {name}", parameter="",
                              problem="its rows are not the model's")  # fmt: skip


def same_rows(given: TokenRows, wanted: TokenRows) -> bool:
    """Whether a table holds what its format makes of the model's rows `(V, C)`."""
    if not isinstance(given, EncodedRows) or tuple(given.shape) != tuple(wanted.shape):
        return False
    for start in range(0, given.shape[0], ROWS):
        some = slice(start, start + ROWS)
        made = given.row_format.encode(np.asarray(wanted[some]))
        if not all(np.array_equal(made[n], part[some]) for n, part in given.parts.items()):
            return False
    return True


def wrong_tokenizer(given: Tokenizer, model: Tokenizer) -> Iterator[WrongWeight]:
    """The parts of a bundle's tokenizer that are not the model's.

    The model's vocabulary is first saved and read, as the bundle's was: reading marks special
    tokens."""
    with TemporaryDirectory(prefix="cetane-tokenizer-") as folder:
        model.save(Path(folder))
        read = Tokenizer.load(Path(folder))
    # Older bundles keep the roles alone. What templates write of others, rendered conversations
    # show.
    names = {*ROLES, *given.special_tokens}
    parts = {
        "vocabulary": (given.backend.to_str(), read.backend.to_str()),
        "splitting of special tokens": (
            given.backend.encode_special_tokens,
            read.backend.encode_special_tokens,
        ),
        "special tokens": (
            [given.special_tokens.get(name) for name in names],
            [model.special_tokens.get(name) for name in names],
        ),
        "stop tokens": (given.eos_ids, model.eos_ids),
        "chat template": (given.chat_template, model.chat_template),
        "tool template": (given.tool_template, model.tool_template),
    }
    for label, (own, other) in parts.items():
        if own != other:
            yield WrongWeight(
                shard="tokenizer", label=label, parameter="", problem="it is not the model's"
            )
