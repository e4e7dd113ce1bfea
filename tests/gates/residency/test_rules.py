"""Every rule finds its pattern, and leaves what is nearly it alone."""

from pathlib import Path

import pytest
from tests.gates.residency.cases import CASES, COMPRESSED_CASES, WEIGHT_CASES, in_form, scaled, wide
from tests.gates.residency.graphs import Model, mb

from cetane.gates.residency.audit import Audit, audit
from cetane.gates.residency.rule import GOOD_TO_BAD, PREDICATES, load_evidence, load_rules, seen
from cetane.gates.residency.target import Target
from cetane.mil.program import Program

OF_BUNDLES = {"program-count", "loaded-constants"}


def audited(model: Model, folder: Path) -> Audit:
    return audit({"model": model.program(folder)}, Target(model.chip, model.os))


def rules_of(found: Audit) -> set[str]:
    return {f.rule for function in found.functions for f in function.findings} | {
        f.rule for f in found.findings
    }


@pytest.mark.parametrize("id", CASES)
def test_rule(id: str, tmp_path: Path) -> None:
    pattern, near_miss = CASES[id]
    folders = tmp_path / "pattern", tmp_path / "near-miss"
    for folder in folders:
        folder.mkdir()
    found = audited(pattern, folders[0])
    assert id in rules_of(found)
    assert id not in rules_of(audited(near_miss, folders[1]))
    placement = load_rules()[id].placement
    if placement is not None:  # at least as bad as the rule says
        places = [op.placement for function in found.functions for op in function.ops]
        assert max(map(GOOD_TO_BAD.index, places)) >= GOOD_TO_BAD.index(placement)


@pytest.mark.parametrize(("model", "broken"), COMPRESSED_CASES)
def test_what_coremltools_writes(model: Model, broken: set[str], tmp_path: Path) -> None:
    """It stores the scales of a palette on its entries, before the indices."""
    assert rules_of(audited(model, tmp_path)) & WEIGHT_CASES.keys() == broken


@pytest.mark.parametrize("model", [in_form("lut8-pairs"), Model(lambda x: scaled(x, 2))])
def test_the_vectors_of_a_palette(model: Model, tmp_path: Path) -> None:
    """Also behind scales."""
    (function,) = audited(model, tmp_path).functions
    (found,) = (f for f in function.findings if f.rule == "vector-palette")
    assert found.details == ("2 weights an entry",)


def test_every_rule_has_a_test_and_a_predicate() -> None:
    assert set(CASES) | OF_BUNDLES == set(load_rules()) == set(PREDICATES)


def test_program_count(tmp_path: Path) -> None:
    program: Program = Model(lambda x: mb.relu(x=x)).program(tmp_path)

    def found(count: int) -> set[str]:
        return rules_of(audit({f"shard-{i}": program for i in range(count)}, Target()))

    assert "program-count" in found(101)
    assert "program-count" not in found(100)


def test_loaded_constants(tmp_path: Path) -> None:
    """134 MB a package; functions of one package share theirs."""
    several = wide(1)
    several.functions = 40
    program = several.program(tmp_path)

    def found(count: int) -> set[str]:
        return rules_of(audit({f"shard-{i}": program for i in range(count)}, Target()))

    assert "loaded-constants" in found(23)
    assert "loaded-constants" not in found(22)


@pytest.mark.parametrize("id", load_rules())
def test_evidence_is_told_as_it_is(id: str) -> None:
    """Sources are dated, and what others contradict is not certain."""
    rule = load_rules()[id]
    assert all(source.date >= "2023" for source in rule.sources)
    if any(source.contradicts for source in rule.sources):
        assert rule.confidence != "high"
    # What fails the verdict says where ops go.
    assert rule.severity not in ("fatal", "silent") or rule.placement is not None


def test_evidence_is_of_one_voice() -> None:
    every = [kind for evidence in load_evidence().values() for kind in evidence.kinds]
    assert len(every) == len(set(every)) == len(seen())


@pytest.mark.parametrize(
    ("id", "chip", "os", "applies"),
    [
        ("late-slice", "m1-pro", 26, True),
        ("late-slice", "m4-max", 26, False),
        ("activation-quantization", "a19-pro", 26, True),
        ("activation-quantization", "m4-max", 26, False),
        ("palettized-depthwise-conv", "a18", 18, False),
        ("contraction-notch", "m4", 26, True),
        ("contraction-notch", "m5", 26, False),
    ],
)
def test_scope(id: str, chip: str, os: float, applies: bool) -> None:
    assert load_rules()[id].applies(Target(chip, os)) is applies
