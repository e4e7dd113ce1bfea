"""Two bundles in turns, and where the time of a run goes."""

from collections import deque
from collections.abc import Callable
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from cetane.bundle import Bundle
from cetane.engine.engine import Engine
from cetane.engine.portable import PortableBackend
from cetane.engine.session import Session
from cetane.errors import CetaneError
from cetane.measuring.meter import Meter
from cetane.pipeline.profile import profile
from cetane.pipeline.versus import BundleSide, Turns, ratio, ratios, versus

TWO = {"layout": {"kind": "chunks", "chunks": 1}, "head": {"slices": 2}, "verify": None}
"""The bundle that other tests make too: two shards of layers or head."""


@pytest.fixture
def bundle(tiny_bundle: Callable[..., Bundle]) -> Bundle:
    return tiny_bundle(contract="readonly", **TWO)


def turns(bundle: Bundle, decode: list[float], joules: float | None = None) -> Turns:
    first = [10.0] * len(decode)
    return Turns(bundle.path, 100.0, 20.0, first, [100.0] * len(decode), decode, joules)


def test_ratios_are_of_the_second_to_the_first_turn_by_turn(bundle: Bundle) -> None:
    """By hand: turns of 2, 4, 3 ms against 1, 1, 1: ratios 0.5, 0.25, 1/3."""
    made = {r.name: r for r in ratios(turns(bundle, [2, 4, 3]), turns(bundle, [1, 1, 1]))}
    decode = made["decode, ms a token"]
    assert (decode.first, decode.second) == (3, 1)
    assert (decode.ratio, decode.low, decode.high) == (pytest.approx(1 / 3), 0.25, 0.5)
    assert made["load, ms"].ratio == made["first token, ms"].ratio == 1.0
    assert "energy, J a token" not in made


def test_energy_is_compared_where_both_have_it(bundle: Bundle) -> None:
    names = [r.name for r in ratios(turns(bundle, [1], 0.2), turns(bundle, [1], 0.1))]
    assert names[-1] == "energy, J a token"
    assert ratio("x", [0.2], [0.1]).ratio == 0.5


def test_a_bundle_against_itself(bundle: Bundle) -> None:
    made = versus(bundle.path, bundle.path, prompt_tokens=12, tokens=4, rounds=3)
    assert made.backend == "portable" and made.prompt_tokens == 12
    for side in made.turns:
        assert len(side.decode_ms) == len(side.first_token_ms) == 3
        assert min(side.decode_ms) > 0 and side.joules_per_token is None
    assert next(r.name for r in made.ratios) == "decode, ms a token"
    assert made.as_json()["turns"][0]["bundle"] == str(bundle.path)


def test_energy_is_of_decoded_tokens_alone(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token of every context is counted, and no prompt is read."""
    fed, counted = list[int](), list[int]()
    side = BundleSide(bundle, "portable", 12, 4)
    feed = Session.feed

    def watch(self: Session, tokens: list[int], *rest: Any) -> Any:
        fed.append(len(tokens))
        return feed(self, tokens, *rest)

    def spend(_samples: Any, _begun: float, _ended: float, tokens: int) -> Any:
        counted.append(tokens)
        return {"joules_per_token": {"processor": 0.25}}

    monkeypatch.setattr(Session, "feed", watch)
    monkeypatch.setattr("cetane.measuring.meter.command", lambda: None)
    monkeypatch.setattr(Meter, "samples", lambda _: [])
    monkeypatch.setattr("cetane.pipeline.versus.joules", spend)
    clock = SimpleNamespace(time=count().__next__)  # a second for each look at it
    monkeypatch.setattr("cetane.pipeline.versus.time", clock)
    assert side.joules(150) == 0.25
    assert counted == [len(fed)] and set(fed) == {1}
    assert len(fed) > 2 * bundle.plan.recipe.cache.context


def test_what_cannot_be_compared(bundle: Bundle) -> None:
    with pytest.raises(CetaneError, match=r"context of 64, and 60 \+ 32 tokens do not fit"):
        versus(bundle.path, bundle.path, prompt_tokens=60)
    with pytest.raises(CetaneError, match="no power meter"):
        versus(bundle.path, bundle.path, prompt_tokens=4, tokens=4, energy=3)
    with pytest.raises(CetaneError, match="unknown backend"):
        versus(bundle.path, bundle.path, prompt_tokens=4, tokens=4, backend="cuda")


def test_a_profile_adds_medians_of_functions(bundle: Bundle) -> None:
    """By hand: seconds of calls are replaced by known ones."""
    engine = Engine(bundle.plan, PortableBackend(bundle), bundle.tables())
    session = engine.session()
    session.feed([1, 2, 3])
    times = engine.shards.times
    steps = bundle.plan.modes["decode"].steps
    for number, step in enumerate(steps, 1):
        times[step.shard, step.function] = deque([number / 1e3, 5.0, number / 1e3])  # type: ignore[union-attr]
    made = profile(engine)
    kinds = {shard.name: shard.kind for shard in bundle.plan.shards}
    layers = sum(n for n, s in enumerate(steps, 1) if kinds[s.shard] != "head")
    head = sum(n for n, s in enumerate(steps, 1) if kinds[s.shard] == "head")
    assert made.layers_ms == pytest.approx(layers) and made.head_ms == pytest.approx(head)
    assert made.layer_ms == pytest.approx(layers / bundle.plan.layers)
    assert made.forward_tok_s == pytest.approx(1e3 / (layers + head))
    assert made.verify_ms is None and made.decode_tok_s is None
    assert set(made.load) == set(kinds) and all(one.cold_ms > 0 for one in made.load.values())


def test_a_profile_of_nothing(bundle: Bundle) -> None:
    made = profile(Engine(bundle.plan, PortableBackend(bundle), bundle.tables()))
    assert made.layers_ms is None and not made.load
