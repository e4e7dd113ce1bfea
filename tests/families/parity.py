"""What the families' tests share: a sequence, ways to feed it, and the distance to transformers."""

from collections.abc import Iterable
from itertools import accumulate, cycle, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from tests.conftest import InMemoryCheckpoint

from cetane.bundle.rows import ROW_FORMATS, EncodedRows
from cetane.bundle.tables import Tables, TokenRows
from cetane.engine.authored import authored_engine
from cetane.engine.engine import Engine
from cetane.planner import Planner
from cetane.schema.manifest import table_path
from cetane.schema.recipe import Recipe
from cetane.schema.slots import CONTRACTS

TOLERANCE = 1e-4
CONTEXT = 32
FEEDS = {
    "prefill": [32],
    "steps": [*[1] * 8, 16, *[1] * 8],
    "steps of 4": [4] * 8,
    "uneven": [5, 1, 11, 2, 4, 3, 6],
}
cuts = st.sets(st.integers(1, CONTEXT - 1)).map(
    lambda at: [stop - start for start, stop in pairwise([0, *sorted(at), CONTEXT])]
)
"""Pieces of the sequence, of any lengths."""


def in_turn(models: Iterable[str]) -> list[tuple[str, str]]:
    """Each model with one contract of caches, in turn: layers do not know the contract. In
    `test_llama.test_recipes` and `test_anything` every contract meets all other choices."""
    return list(zip(models, cycle(CONTRACTS)))


def tokens(vocab: int, length: int = CONTEXT) -> list[int]:
    return np.random.default_rng(0).integers(0, vocab, length).tolist()


@torch.inference_mode()
def truth(model: Any, length: int = CONTEXT) -> np.ndarray:
    """Logits of transformers' eager attention for the whole sequence at once."""
    ids = torch.tensor([tokens(model.config.vocab_size, length)])
    # transformers 5.23 cannot leave positions out of a Gemma 4 that shares caches and has no
    # per-layer embeddings; who asks for hidden states gets them all.
    return model(ids, use_cache=False, output_hidden_states=True).logits[0].numpy()


def run(engine: Engine, pieces: list[int]) -> np.ndarray:
    """Logits at every position when the sequence is fed in `pieces`."""
    ids, session = tokens(engine.plan.vocab, sum(pieces)), engine.session()
    return np.concatenate(
        [
            session.feed(ids[start:stop], "all")
            for start, stop in pairwise(accumulate(pieces, initial=0))
        ]
    )


def run_drafts(engine: Engine) -> np.ndarray:
    """Logits at every position, from calls that also evaluate wrong drafts, which are refused."""
    ids, session = tokens(engine.plan.vocab), engine.session()
    rows: list[np.ndarray] = []
    for kept in (2, 0, 3, 1, 4) * len(ids):
        draft = ids[session.position :][:4]
        if len(draft) < 4:
            break
        kept = min(kept, len(draft))
        wrong = [(token + 1) % engine.plan.vocab for token in draft[kept:]]
        rows.append(session.evaluate([*draft[:kept], *wrong])[:kept])
        session.accept(kept)
    if draft:
        rows.append(session.feed(draft, "all"))
    return np.concatenate(rows)


def engine_of(model: Any, recipe: Recipe, config: dict[str, Any] | None = None) -> Engine:
    """The authored modules of a transformers model as it is now; `config` in place of its own."""
    checkpoint = InMemoryCheckpoint(model)
    checkpoint.tensors = {name: tensor.clone() for name, tensor in checkpoint.tensors.items()}
    checkpoint.config = config or checkpoint.config
    return authored_engine(Planner(checkpoint, recipe), checkpoint)


def with_tables_on_disk(engine: Engine, folder: Path) -> Engine:
    """Write the tables of an engine in its recipe's format, as numpy sees them, and give it those
    that it would read."""
    row_format, tables = ROW_FORMATS[engine.plan.recipe.embedding.rows], engine.tables
    read: dict[str, TokenRows] = {}
    for name, table in engine.plan.tables.items():
        shape = table.rows, table.channels
        parts = row_format.encode(np.asarray(tables.rows(name)[: table.rows]))
        for part, array in parts.items():
            np.save(folder / table_path(name, part), array)
        read[name] = EncodedRows(row_format, parts, shape)
    engine.tables = Tables(read.pop("tokens"), tables.rotary, read)
    return engine


def assert_close(
    engine: Engine, expected: np.ndarray, feeds: dict[str, list[int]], drafts: bool = False
) -> None:
    """The engine's logits are those expected, at every position."""
    assert np.abs(expected).max() > 0.1  # an error of 1e-4 means something
    errors = {
        name: float(np.abs(run(engine, pieces) - expected).max()) for name, pieces in feeds.items()
    }
    if drafts:
        errors["drafts"] = float(np.abs(run_drafts(engine) - expected).max())
    assert max(errors.values()) <= TOLERANCE, errors


def assert_parity(
    model: Any,
    recipe: Recipe,
    feeds: dict[str, list[int]],
    config: dict[str, Any] | None = None,
    drafts: bool = False,
) -> None:
    """The port's logits are transformers' own, at every position; with `drafts`, also beside drafts
    that are evaluated and refused."""
    length = sum(next(iter(feeds.values())))
    assert_close(engine_of(model, recipe, config), truth(model, length), feeds, drafts)
