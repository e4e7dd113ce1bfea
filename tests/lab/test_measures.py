"""What measures say of a tiny bundle, against what is known of it otherwise."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import copytree
from types import SimpleNamespace
from typing import Any

import pytest
from tests.speculate.draft_head_models import NOTHING, held_out, random_draft_head

from cetane.bundle import Bundle
from cetane.checkpoint import SeenByHeads
from cetane.gates.residency.audit import audit
from cetane.gates.residency.target import Target
from cetane.hardware.chips import find_chip
from cetane.lab.experiment import Experiment, parse_experiment
from cetane.lab.measures import attention
from cetane.lab.metrics import METRICS
from cetane.lab.sides import MEASURES, Findings, Sides
from cetane.lab.workload import Setting
from cetane.mil import load
from cetane.speculate.draft_heads.build import add_draft_head


@pytest.fixture
def bench(
    tiny: Experiment, setting: Setting, tiny_bundle: Callable[..., Bundle]
) -> Callable[..., Sides]:
    """`bench(**fields of the candidate)`: both sides on one finished bundle."""
    import cetane.lab.measures  # noqa: F401

    def make(**candidate: Any) -> Sides:
        content = tiny.model_dump(mode="json")
        content["candidate"] = content["candidate"] | candidate
        made = Sides(parse_experiment(content, "tiny"), setting, lambda *_: None)
        for side in made.by_arm.values():
            side.made = tiny_bundle(layout={"kind": "single"})
        return made

    return make


def take(bench: Sides, name: str) -> dict[Any, Findings]:
    """A measure, its figures in their metrics' units."""
    found = dict(MEASURES[name](bench))
    for findings in found.values():
        for metric, figure in findings.figures.items():
            assert METRICS[metric].measure == name and figure.unit == METRICS[metric].unit
    return found


def test_two_sides_on_one_bundle_agree(bench: Callable[..., Sides]) -> None:
    both = bench()
    found = take(both, "agreement")["candidate"].figures
    assert found["same_tokens"].value == 1
    assert found["logit_cosine"].value == pytest.approx(1, abs=1e-9)
    ours, theirs = (take(both, "size")[arm].figures for arm in ("candidate", "baseline"))
    assert ours == theirs
    plan = both.candidate.bundle.plan
    assert ours["bits_per_weight"].value == pytest.approx(16, abs=0.01)
    assert (ours["packages"].value, ours["programs"].value) == (1, len(plan.functions))
    assert ours["package_bytes"].value > ours["weight_bytes"].value  # type: ignore[operator]


def test_a_head_of_some_tokens(bench: Callable[..., Sides]) -> None:
    both = bench(subset=272)
    assert both.baseline.recipe.head.subset is None
    subset = both.candidate.recipe.head.subset
    assert subset is not None and len(subset.ids) == 272
    assert both.candidate.real.plan().rows == 272
    assert both.candidate.key != both.baseline.key


def test_answers_are_judged_by_the_model(bench: Callable[..., Sides]) -> None:
    found = take(bench(), "smoke")["candidate"]
    value = found.figures["smoke_greedy"].value
    assert value is not None and 0.9 <= value <= 1  # fp16 weights of a random model
    assert set(found.texts) == {"smoke capital", "smoke photosynthesis", "smoke haiku"}


def test_calls_and_drafts(bench: Callable[..., Sides]) -> None:
    both = bench(drafter="ngram")
    calls = take(both, "calls")["candidate"].figures
    slowdown = calls["verify_slowdown"].value
    assert slowdown is not None and slowdown > 0
    share = calls["break_even"].value  # (tK / t1 - 1) / (K - 1), K = 3
    assert share == (None if slowdown >= 3 else pytest.approx(max(0, (slowdown - 1) / 2)))
    drafts = take(both, "drafting")
    assert drafts["baseline"].figures == {}
    assert drafts["candidate"].figures["draft_same"].value == 1


def test_what_a_trie_knows_of_conversations(
    bench: Callable[..., Sides], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last turn's share of positions, and right ones among all proposals."""
    both, turns = bench(drafter="suffix"), []
    for proposed, right in (([0, 0, 0, 0], [0, 0, 0, 0]), ([1, 1, 1, 0], [1, 0, 1, 0])):
        turns.append([SimpleNamespace(proposed=proposed, right=right)])
    asked = []
    monkeypatch.setattr(
        "cetane.lab.measures.drafting.first_tokens_by_turn",
        lambda engine, tokenizer, drafters, count: asked.append((drafters, count)) or turns,
    )
    found = take(both, "turns")
    assert found["baseline"].figures == {}
    figures = found["candidate"].figures
    assert figures["turn_hits"].value == 0.75 and figures["turn_hits"].note == "by turn: 0.00, 0.75"
    assert figures["turn_right"].value == pytest.approx(2 / 3) and figures["turn_right"].n == 3
    (([drafter], count),) = asked
    assert drafter.name == "suffix" and drafter.answers.path is None
    assert count == both.workload.spec.new_tokens


def test_what_a_head_learned(
    bench: Callable[..., Sides], tiny_bundle: Callable[..., Bundle], tmp_path: Path
) -> None:
    """Of the head that drafts, where every token was asked for; other drafters learned nothing."""
    both = bench(drafter="medusa")
    copied = copytree(tiny_bundle(layout={"kind": "chunks", "chunks": 2}).path, tmp_path / "bundle")
    bundle = both.candidate.made = Bundle(copied)
    learned = NOTHING.model_copy(update={"top1": (0.5, 0.25), "positions": 80})
    add_draft_head(bundle, random_draft_head("medusa", bundle), held_out(bundle), learned)
    found = take(both, "drafting")["candidate"].figures
    assert (found["head_top1"].value, found["head_top1"].n) == (0.5, 80)
    assert found["head_top1"].note == "by place: 0.500, 0.250"
    assert found["draft_same"].value == 1
    other = bench(drafter="ngram")
    other.candidate.made = bundle
    assert "head_top1" not in take(other, "drafting")["candidate"].figures


def test_placement_without_the_rule_of_size(bench: Callable[..., Sides]) -> None:
    both = bench()
    packages = {
        s.name: both.candidate.bundle.shard(s.name) for s in both.candidate.bundle.plan.shards
    }
    programs = {name: load(path) for name, path in packages.items()}
    whole = audit(programs, Target())
    without = audit(programs, Target(), ("tiny-program",))
    assert any(f.rule == "tiny-program" for a in whole.functions for f in a.findings)
    assert not any(f.rule == "tiny-program" for a in without.functions for f in a.findings)
    small = take(both, "residency")["candidate"].figures  # it stands for nothing but itself
    assert small["ane_ops"].value == 0 and small["ane_ops"].kind == "predicted"
    assert sum(a.count("ANE") for a in without.functions) > 0


def test_placement_is_for_the_workloads_chip(bench: Callable[..., Sides]) -> None:
    both = bench()
    for side in (both.baseline, both.candidate):
        side.chip = find_chip("a19-pro")
    assert take(both, "residency")["candidate"].figures["ane_ops"].note == "rules, a19-pro, OS 26"


def test_needles(bench: Callable[..., Sides]) -> None:
    windowed = bench(changes={}, scaled={"family": {"full_window": 16}})
    with pytest.raises(KeyError):
        windowed.candidate.recipe.family["sinks"]
    found = take(windowed, "needle")
    near, far = (found["candidate"].figures[name].value for name in ("recall_near", "recall_far"))
    assert (near, far) == (1, 0)
    assert found["baseline"].figures["recall_far"].value == 1
    assert dict(found["candidate"].curves["recall by distance"])[16.0] == 0


def test_memory_of_a_process(bench: Callable[..., Sides]) -> None:
    value = take(bench(), "memory")["candidate"].figures["peak_bytes"].value
    assert value is not None and 5e7 < value < 4e9


def test_a_missing_verifier_has_no_figure(
    bench: Callable[..., Sides], tiny_bundle: Callable[..., Bundle]
) -> None:
    both = bench()
    both.candidate.made = tiny_bundle(layout={"kind": "single"}, verify=None)
    figures = take(both, "calls")["candidate"].figures
    assert all(
        figure.value is None and "no verifying" in figure.note for figure in figures.values()
    )


def test_pass_keys_count_where_the_plain_model_finds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four texts: the plain model finds two keys; heads that stream find one of these."""
    seen: list[Any] = []
    answers = {True: [True, False, True, False], False: [True, True, False, False]}

    @contextmanager
    def attending(_: Any, function: Any) -> Iterator[None]:
        seen.append(function.seen)
        yield

    monkeypatch.setattr(attention, "attending", attending)
    monkeypatch.setattr(attention, "haystack", lambda _: [])
    monkeypatch.setattr(attention, "hide", lambda tokenizer, hay, tokens, seed: seed)
    monkeypatch.setattr(attention, "Reference", lambda _: SimpleNamespace(model=None))
    monkeypatch.setattr(attention, "found", lambda _, text: [answers[not seen[-1].full][text]])
    streaming = SimpleNamespace(kept=lambda: {0: (1,)}, sinks=4, window=32)
    sides: Any = SimpleNamespace(
        workload=SimpleNamespace(
            checkpoint=SimpleNamespace(tokenizer=None), spec=SimpleNamespace(tokens=64)
        ),
        by_arm={
            name: SimpleNamespace(recipe=SimpleNamespace(cache=SimpleNamespace(streaming=chosen)))
            for name, chosen in (("baseline", None), ("candidate", streaming))
        },
    )
    found = {name: arm.figures["pass_keys"] for name, arm in attention.pass_keys(sides).items()}
    assert (found["baseline"].value, found["candidate"].value) == (1, 0.5)
    assert {figure.n for figure in found.values()} == {2}
    assert found["candidate"].note == "2 of 4 found in texts of 64 tokens, plain 2"
    assert seen[1:] == [SeenByHeads({0: (1,)}, 4, 32)]


def test_a_package_of_another_context_is_a_mismatch(
    bench: Callable[..., Sides], tiny_bundle: Callable[..., Bundle]
) -> None:
    both = bench()
    both.workload.setting.folder.mkdir()
    both.candidate.made = tiny_bundle(layout={"kind": "single"}, context=96)
    found = take(both, "masks")
    assert found["baseline"].figures["mask_mismatches"].value == 0
    assert not found["baseline"].texts
    assert found["candidate"].figures["mask_mismatches"].value
    assert "mask" in found["candidate"].texts["masks"]
