"""What a bundle's page says is what the files say."""

import shlex
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import coremltools as ct
import numpy as np
import pytest
import typer
from tests.conftest import build_model
from tests.report.conftest import DEVICE_RESULT, EVALUATION, measured_on_the_ane

from cetane.bundle import Bundle
from cetane.checkpoint import open_checkpoint
from cetane.cli.app import app
from cetane.errors import CetaneError
from cetane.gates.limits import OTHER_LIMITS
from cetane.gates.quality import TextQuality
from cetane.gates.scores import shard_score
from cetane.gates.verdict import share
from cetane.hardware.chips import find_chip
from cetane.perf.predict import Predictor
from cetane.planner import Planner
from cetane.report.card import card
from cetane.report.collect import bundle_report, position_row
from cetane.report.content.figures import Positions, Ranges, Tasks
from cetane.report.content.page import Absent, BundleReport, KeyFigure
from cetane.report.content.speed import CallTimes, OnDevice
from cetane.report.verdicts import outcome_word


def test_every_op_of_the_packages_is_on_the_map(full: BundleReport, judged: Bundle) -> None:
    """Counted by coremltools' own reader of the packages."""
    assert [mapped.mode for mapped in full.residency.maps] == [*judged.plan.modes]
    for mapped in full.residency.maps:
        kinds: Counter[str] = Counter()
        for step in judged.plan.modes[mapped.mode].steps:
            spec = ct.utils.load_spec(str(judged.shard(step.shard)))
            function = spec.mlProgram.functions[step.function]
            block = function.block_specializations[function.opset]
            kinds.update(op.type for op in block.operations)
        wanted = {k: n for k, n in kinds.items() if k != "const" and "constexpr" not in k}
        assert {row.kind: row.ops for row in mapped.rows} == wanted
        assert sum(mapped.placed.values()) == mapped.ops == sum(wanted.values())
        for row in mapped.rows:
            assert sum(sum(c.placed.values()) for c in row.cells if c) == row.ops


def test_layers_alike_have_ops_alike(full: BundleReport) -> None:
    """Both layers of the model are alike, and each attends once."""
    (mapped, *_) = full.residency.maps
    blocks = [column.block for column in mapped.columns]
    assert blocks == ["layer-00", "layer-01", "head-0", "head-1"]
    for row in mapped.rows:
        first, second, *_ = [sum(cell.placed.values()) if cell else 0 for cell in row.cells]
        assert first == second, row.kind
        if row.kind == "softmax":
            assert (first, second) == (1, 1)


def test_what_placed_ops_adds_up(full: BundleReport) -> None:
    total = sum(mapped.ops for mapped in full.residency.maps)
    assert sum(reason.ops for reason in full.residency.reasons) == total
    assert all(reason.message for reason in full.residency.reasons)


def test_sizes_are_those_on_disk(full: BundleReport, judged: Bundle) -> None:
    by_name = {part.name: part for part in full.sizes.parts}
    for shard in judged.plan.shards:
        files = [p for p in judged.shard(shard.name).rglob("*") if p.is_file()]
        part = by_name[shard.name]
        assert part.bytes == sum(p.stat().st_size for p in files)
        assert part.bits == pytest.approx(16)
    assert by_name["embedding.npy"].bytes == (judged.path / "embedding.npy").stat().st_size
    assert full.sizes.bytes == sum(part.bytes for part in full.sizes.parts)


def test_bits_count_palettes(tiny_bundle: Callable[..., Bundle], tiny_model: Any) -> None:
    """By hand: four bits for each element of a matrix, a palette of 16 numbers of fp16 for eight of
    its rows, and gains of fp16. Programs hold a few numbers more."""
    made = tiny_bundle(compression={"default": "palette4-kmeans-group8"})
    weights = [w for n, w in tiny_model("llama").named_parameters() if "embed" not in n]
    matrices = [w for w in weights if w.ndim == 2]
    bits = sum(4 * w.numel() + 16 * 16 * len(w) // 8 for w in matrices)
    bits += sum(16 * w.numel() for w in weights if w.ndim == 1)
    mean = bits / sum(w.numel() for w in weights)
    chip = find_chip("m4-max")
    report = bundle_report(made, chip, None, None, None)
    assert report.sizes.mean_bits == pytest.approx(mean, rel=1e-3)
    (size,) = (figure for figure in report.figures if figure.name == "size")
    assert size.note == f"on disk, {mean:.3g} bits per weight"
    assert f"\n{mean:.3g} bits per weight" in card(made, "bundle", "me/tiny", None, chip, {})


def test_an_apps_tensors_are_those_of_the_packages(full: BundleReport, judged: Bundle) -> None:
    """Names and shapes by coremltools' own reader."""
    seen = 0
    for one in full.developers.interfaces:
        for shard in one.shards:
            spec = ct.utils.load_spec(str(judged.shard(shard)))
            for function in spec.description.functions:
                if function.name in one.functions:
                    seen += 1
                    for direction, features in (("input", function.input),
                                                ("output", function.output)):  # fmt: skip
                        wanted = {f.name: tuple(f.type.multiArrayType.shape) for f in features}
                        mine = {t.name: t.shape for t in one.tensors if t.direction == direction}
                        assert mine == wanted
    assert seen == len(judged.plan.functions)


def test_an_apps_files_and_calls_are_all_there(full: BundleReport, judged: Bundle) -> None:
    for file in full.developers.files:
        assert (judged.path / file.path).exists()
    assert sum(f.bytes for f in full.developers.files) == sum(
        p.stat().st_size for p in judged.path.rglob("*") if p.is_file() and "gates" not in p.parts
    )
    calls = {order.mode: len(order.calls) for order in full.developers.calls}
    assert calls == {mode: len(steps.steps) for mode, steps in judged.plan.modes.items()}


def test_large_figures_have_the_gates_limits(full: BundleReport, empty: BundleReport) -> None:
    figures = {figure.name: figure for figure in full.figures}
    checks = {c.name: c for v in full.verdicts if v.gate == "golden" for c in v.checks}
    for name, factor, check in (
        ("KL divergence", 1, checks["compression, good: KL"]),
        ("same first choice", 100, checks["compression, good: top-1 of decided tokens"]),
    ):
        figure = figures[name]
        assert (figure.value, figure.limit) == (factor * check.value, factor * check.limit)
        assert figure.holds == check.passed
    assert figures["size"].holds is None
    assert "KL divergence" not in {figure.name for figure in empty.figures}


def test_large_figures_are_those_that_the_gate_judged(judged: Bundle, tmp_path: Path) -> None:
    """A share passes by its interval's low end; of adapters, the worst counts."""
    bundle = Bundle(shutil.copytree(judged.path, tmp_path / "bundle"))
    golden = bundle.gates()["golden"]
    name = "compression, good: top-1 of decided tokens"
    base, adapter = (
        share(name, hits, 224, 0.85, 0.95).model_dump(mode="json") for hits in (224, 195)
    )
    others = [check for check in golden["checks"] if check["name"] != name]

    def first_choice(*checks: dict[str, Any]) -> list[KeyFigure]:
        bundle.write_gate("golden", golden | {"checks": [*others, *checks]})
        figures = bundle_report(bundle, None, None, None, None).figures
        return [figure for figure in figures if figure.name == "same first choice"]

    (figure,) = first_choice(base, adapter | {"name": f"poet: {name}"})
    assert figure.limit is not None and figure.value == 100 * 195 / 224 > figure.limit
    assert figure.holds is adapter["passed"] is False
    assert first_choice() == []  # too few tokens to prove a share


def test_ranges_name_the_largest(full: BundleReport) -> None:
    assert isinstance(full.ranges, Ranges)
    assert full.ranges.largest.largest == max(b.largest for b in full.ranges.blocks)
    assert full.ranges.share == full.ranges.largest.largest / np.finfo(np.float16).max


def test_predictions_are_the_cost_models(full: BundleReport, judged: Bundle) -> None:
    assert isinstance(full.predicted, CallTimes)
    planner = Planner(open_checkpoint(judged.manifest.source), judged.plan.recipe)
    wanted = Predictor(find_chip("m4-max")).predict(planner, "decode")
    decode = next(mode for mode in full.predicted.modes if mode.mode == "decode")
    assert (decode.ms, decode.low, decode.high) == (wanted.ms, wanted.low, wanted.high)
    assert {term.mode for term in full.predicted.modes} == set(judged.plan.modes)


def test_positions_are_cosines_by_position(full: BundleReport, judged: Bundle) -> None:
    """The mean over positions of the worse probe is no better than the worst probe's mean."""
    assert isinstance(full.positions, Positions)
    for row in full.positions.rows:
        assert len(row.values) == full.positions.positions
        assert min(row.values) == pytest.approx(row.worst, abs=1e-6)
        assert np.mean(row.values) <= row.cosine + 1e-6
        assert row.values[row.worst_at] == min(row.values)


def test_a_position_that_differs_is_named() -> None:
    """By numpy: one row of one probe is turned by 60 degrees."""
    rows = np.tile(np.array([1.0, 0.0]), (5, 1))
    turned = rows.copy()
    turned[3] = np.cos(np.pi / 3), np.sin(np.pi / 3)
    pairs = [(rows, rows), (turned, rows), (rows[:2], rows[:2])]
    score = shard_score("shard", "hidden", ("model", 0), "decode", pairs)
    assert score.by_position == (1.0, 1.0, 1.0, 0.5, 1.0)
    assert position_row(score, 1).worst_at == 3
    assert position_row(score, 2).values == (1.0, 0.5, 1.0)


def test_verdicts(full: BundleReport, empty: BundleReport) -> None:
    said = {verdict.gate: verdict for verdict in full.verdicts}
    assert (said["golden"].outcome, full.outcome) == ("passed", "passed")
    assert said["golden"].checks and all(check.passed for check in said["golden"].checks)
    assert said["ladder"].outcome == said["perplexity"].outcome == "not run"
    assert said["residency"].basis == "predicted"
    assert empty.outcome == "not run"


def test_commands_judge_this_very_bundle(full: BundleReport, judged: Bundle) -> None:
    """`cetane port MODEL` would make another one: of another recipe, or without an adapter."""
    commands = {verdict.gate: verdict.command for verdict in full.verdicts if verdict.repeatable}
    assert {"golden", "perplexity", "residency", "device"} <= commands.keys()
    top: Any = typer.main.get_command(app)
    for line in commands.values():
        name, *arguments = shlex.split(line)[1:]
        command = top.get_command(None, name)
        given = command.make_context(name, [*arguments]).params
        assert judged.path in given.values() or [judged.path] == given["bundles"], line


def test_the_ladder_belongs_to_a_port(full: BundleReport) -> None:
    ladder = next(verdict for verdict in full.verdicts if verdict.gate == "ladder")
    assert (ladder.command, ladder.repeatable) == ("cetane port", False)


def test_tasks_are_those_of_the_evaluation(full: BundleReport) -> None:
    assert isinstance(full.tasks, Tasks) and full.tasks.compared
    assert full.tasks.figures == EVALUATION.figures
    assert "evaluation" not in {verdict.gate for verdict in full.verdicts}


def test_what_a_device_measured_stands_beside_what_was_predicted(full: BundleReport) -> None:
    assert isinstance(full.device, OnDevice) and full.device.machine == DEVICE_RESULT.machine
    rows = {row.name: row for row in full.device.rows}
    assert rows["a token, decoding"].value == 4.0 and rows["a token, decoding"].predicted == 3.0
    assert rows["energy of a token"].value == 0.02
    figures = {(figure.name, figure.basis): figure.value for figure in full.figures}
    assert figures["speed", "measured"] == 250.0 and figures["energy", "measured"] == 0.02
    assert ("speed", "predicted") in figures
    said = {verdict.gate: verdict for verdict in full.verdicts}["device"]
    assert said.outcome == "passed" and said.basis == "measured"


def test_a_failed_gate_fails_the_whole(judged: Bundle, tmp_path: Path) -> None:
    shutil.copytree(judged.path, tmp_path / "bundle")
    bundle = Bundle(tmp_path / "bundle")
    bundle.write_gate("w8a8", {"passed": False})
    report = bundle_report(bundle, find_chip("m4-max"), None, None, None)
    assert report.outcome == "failed"
    assert report.verdicts[-1].gate == "w8a8"


def test_a_perplexity_of_another_checkpoint_says_so(judged: Bundle, tmp_path: Path) -> None:
    shutil.copytree(judged.path, tmp_path / "bundle")
    bundle = Bundle(tmp_path / "bundle")
    quality = TextQuality(
        passed=True, fingerprint="f", tokens=9, perplexity=8.0, reference_perplexity=8.0, ratio=1.0,
        limit=1.1, kl=0.0, top1=1.0, covered=1.0, covered_perplexity=8.0,
        covered_reference_perplexity=8.0, missing=0.0, absent=0.0, warnings=("it is another file",),
    )  # fmt: skip
    bundle.write_gate("perplexity", quality.model_dump(mode="json") | {"text": "book.txt"})
    report = bundle_report(bundle, find_chip("m4-max"), None, None, None)
    said = {verdict.gate: verdict for verdict in report.verdicts}["perplexity"]
    assert (said.outcome, said.notes) == ("passed", quality.warnings)


def test_a_verdict_by_other_limits_says_so(judged: Bundle, tmp_path: Path) -> None:
    """Limits improve, and a bundle keeps the verdict of its day."""
    shutil.copytree(judged.path, tmp_path / "bundle")
    bundle = Bundle(tmp_path / "bundle")

    def notes() -> tuple[str, ...]:
        report = bundle_report(bundle, find_chip("m4-max"), None, None, None)
        return {verdict.gate: verdict for verdict in report.verdicts}["golden"].notes

    assert OTHER_LIMITS not in notes()
    bundle.write_gate("golden", bundle.gates()["golden"] | {"limits": "of last year"})
    assert OTHER_LIMITS in notes()


def test_what_is_missing_says_how_to_make_it(empty: BundleReport) -> None:
    for section in ("positions", "ranges", "perplexity", "tasks", "quality", "speculation",
                    "predicted", "device"):  # fmt: skip
        absent = getattr(empty, section)
        assert isinstance(absent, Absent), section
        assert absent.command.startswith("cetane ")


def test_a_chip_of_unknown_speed(judged: Bundle) -> None:
    report = bundle_report(judged, find_chip("m3-pro"), None, None, None)
    assert isinstance(report.predicted, Absent)
    assert "no rate at which M3 Pro reads weights" in report.predicted.why


@pytest.mark.parametrize(
    ("chip", "basis"), [(None, "measured"), ("m4-max", "measured"), ("a13", "predicted")]
)
def test_measured_residency_is_of_the_measured_chip(
    judged: Bundle, tmp_path: Path, chip: str | None, basis: str
) -> None:
    """It is no figure of another chip, and the page says that it was left out."""
    bundle = Bundle(shutil.copytree(judged.path, tmp_path / "bundle"))
    measured_on_the_ane(bundle)
    report = bundle_report(bundle, find_chip(chip) if chip else None, None, None, None)
    verdict = {verdict.gate: verdict for verdict in report.verdicts}["residency"]
    (off,) = (figure for figure in report.figures if figure.name.startswith("weights off"))
    assert (verdict.basis, report.residency.basis, off.basis) == (basis, basis, basis)
    target = "a13, OS 26" if chip == "a13" else "Apple M4 Max, macOS 26.1"
    assert report.residency.target == target and off.note.endswith(target)
    unused = f"what was measured on Apple M4 Max, macOS 26.1 says nothing of {target}"
    assert (unused in verdict.notes) is (basis == "predicted")


def test_only_true_passes() -> None:
    """A word in a file that somebody wrote is no verdict."""
    told = [None, True, False, "false", "yes", 1]
    assert list(map(outcome_word, told)) == [
        "not run",
        "passed",
        "failed",
        "failed",
        "failed",
        "failed",
    ]


@pytest.mark.parametrize(
    "content", [{"passed": True}, {"passed": True, "checks": [[1]]}, {"checks": "many"}]
)
def test_a_damaged_result_is_an_error(
    judged: Bundle, tmp_path: Path, content: dict[str, object]
) -> None:
    shutil.copytree(judged.path, tmp_path / "bundle")
    bundle = Bundle(tmp_path / "bundle")
    bundle.write_gate("golden", content)
    with pytest.raises(CetaneError, match=r"golden\.json") as caught:
        bundle_report(bundle, find_chip("m4-max"), None, None, None)
    assert "cetane validate" in str(caught.value.hint)


def other_source(bundle: Bundle, copy: Path, source: Path) -> Bundle:
    """A copy of a bundle that names another place of its checkpoint."""
    shutil.copytree(bundle.path, copy)
    manifest = copy / "manifest.json"
    manifest.write_text(manifest.read_text().replace(bundle.manifest.source, str(source)))
    return Bundle(copy)


@pytest.fixture
def wider(tiny_checkpoint_folder: Path, tmp_path: Path) -> Path:
    """The tiny model with a wider MLP, which no interface of a shard shows."""
    folder = shutil.copytree(tiny_checkpoint_folder, tmp_path / "wider")
    build_model("llama", intermediate_size=128).save_pretrained(folder)
    return folder


def test_another_model_in_the_checkpoints_place_gives_no_prediction(
    judged: Bundle, wider: Path, tmp_path: Path
) -> None:
    """Push takes no other place, so it is no error."""
    bundle = other_source(judged, tmp_path / "bundle", wider)
    report = bundle_report(bundle, find_chip("m4-max"), None, None, None)
    assert isinstance(report.predicted, Absent)
    assert "is another model than" in report.predicted.why
    assert report.predicted.command.endswith("--model CHECKPOINT")


def test_another_model_is_an_error(judged: Bundle, wider: Path) -> None:
    with pytest.raises(CetaneError, match="is another model than"):
        bundle_report(judged, find_chip("m4-max"), str(wider), None, None)


def test_a_copy_of_the_checkpoint_predicts_the_same(
    judged: Bundle, full: BundleReport, tiny_checkpoint_folder: Path, tmp_path: Path
) -> None:
    """A download anew changes dates, and so the fingerprint, but no shape."""
    copy = shutil.copytree(tiny_checkpoint_folder, tmp_path / "copy", copy_function=shutil.copy)
    report = bundle_report(judged, find_chip("m4-max"), str(copy), None, None)
    assert isinstance(report.predicted, CallTimes)
    assert report.predicted == full.predicted
