"""Experiments as files: what is accepted, and what is said of what is not."""

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from cetane.errors import CetaneError
from cetane.lab.experiment import Limit, Workload, parse_experiment, recipe_with
from cetane.lab.library import (
    Lab,
    load_experiment,
    load_experiments,
    load_runnable,
    shipped_experiments,
)
from cetane.lab.metrics import METRICS
from cetane.lab.new import template

VALID = {
    "id": "one",
    "title": "One",
    "status": "Measured",
    "date": "2026-04-13",
    "hypothesis": "4 bits do.",
    "metrics": ["weight_bytes", "perplexity_ratio"],
    "workload": {"model": "zaya-tiny"},
    "baseline": {"recipe": "zaya-int8"},
    "candidate": {"recipe": "zaya-int4", "changes": {"cache": {"context": 256}}},
    "gates": [{"metric": "perplexity_ratio", "most": 1.1}],
}
BURIED = {"status": "Rejected", "obituary": "2 % less."}


def without(*names: str) -> dict[str, Any]:
    return {name: value for name, value in VALID.items() if name not in names}


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (VALID | {"statsu": "x"}, "statsu: unknown key; did you mean 'status'"),
        (VALID | {"status": "Done"}, "status: Input should be 'Planned'"),
        (VALID | {"date": "spring"}, "date: "),
        (VALID | {"id": "../up"}, "id: "),
        (VALID | {"metrics": ["perplexty"]}, "did you mean 'perplexity'"),
        (VALID | {"gates": [{"metric": "nothing", "most": 1}]}, "no metric 'nothing'"),
        (VALID | {"gates": [{"metric": "kl", "most": 1}]}, "kl has a limit, but is not among"),
        (VALID | {"gates": [{"metric": "perplexity_ratio"}]}, "needs 'least' or 'most'"),
        (VALID | {"expects": [{"metric": "perplexity_ratio", "least": 2, "most": 1}]}, "more than"),
        (VALID | {"gates": [{"metric": "kl", "most": float("nan")}]}, "gates.0.most"),
        (VALID | {"workload": {"model": "../gpt"}}, "workload.model: "),
        (VALID | {"workload": {"model": "zaya-tiny", "tokns": 3}}, "did you mean 'tokens'"),
        (VALID | {"workload": {"model": "zaya-tiny", "rounds": 1}}, "workload.rounds"),
        (VALID | {"candidate": {"recipe": "x", "activations": "some"}}, "candidate.activations"),
        (VALID | {"status": "Shelved"}, "a Shelved experiment needs its obituary"),
        (VALID | {"status": "Rejected"}, "a Rejected experiment needs its obituary"),
        (VALID | {"status": "Planned"}, "a Planned experiment needs its design"),
        (without("candidate"), "candidate is missing"),
        (without("metrics", "gates"), "metrics is missing"),
        (without("workload"), "workload is missing"),
        (without("hypothesis"), "hypothesis: Field required"),
        (VALID | {"reported": [{"what": "x"}]}, "reported.0.candidate: Field required"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(content: dict[str, Any], error: str) -> None:
    with pytest.raises(CetaneError, match=r"^one\.toml: ") as caught:
        parse_experiment(content, "one.toml")
    assert error in caught.value.message


def test_a_workload_of_an_unknown_chip() -> None:
    with pytest.raises(ValidationError, match="no chip 'm99'"):
        Workload(model="zaya-tiny", chip="m99")


def test_what_is_right_is_not() -> None:
    assert parse_experiment(VALID, "one.toml").runnable
    assert parse_experiment(VALID | BURIED, "one.toml").status == "Rejected"
    plan = {k: VALID[k] for k in ("id", "title", "date", "hypothesis")}
    planned = parse_experiment(plan | {"status": "Planned", "design": "So."}, "one.toml")
    assert not planned.runnable


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / f"{name}.toml"
    path.write_text(text)
    return path


def test_files(tmp_path: Path) -> None:
    good = template("good", "good.toml")
    assert load_experiment(write(tmp_path, "good", good)).id == "good"
    shorter = load_experiment(write(tmp_path, "good", good.replace("# context", "context")))
    assert shorter.workload is not None and shorter.workload.context == 256
    cases = {
        "not TOML": "title = ",
        "differs from the file's name": f'id = "bad"\n{good}',
        "candidate: no recipe 'nowhere'": good.replace(
            '[candidate]\nrecipe = "zaya-int8"', '[candidate]\nrecipe = "nowhere"'
        ),
        "did you mean 'context'": f"{good}\n[baseline.changes.cache]\ncontxt = 4\n",
        "multiple of 32": f"{good}\n[candidate.scaled.cache]\ncontext = 33\n",
    }
    for index, (error, text) in enumerate(cases.items()):
        path = write(tmp_path, f"case-{index}", text)
        with pytest.raises(CetaneError) as caught:
            load_runnable(path)
        assert error in caught.value.message and str(path) in caught.value.message
        path.unlink()
    with pytest.raises(CetaneError, match="did you mean 'good'"):
        Lab(tmp_path).find("god")
    with pytest.raises(CetaneError, match="no such folder"):
        load_experiments(tmp_path / "none")
    with pytest.raises(CetaneError):  # a name with a path in it
        Lab(tmp_path).find("../good")


def test_changes_replace_fields_and_no_more() -> None:
    plain = recipe_with("zaya-int8")
    other = recipe_with("zaya-int8", {"compression": {"types": {}}}, {"cache": {"context": 256}})
    assert other.compression.types == {} and plain.compression.types != {}
    assert other.compression.default == plain.compression.default
    assert other.cache.context == 256 and other.cache.contract == plain.cache.contract
    assert recipe_with("zaya-int8") == plain


def test_the_hash_is_of_what_decides() -> None:
    one = parse_experiment(VALID, "one.toml")
    prose = parse_experiment(VALID | {"lesson": "x", "title": "Two", "differs": "y"}, "one.toml")
    other = parse_experiment(VALID | {"workload": {"model": "zaya-tiny", "tokens": 9}}, "one.toml")
    assert one.sha256 == prose.sha256 != other.sha256


def test_a_text_that_is_too_large_to_judge_is_not_hashed(tmp_path: Path) -> None:
    """`lab list` would take minutes for a sparse file that takes no room."""
    text = tmp_path / "text.txt"
    text.write_text("a text")
    content = VALID | {"workload": {"model": "zaya-tiny", "text": str(text)}}
    experiment = parse_experiment(content, "x")
    assert experiment.inputs_sha256 == {"text": hashlib.sha256(b"a text").hexdigest()}
    os.truncate(text, (1 << 28) + 1)
    assert experiment.inputs_sha256 == {}


def test_limits() -> None:
    limit = Limit(metric="kl", least=0.1, most=0.2)
    assert [limit.holds(v) for v in (0.0, 0.1, 0.2, 0.3, float("nan"))] == [
        False, True, True, False, False,
    ]  # fmt: skip
    assert not Limit(metric="kl", least=0.1).holds(float("inf"))
    assert str(Limit(metric="kl", of="ratio", most=2)) == "kl to the baseline's at most 2"


ROWS = {
    "zaya-probe", "zaya-stateful-attention", "zaya-cca-current-tap", "zaya-cca-skipped",
    "zaya-routing-soft", "zaya-routing-routed", "zaya-int8", "zaya-int8-selective",
    "zaya-int4-palette", "zaya-verifier-t4", "gemma-wfa", "gemma-flash", "gemma-merged-23",
    "gemma-lite", "gemma-2chunk", "gemma-1chunk", "gemma-stateless", "gemma-mlstate",
    "gemma-mlstate-padded", "gemma-8k-mask", "gemma-compute-plan-audit", "int4-g32",
    "int8-weights", "w8a8-naive", "w8a8-realistic", "w4a8", "w2a16", "w3a16", "eagle3", "medusa",
    "suffix-decoding", "vocabulary-subset", "triforce-quest", "duo-attention",
}  # fmt: skip
"""The published ports' logs."""


def test_every_row_of_the_seeds_is_there() -> None:
    found = load_experiments(shipped_experiments())
    assert set(found) >= ROWS
    for name, one in found.items():
        assert one.runnable, f"{name}: is it only a plan?"
        assert one.reported, f"{name}: what did the original say?"
        assert one.gates, f"{name}: nothing to judge by"
        assert one.differs, f"{name}: why do figures differ?"


def test_every_metric_has_a_function() -> None:
    import cetane.lab.measures  # noqa: F401
    from cetane.lab.sides import MEASURES

    assert {metric.measure for metric in METRICS.values()} == set(MEASURES)
