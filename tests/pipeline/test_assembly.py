"""The order of a build: first shards and their gate, then the others; and shards that fail."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.pipeline.builds import STEPS, Stop, silent

from cetane.bundle import Bundle
from cetane.checkpoint import Checkpoint
from cetane.errors import CetaneError
from cetane.lower.lower import Lowering
from cetane.pipeline.assembly import refuse
from cetane.pipeline.build import build, build_only
from cetane.schema.recipe import Recipe

# After the undisturbed build, the store has the model's calibration: no test calibrates again.
pytestmark = pytest.mark.usefixtures("shared_templates", "undisturbed")


def made(target: Path) -> list[str]:
    """The shards that are on disk."""
    return sorted(path.stem for path in target.glob("shards/*.mlpackage"))


def test_the_gate_comes_before_the_others(
    tmp_path: Path, tiny_checkpoint: Checkpoint, small: Recipe, stub: list[str]
) -> None:
    """It gets the first shard of every kind; when it is green, the build goes on."""
    judged: list[dict[str, Path]] = []

    def gate(planner: Any, packages: dict[str, Path]) -> None:
        assert planner.recipe == small
        assert all((path / "Manifest.json").read_text() == n for n, path in packages.items())
        assert stub == ["layer-00", "head-0"]
        judged.append(packages)

    seen: list[str] = []
    bundle = build(
        tiny_checkpoint, small, tmp_path / "out", lambda *call: seen.append(call[0]), gate=gate
    )
    assert [list(packages) for packages in judged] == [["layer-00", "head-0"]]
    assert seen == STEPS
    assert stub == ["layer-00", "head-0", "layer-01"]
    bundle.verify()


def test_a_red_gate_stops_the_build(
    tmp_path: Path, tiny_checkpoint: Checkpoint, small: Recipe, stub: list[str]
) -> None:
    """Of the rest nothing is made; run again, it is asked again, and what was made is kept."""
    target = tmp_path / "out"

    def red(*_: Any) -> None:
        raise Stop

    for _ in range(2):
        with pytest.raises(Stop):
            build(tiny_checkpoint, small, target, silent, gate=red)
        assert made(tmp_path / "out.partial/bundle") == ["head-0", "layer-00"]
        assert not (tmp_path / "out.partial/bundle/manifest.json").exists()
        assert not target.exists()
    assert stub == ["layer-00", "head-0"]
    build(tiny_checkpoint, small, target, silent, gate=silent).verify()
    assert stub == ["layer-00", "head-0", "layer-01"]


def test_a_finished_bundle_is_not_judged_again(
    undisturbed: Bundle, tiny_checkpoint: Checkpoint, small: Recipe
) -> None:
    def red(*_: Any) -> None:
        raise Stop

    build(tiny_checkpoint, small, undisturbed.path, silent, gate=red)


@pytest.fixture
def failing(stub: list[str], monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The shards that cannot be made; empty it to mend them."""
    names: set[str] = set()
    lower = Lowering.lower

    def fail(self: Lowering, shard: str, target: Path) -> None:
        if shard in names:
            target.mkdir()
            raise CetaneError(f"no {shard} today", "tomorrow")
        lower(self, shard, target)

    monkeypatch.setattr(Lowering, "lower", fail)
    return names


@pytest.mark.parametrize(
    "wrong", [{"layer-00"}, {"layer-01"}, {"head-0"}, {"layer-00", "head-0"},
              {"layer-00", "layer-01"}]
)  # fmt: skip
def test_a_shard_that_fails_does_not_stop_the_others(
    wrong: set[str],
    tmp_path: Path,
    tiny_checkpoint: Checkpoint,
    small: Recipe,
    failing: set[str],
    stub: list[str],
) -> None:
    """All that failed are named, no bundle is there, and mended they are all that is made."""
    failing |= wrong
    target = tmp_path / "out"
    with pytest.raises(CetaneError) as stopped_by:
        build(tiny_checkpoint, small, target, silent)
    assert all(f"no {shard} today" in stopped_by.value.message for shard in wrong)
    if len(wrong) == 1:
        assert stopped_by.value.hint == "tomorrow"
    else:
        assert stopped_by.value.message.startswith(f"{len(wrong)} parts failed: shards/")
        assert "run the same command again" in (stopped_by.value.hint or "")
    others = {"layer-00", "layer-01", "head-0"} - wrong
    assert set(stub) == others
    assert made(tmp_path / "out.partial/bundle") == sorted(others)
    assert not list((tmp_path / "out.partial/bundle").glob("**/.*"))
    assert not target.exists()
    assert not (tmp_path / "out.partial/bundle/manifest.json").exists()

    failing.clear()
    stub.clear()
    build(tiny_checkpoint, small, target, silent).verify()
    assert set(stub) == wrong


def test_a_cause_of_several_failures_is_told_once() -> None:
    full, other = CetaneError("disk full"), CetaneError("no layer-02 today")
    with pytest.raises(CetaneError) as told:
        refuse({"layer-00": full, "layer-02": other, "layer-01": CetaneError("disk full")})
    assert told.value.message == (
        "3 parts failed: layer-00, layer-01: disk full; layer-02: no layer-02 today"
    )


def test_a_first_shard_that_fails_is_not_judged(
    tmp_path: Path, tiny_checkpoint: Checkpoint, small: Recipe, failing: set[str], stub: list[str]
) -> None:
    """Without it the gate would prove nothing, so nothing is built on it."""
    failing.add("layer-00")
    with pytest.raises(CetaneError, match="no layer-00 today"):
        build(
            tiny_checkpoint, small, tmp_path / "out", silent, gate=lambda *_: pytest.fail("judged")
        )
    assert stub == ["head-0"]


def test_only_some_shards(
    tmp_path: Path, tiny_checkpoint: Checkpoint, small: Recipe, stub: list[str]
) -> None:
    """No bundle yet, but a build takes them up."""
    target = tmp_path / "out"
    seen: list[tuple[str, int, int]] = []
    note: Callable[..., None] = lambda *call: seen.append(call)  # noqa: E731
    packages = build_only(tiny_checkpoint, small, target, ["layer-01"], note)
    assert packages == {"layer-01": tmp_path / "out.partial/bundle/shards/layer-01.mlpackage"}
    assert seen == [("shards/layer-01.mlpackage", 0, 1), ("done", 1, 1)]
    assert stub == ["layer-01"]
    assert not target.exists()

    found = build_only(tiny_checkpoint, small, target, ["layer-*", "head-0"], silent)
    assert sorted(found) == ["head-0", "layer-00", "layer-01"]
    assert all(path.is_dir() for path in found.values())
    assert sorted(stub) == ["head-0", "layer-00", "layer-01"]
    assert not target.exists()
    assert not (tmp_path / "out.partial/bundle/manifest.json").exists()

    bundle = build(tiny_checkpoint, small, target, silent)
    bundle.verify()
    assert len(stub) == 3


@pytest.mark.parametrize("patterns", [["layer-7"], ["layer-00", "x*"], ["Layer-00"], [""]])
def test_only_shards_that_there_are(
    patterns: list[str], tmp_path: Path, tiny_checkpoint: Checkpoint, small: Recipe, stub: list[str]
) -> None:
    with pytest.raises(CetaneError, match="no such shard") as refused:
        build_only(tiny_checkpoint, small, tmp_path / "out", patterns, silent)
    assert patterns[-1] in refused.value.message
    assert refused.value.hint == "there are layer-00, layer-01, head-0"
    assert stub == []
    assert list(tmp_path.iterdir()) == []


def test_only_fails_for_each_of_them(
    tmp_path: Path, tiny_checkpoint: Checkpoint, small: Recipe, failing: set[str], stub: list[str]
) -> None:
    failing |= {"layer-00", "layer-01"}
    with pytest.raises(CetaneError, match=r"2 parts failed: .*layer-00.*layer-01"):
        build_only(tiny_checkpoint, small, tmp_path / "out", ["*"], silent)
    assert stub == ["head-0"]


def test_rebuild(
    tmp_path: Path, tiny_checkpoint: Checkpoint, small: Recipe, stub: list[str]
) -> None:
    """What is there is made anew, only when it is asked for."""
    target = tmp_path / "out"
    build_only(tiny_checkpoint, small, target, ["layer-00"], silent)
    build_only(tiny_checkpoint, small, target, ["layer-00"], silent)
    assert stub == ["layer-00"]
    build_only(tiny_checkpoint, small, target, ["layer-00"], silent, rebuild=True)
    assert stub == ["layer-00"] * 2
    build(tiny_checkpoint, small, target, silent, rebuild=True).verify()
    assert stub == ["layer-00", "layer-00", "layer-00", "head-0", "layer-01"]
