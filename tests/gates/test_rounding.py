"""What a narrower arithmetic costs: on text, near ties of experts, and late in the context."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.conftest import build_model, build_tokenizer

from cetane.checkpoint import Checkpoint, open_checkpoint
from cetane.gates import rounding
from cetane.gates.experts import Chosen
from cetane.gates.observe import ProbeTask, Seen
from cetane.gates.port import Packaged, packaged
from cetane.gates.probes import Probe
from cetane.gates.rounding import (
    Rounding,
    judge_rounding,
    late_rounding,
    measure_rounding,
    other_far,
    together,
)
from cetane.pipeline.build import build
from cetane.planner import Planner
from cetane.schema.recipe import parse_recipe

CONTEXT = 4096
WEIGHTS = 10_000


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("models") / "long"
    build_model("llama", max_position_embeddings=CONTEXT).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return open_checkpoint(folder)


@pytest.fixture(scope="module")
def port(
    checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Packaged]:
    @cache
    def make(lifted: bool = True) -> Packaged:
        content = {
            "name": "long",
            "layout": {"kind": "single"},
            "cache": {"context": CONTEXT},
            "tokens": {"verify": 0, "prefill": 64},
        }
        recipe = parse_recipe(content, "test")
        target = tmp_path_factory.mktemp("bundles") / "long"
        bundle = build(checkpoint, recipe, target, lambda *_: None)
        return packaged(bundle, Planner(checkpoint, recipe), checkpoint)

    return make


def red(answers: list[Rounding]) -> set[str]:
    return {check.name for check in judge_rounding("ane", answers) if not check.passed}


def test_a_port_as_it_ships_is_green(port) -> None:
    answers = late_rounding(port(), WEIGHTS)
    assert [one.mode for one in answers] == list(port().plan.modes)
    assert max(one.keys for one in answers) == CONTEXT
    assert not red(answers)


def test_without_the_factor_it_is_red(port, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cetane.families.grouped_query.lift", lambda keys: 1.0)
    assert red(late_rounding(port(lifted=False), WEIGHTS)) == {
        f"ane: logit cosine ({mode})" for mode in ("prefill", "decode")
    }


def test_a_large_model_gets_a_shorter_prefix(port, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounding, "WORK", 300 * WEIGHTS)
    fed: list[int] = []
    monkeypatch.setattr(
        rounding, "begun", lambda tokenizer, length: fed.append(length) or [1] * length
    )
    late_rounding(port(), WEIGHTS)
    assert fed == [300 + 64]


def test_tokens_that_a_rounded_head_chooses_otherwise() -> None:
    """Of a head that chooses in the graph, one logit of each token is known. The largest logits
    agree here, but the tokens are the next ones."""
    count, size = 8, 40
    tokens = np.arange(count)

    def chosen(at: np.ndarray) -> Seen:
        logits = np.full((count, size), -4e4, np.float32)
        logits[tokens, at] = np.linspace(5, 9, count)
        return Seen(logits, tokens, {})

    plan: Any = SimpleNamespace(
        tokens=lambda *_: np.arange(size), rows=size, shards=[SimpleNamespace(name="head")],
        recipe=SimpleNamespace(head=SimpleNamespace(choose=True)),
    )  # fmt: skip
    task = ProbeTask("decode", Probe("start", tuple(range(count))), ())
    sure = tokens < 5
    for shifted, others in ((0, 0), (1, 5)):
        exact, rounded = chosen(tokens), chosen(tokens + shifted)
        one = measure_rounding(task, exact, rounded, {}, plan, decided=sure)
        assert one.logit_cosine == pytest.approx(1)
        assert one.other_choices == others


TOKENS = 8
HIDDEN: Any = ("model.layers.0", 0)


def read(rows: np.ndarray, experts: np.ndarray, far: np.ndarray | None = None) -> Seen:
    """What a port made of 8 tokens: one tensor, which is the logits too, and a layer's experts."""
    at = np.arange(TOKENS)
    return Seen(rows, at, {HIDDEN: (at, rows)}, {0: Chosen(at, experts, far)})


@pytest.mark.parametrize(
    ("others", "red"),
    [
        ([], set()),
        ([5], set()),
        ([1, 5, 6], {"other experts"}),
    ],
)
def test_tokens_near_a_tie_of_experts(others: list[int], red: set[str]) -> None:
    """They have other hidden states and logits, which count in no mean. Too many are no ties."""
    exact = np.random.default_rng(0).standard_normal((TOKENS, 40)).astype(np.float32)
    rounded, experts = exact + np.float32(1e-3), np.tile([0, 1], (TOKENS, 1))
    changed = experts.copy()
    changed[others] = [0, 2]
    rounded[others] = exact[others][:, ::-1]
    plan: Any = SimpleNamespace(
        tokens=lambda *_: np.arange(40), rows=40, shards=[SimpleNamespace(name="head")],
        recipe=SimpleNamespace(head=SimpleNamespace(choose=False)),
    )  # fmt: skip
    task = ProbeTask("decode", Probe("start", tuple(range(TOKENS))), ())
    one = measure_rounding(
        task, read(exact, experts), read(rounded, changed), {HIDDEN: ("layer", "hidden")}, plan
    )
    kept = [token for token in range(TOKENS) if token not in others]
    by_hand = [
        exact[t] @ rounded[t] / np.linalg.norm(exact[t]) / np.linalg.norm(rounded[t]) for t in kept
    ]
    assert one.hidden_cosine == pytest.approx(np.mean(by_hand), abs=1e-6)
    assert one.other_experts == len(others) / TOKENS
    checks = judge_rounding("fp16", [one])
    assert {c.name for c in checks if not c.passed} == {f"fp16: {name} (decode)" for name in red}
    rounded[others] = np.nan
    lost = measure_rounding(
        task, read(exact, experts), read(rounded, changed), {HIDDEN: ("layer", "hidden")}, plan
    )
    assert lost.finite is not bool(others)
    assert lost.where == ("layer" if others else "")


@pytest.mark.parametrize(("others", "red"), [(3, False), (5, True)])
def test_experts_that_rounding_makes_far(others: int, red: bool) -> None:
    """Of 16 experts that 8 tokens take, some have others far below them than in fp32."""
    far = np.zeros((TOKENS, 2, 3), bool)
    changed = far.copy()
    changed.reshape(-1, 3)[:others, 2] = True
    experts = np.tile([0, 1], (TOKENS, 1))
    share = other_far({0: Chosen(..., experts, far)}, {0: Chosen(..., experts, changed)})  # type: ignore[arg-type]
    assert share == others / (2 * TOKENS)
    fine: Any = {"hidden_cosine": 1, "logit_cosine": 1, "kl": 0, "finite": True}
    one = Rounding(mode="decode", positions=TOKENS, other_far=share, **fine)
    failed = [check.name for check in judge_rounding("ane", [one]) if not check.passed]
    assert failed == ["ane: other far experts (decode)"] * red


def test_the_mode_of_the_first_infinity() -> None:
    """A text is the widest mode's, but another mode may take the token that is lost."""
    exact = np.random.default_rng(0).standard_normal((TOKENS, 40)).astype(np.float32)
    at, none = np.arange(TOKENS), np.empty((TOKENS, 0), int)
    plan: Any = SimpleNamespace(
        tokens=lambda *_: np.arange(40), rows=40, shards=[SimpleNamespace(name="head")],
        recipe=SimpleNamespace(head=SimpleNamespace(choose=False)),
    )  # fmt: skip
    task = ProbeTask("prefill", Probe("text", tuple(range(TOKENS))), ())
    for lost, mode in ((None, "prefill"), (2, "prefill"), (6, "decode")):
        rows = exact.copy()
        rows[[] if lost is None else slice(lost, None)] = np.nan
        seen = replace(read(rows, none), by_mode={"prefill": at[:5], "decode": at[5:]})
        places = {HIDDEN: ("layer", "hidden")}
        one = measure_rounding(task, read(exact, none), seen, places, plan, text=True)
        assert (one.mode, one.finite) == (mode, lost is None)
        fine = one.model_copy(update={"mode": "prefill", "finite": True})
        assert together([fine, one, fine]).told == f"({mode}, text)"


def test_windows_of_text_count_by_their_tokens() -> None:
    def window(positions: int, kl: float, **more: Any) -> Rounding:
        return Rounding(mode="prefill", positions=positions, hidden_cosine=1, logit_cosine=1,
                        kl=kl, text=True, **{"finite": True} | more)  # fmt: skip

    whole = together([window(30, 0.001), window(10, 0.003, finite=False, where="chunk-01")])
    assert (whole.positions, whole.finite, whole.where) == (40, False, "chunk-01")
    assert whole.kl == pytest.approx(0.0015)
    assert {check.name for check in judge_rounding("fp16", [whole]) if not check.passed} == {
        "fp16: infinity or NaN (prefill, text)"
    }
    (far,) = (c for c in judge_rounding("fp16", [window(30, 0.011)]) if not c.passed)
    assert far.name == "fp16: KL (prefill, text)"
