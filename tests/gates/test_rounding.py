"""An ANE's arithmetic late in the context: green as shipped, red without attention's factor."""

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.conftest import build_model, build_tokenizer

from cetane.checkpoint import Checkpoint, open_checkpoint
from cetane.gates import rounding
from cetane.gates.observe import ProbeTask, Seen
from cetane.gates.port import Packaged, packaged
from cetane.gates.probes import Probe
from cetane.gates.rounding import (
    Rounding,
    judge_rounding,
    late_rounding,
    measure_rounding,
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
