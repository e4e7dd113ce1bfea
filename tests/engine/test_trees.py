"""Trees of tokens in one call: every branch is as if the others were not there."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.families.gemma_models import recipe as gemma_recipe
from tests.families.parity import engine_of

from cetane.engine.engine import Engine
from cetane.engine.session import Session
from cetane.errors import CetaneError

COPIED = ["readonly", "blend", "shift"]
"""Contracts of which the host copies the accepted columns."""
few = settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
texts = st.lists(st.integers(0, 99), min_size=1, max_size=20)
calls = st.lists(
    st.lists(st.tuples(st.integers(-1, 6), st.integers(0, 99)), min_size=1, max_size=8),
    min_size=1, max_size=3,
)  # fmt: skip
"""For every call, the parent and the id of each token."""


@pytest.fixture(scope="module")
def engines(tiny_engine: Callable[..., Engine], gemma: Any) -> Callable[[str, str], Engine]:
    """`engines(family, contract)`, each made once."""
    made: dict[tuple[str, str], Engine] = {}

    def engine(family: str, contract: str) -> Engine:
        key = (family, contract)
        if key not in made:
            if family == "gemma":  # sliding layers with rings, and layers that share caches
                made[key] = engine_of(gemma, gemma_recipe(contract, sliding=contract))
            else:
                layout = {"llama": "c1t", "llama-ct1": "ct1"}[family]
                made[key] = tiny_engine(contract, tensor_layout=layout)
        return made[key]

    return engine


def logits(model: Any, text: list[int]) -> np.ndarray:
    """Transformers' logits after the last token."""
    with torch.inference_mode():
        result: np.ndarray = model(torch.tensor([text])).logits[0, -1].numpy()
    return result


def way(parents: list[int], column: int) -> list[int]:
    """The columns from the text to a column."""
    columns = []
    while column >= 0:
        columns.insert(0, column)
        column = parents[column]
    return columns


@pytest.mark.parametrize("contract", COPIED)
@pytest.mark.parametrize("family", ["llama", "llama-ct1", "gemma"])
@given(text=texts, trees=calls, picks=st.lists(st.integers(0, 7), min_size=3, max_size=3))
@few
def test_any_tree(engines, model, gemma, family, contract, text, trees, picks) -> None:
    """Transformers' logits of every branch; any path is accepted, and the text goes on after it."""
    truth = gemma if family == "gemma" else model
    session, text = engines(family, contract).session(), list(text)
    session.feed(text, "none")
    for tree, pick in zip(trees, picks, strict=False):
        tree = tree[: max(session.widths, default=0)]
        if not tree:
            break
        parents = [min(parent, column - 1) for column, (parent, _) in enumerate(tree)]
        ids = [token for _, token in tree]
        rows = session.evaluate(ids, parents)
        for column in range(len(tree)):
            branch = [ids[at] for at in way(parents, column)]
            assert np.allclose(rows[column], logits(truth, text + branch), atol=2e-4)
        path = way(parents, pick % len(tree))
        session.accept_path(path)
        text += [ids[at] for at in path]
        assert session.position == len(text)
    if session.position < session.context:
        assert np.allclose(session.feed([7]), logits(truth, [*text, 7]), atol=2e-4)


def kept(session: Session) -> list[Any]:
    """All that the host keeps."""
    slots = {name: held.tolist() for name, held in session.memory.slots.items()}
    return [session.position, slots, *(v.copy() for v in session.memory.caches.values())]


@pytest.mark.parametrize("contract", COPIED)
@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_refused_branches_leave_nothing(engines, family: str, contract: str) -> None:
    """Bit for bit: whatever is refused, caches and slots are the same."""
    seen = []
    for refused in (5, 6):
        session = engines(family, contract).session()
        session.feed([1, 2, 3])
        before = kept(session)
        session.evaluate([4, refused, 9, refused], [-1, 0, 0, 2])
        assert all(np.array_equal(a, b) for a, b in zip(before, kept(session), strict=True))
        session.accept_path([0, 2])
        seen.append(kept(session))
    assert all(np.array_equal(one, other) for one, other in zip(*seen, strict=True))
    assert seen[0][:1] == [5]


@pytest.mark.parametrize(
    ("family", "contract", "reason"),
    [
        ("llama", "stateful", "write the state kv, whose columns the host cannot move"),
        ("zaya", "readonly", "takes all columns of a call as a line of text"),
    ],
)
def test_plans_that_take_no_trees_say_why(
    engines, zaya_engine, family: str, contract: str, reason: str
) -> None:
    engine = zaya_engine(contract) if family == "zaya" else engines(family, contract)
    session = engine.session()
    assert reason in (session.no_trees or "")
    with pytest.raises(CetaneError, match="a call cannot hold a tree: .*" + reason):
        session.evaluate([1, 2, 3], [-1, 0, 0])
    session.evaluate([1, 2, 3], [-1, 0, 1])  # a line
    session.accept_path([0, 1])
    assert session.position == 2


@pytest.mark.parametrize("parents", [[0, 0], [-1], [-2, 0], [-1, 1], [-1, 0, 1]])
def test_parents_of_no_tree(engines, parents: list[int]) -> None:
    with pytest.raises(CetaneError, match="make no tree of 2 tokens"):
        engines("llama", "readonly").session().evaluate([1, 2], parents)


@pytest.mark.parametrize("path", [[1], [0, 3], [0, 1, 2], [2, 0], [0, -1], [4]])
def test_paths_that_are_none(engines, path: list[int]) -> None:
    session = engines("llama", "readonly").session()
    session.evaluate([1, 2, 3, 4], [-1, 0, 0, 2])
    with pytest.raises(CetaneError, match="they are no path of the call"):
        session.accept_path(path)
    session.accept_path([0, 2, 3])
    assert session.position == 3
