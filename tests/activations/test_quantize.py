"""Whole bundles with activations of 8 bits."""

import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cetane.activations import Options, quantize, quantize_activations
from cetane.activations.quantize import Quantized, check_calibratable, copy_all_but_shards
from cetane.bundle import Bundle
from cetane.checkpoint import Checkpoint
from cetane.engine.engine import Engine
from cetane.engine.portable import PortableBackend
from cetane.errors import CetaneError
from cetane.files import regular_files, write_json
from cetane.gates.explain import explain
from cetane.gates.golden import golden
from cetane.gates.golden_result import GoldenResult
from cetane.gates.port import packaged
from cetane.gates.rounding import judge_quantized, same_scales
from cetane.mil import load
from cetane.mil.package import Package
from cetane.pipeline.export import export_coreai, export_runtime, own_checkpoint
from cetane.planner import Planner
from cetane.schema.manifest import MANIFEST
from cetane.schema.recipe import Recipe

TEXT = np.random.default_rng(7).integers(1, 288, 40).tolist()


def silent(*_: Any) -> None:
    pass


def logits(bundle: Bundle, mode: Any, arithmetic: Any = "fp32") -> Any:
    engine = Engine(bundle.plan, PortableBackend(bundle, arithmetic), bundle.tables())
    return engine.session([mode, "decode"]).feed(TEXT, "all")


def cosine(a: Any, b: Any) -> float:
    return float((a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b))


def test_a_bundle_with_quantized_activations_runs(
    bundle: Bundle, made: tuple[Bundle, Quantized]
) -> None:
    quantized, what = made
    quantized.verify()
    before = logits(bundle, "prefill")
    found = {mode: logits(quantized, mode) for mode in ("decode", "prefill")}
    assert 0.97 < cosine(found["prefill"], before) < 0.999999
    np.testing.assert_allclose(found["decode"], found["prefill"], atol=0.2)
    reference = logits(quantized, "prefill", "fp16")
    assert cosine(reference, found["prefill"]) > 0.99  # a step of 8 bits where fp16 rounds apart
    assert what.quantized == 2 * 11 + 1  # four inputs and seven outputs a layer; the head's input


def test_gated_products_and_outputs_stay_in_fp16(
    bundle: Bundle, made: tuple[Bundle, Quantized], tmp_path: Path
) -> None:
    quantized, what = quantize_activations(bundle, tmp_path / "a8", Options(), silent)
    assert what.quantized == 2 * 3 + 1  # q, k, v read one; o; gate and up read one; the head's
    for shard in quantized.plan.by_name:
        for function in load(quantized.shard(shard)).functions.values():
            makers = {value.name: op.kind for op in function.ops for value in op.outputs}
            read = Counter(makers[str(op.inputs["x"][0])] for op in function.ops
                           if op.kind == "conv")  # fmt: skip
            assert read == ({"dequantize": 12, "mul": 2} if "chunk" in shard else {"dequantize": 1})
            others = [op for op in function.ops if op.kind not in ("conv", "const")]
            assert "dequantize" not in {makers.get(n) for op in others for n in op.references()}
    whole, before = logits(made[0], "prefill"), logits(bundle, "prefill")
    assert cosine(logits(quantized, "prefill"), before) > cosine(whole, before)


@pytest.fixture(scope="module")
def verdict(made: tuple[Bundle, Quantized], tiny_checkpoint: Checkpoint) -> GoldenResult:
    return golden(made[0], tiny_checkpoint, silent, prompts=0)


def test_the_golden_gate_judges_it(
    verdict: GoldenResult, made: tuple[Bundle, Quantized], tiny_checkpoint: Checkpoint
) -> None:
    """Graph and weights are the model's. What rounding costs counts as compression."""
    assert verdict.passed, [check for check in verdict.checks if not check.passed]
    assert max(one.relative for one in verdict.structure) < 5e-6
    assert {(one.mode, one.text) for one in verdict.activations} == {
        ("prefill", True), ("prefill", False), ("decode", False)
    }  # fmt: skip
    for one, half in zip(verdict.activations, verdict.rounding, strict=True):
        assert 0.97 < one.logit_cosine < half.logit_cosine
    text = verdict.activations[0]
    assert 0.5 * verdict.twin_kl < text.kl < 2 * verdict.twin_kl
    lost = [one.model_copy(update={"logit_cosine": 0.9}) for one in verdict.activations]
    red = [check for check in judge_quantized(lost) if not check.passed]
    assert [check.name for check in red] == [
        f"activations: logit cosine ({told})" for told in ("prefill, text", "decode", "prefill")
    ]
    found = {"passed": False, "checks": red, "activations": lost}
    why = explain(made[0], tiny_checkpoint, verdict.model_copy(update=found))
    assert why is not None and why.cause == "compression" and not why.changes
    assert "activations of 8 bits" in why.sentence and "compression.rotate=true" in why.sentence


def test_a_mode_of_other_scales(
    verdict: GoldenResult,
    made: tuple[Bundle, Quantized],
    tiny_checkpoint: Checkpoint,
    tmp_path: Path,
) -> None:
    """The promise is kept by the widest mode, and decoding rounds nine times as coarsely."""
    folder = Path(shutil.copytree(made[0].path, tmp_path / "a8"))
    (file,) = (folder / "shards" / "head-0.mlpackage").rglob("*.mlmodel")
    package = Package(file.parents[2])
    function = package.spec.mlProgram.functions["decode"]
    ops = function.block_specializations[function.opset].operations
    rounding = ("quantize", "dequantize")
    scales = {op.inputs["scale"].arguments[0].name for op in ops if op.type in rounding}
    for op in ops:
        if op.type == "const" and op.outputs[0].name in scales:
            number = op.attributes["val"].immediateValue.tensor.bytes
            number.values = (np.frombuffer(number.values, np.float16) * np.float16(9)).tobytes()
    file.write_bytes(package.spec.SerializeToString())
    planner = Planner(tiny_checkpoint, made[0].plan.recipe)
    right, wrong = (
        same_scales(packaged(one, planner, tiny_checkpoint)) for one in (made[0], Bundle(folder))
    )
    assert right.passed and right in verdict.checks
    assert wrong.value == 1 and not wrong.passed
    found = {"passed": False, "checks": (wrong,), "twin_kl": 1e9}
    why = explain(made[0], tiny_checkpoint, verdict.model_copy(update=found))
    assert why is not None and "activations of 8 bits" in why.sentence


def test_positions_beyond_the_judged_text_are_judged(
    made: tuple[Bundle, Quantized], tiny_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """The gate of the command reads no token there."""
    folder = Path(shutil.copytree(made[0].path, tmp_path / "a8"))
    table = folder / "rotary-default.npy"
    angles = np.load(table)
    angles[:, 48:] = angles[:, :1]
    np.save(table, angles)
    found = golden(Bundle(folder), tiny_checkpoint, silent, prompts=0)
    assert [wrong.label for wrong in found.wrong_weights] == ["rotary-default"]
    why = explain(Bundle(folder), tiny_checkpoint, found)
    assert why is not None and why.sentence.endswith("only the gate activations judges.")


def test_functions_share_ranges_and_weights(bundle: Bundle, made: tuple[Bundle, Quantized]) -> None:
    quantized, what = made
    found = 0
    for shard in bundle.plan.by_name:
        before, after = (load(b.shard(shard)).functions for b in (bundle, quantized))
        assert list(before) == list(after)
        for name, function in after.items():
            assert before[name].inputs == function.inputs
            assert before[name].outputs == function.outputs
        kinds = [Counter(op.kind for op in function.ops) for function in after.values()]
        assert kinds[0]["quantize"] == kinds[1]["quantize"] == kinds[0]["dequantize"]
        assert kinds[0]["constexpr_blockwise_shift_scale"] == kinds[0]["conv"]
        found += kinds[0]["quantize"]
    assert found == what.quantized
    sizes = [
        sum(r.bytes for name, r in b.manifest.files.items() if name.endswith("weight.bin"))
        for b in (bundle, quantized)
    ]
    assert sizes[1] < 1.1 * sizes[0]  # stored once for both functions


def test_the_bundle_says_what_it_is(bundle: Bundle, made: tuple[Bundle, Quantized]) -> None:
    plan = made[0].plan
    assert plan.recipe.name == "tiny-a8"
    assert "Activations of 8 bits" in plan.recipe.description
    assert plan.weight_bytes == bundle.plan.weight_bytes
    assert made[0].manifest.fingerprint == bundle.manifest.fingerprint


@pytest.mark.parametrize("layout", ["anemll", "coreml-llm", "coreai"])
def test_no_export_from_the_checkpoint(
    made: tuple[Bundle, Quantized], tmp_path: Path, layout: Any
) -> None:
    """It would have no 8-bit activations, and pass for the bundle."""
    into = partial(export_runtime, runtime=layout) if layout != "coreai" else export_coreai
    with pytest.raises(CetaneError, match=r"another runtime .* are quantized") as refused:
        into(made[0].path, tmp_path / "out")
    assert "quantize-activations was given" in (refused.value.hint or "")
    assert not (tmp_path / "out").exists()


def test_draft_heads_stay_with_the_bundle_that_they_read(bundle: Bundle, tmp_path: Path) -> None:
    """Nor does a bundle get what the hub keeps beside another one."""
    with_others = named(bundle, "tiny", tmp_path / "others")
    for name in ("heads/medusa/head.json", "gates/golden.json", "README.md"):
        (with_others.path / name).parent.mkdir(parents=True, exist_ok=True)
        (with_others.path / name).write_text("{}")
    copy_all_but_shards(with_others, tmp_path / "made")
    kept = {name for name in bundle.manifest.files if ".mlpackage/" not in name}
    assert set(regular_files(tmp_path / "made")) == kept


def test_quantizing_twice(made: tuple[Bundle, Quantized], tmp_path: Path) -> None:
    with pytest.raises(CetaneError, match="quantized already"):
        quantize_activations(made[0], tmp_path / "again", Options(), silent)


def named(bundle: Bundle, name: str, folder: Path) -> Bundle:
    """A copy of a bundle, with another name of the recipe."""
    content = bundle.manifest.model_dump(mode="json")
    content["plan"]["recipe"]["name"] = name
    shutil.copytree(bundle.path, folder)
    write_json(folder / MANIFEST, content)
    return Bundle(folder)


def test_the_recipes_name_tells_nothing(
    bundle: Bundle, made: tuple[Bundle, Quantized], tmp_path: Path
) -> None:
    plain = named(bundle, "mine-a8", tmp_path / "plain")
    assert own_checkpoint(plain, None, None).fingerprint == bundle.manifest.fingerprint
    options = Options(samples="random")
    quantized, _ = quantize_activations(plain, tmp_path / "a8", options, silent)
    assert quantized.plan.recipe.name == "mine-a8-a8"
    renamed = named(made[0], "mine", tmp_path / "renamed")
    with pytest.raises(CetaneError, match="are quantized"):
        own_checkpoint(renamed, None, None)
    with pytest.raises(CetaneError, match="quantized already"):
        quantize_activations(renamed, tmp_path / "again", options, silent)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"contract": "stateful"}, "states"),
        ({"shapes": "range"}, "flexible shapes"),
    ],
)
def test_bundles_that_cannot_be_calibrated(
    tiny_checkpoint: Checkpoint, recipe: Callable[..., Recipe], options: dict[str, Any], words: str
) -> None:
    plan = Planner(tiny_checkpoint, recipe(layout={"kind": "single"}, **options)).plan()
    with pytest.raises(CetaneError, match=f"here has {words}") as caught:
        check_calibratable(plan, Path("here"))
    assert "port it with" in str(caught.value.hint)


def test_experts_as_functions(tiny_checkpoint: Checkpoint, recipe: Callable[..., Recipe]) -> None:
    plan = Planner(tiny_checkpoint, recipe()).plan()
    layout = plan.recipe.layout.model_copy(update={"routed": ("decode",)})
    routed = plan.recipe.model_copy(update={"layout": layout})
    with pytest.raises(CetaneError, match="experts as functions"):
        check_calibratable(plan.model_copy(update={"recipe": routed}), Path("here"))


def test_adapters_beside_a_base(tiny_checkpoint: Checkpoint, recipe: Callable[..., Recipe]) -> None:
    """Only the base's calls are calibrated, so an adapter's tensors would have no range."""
    plan = Planner(tiny_checkpoint, recipe()).plan().model_copy(update={"adapters": {"law": None}})
    with pytest.raises(CetaneError, match="adapters beside a base"):
        check_calibratable(plan, Path("here"))


def test_a_target_that_exists(bundle: Bundle, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("not a bundle")
    for force in (False, True):
        with pytest.raises(CetaneError, match="exists"):
            quantize_activations(bundle, tmp_path, Options(), silent, force=force)
    assert (tmp_path / "mine").read_text() == "not a bundle"


def test_smoothing_without_the_checkpoint(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused before any work."""
    monkeypatch.setattr(quantize, "conversations", None)
    with pytest.raises(CetaneError, match="checkpoint"):
        quantize_activations(bundle, tmp_path / "a8", Options(smooth=True), silent)


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left(
    bundle: Bundle, fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary, target = tmp_path / "temporary", tmp_path / "a8"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    seen = []
    whole = quantize.quantize_package

    def watched(*arguments: Any) -> int:
        made = whole(*arguments)
        seen.extend(temporary.rglob("*.mlpackage"))  # coremltools' own, of calibration
        if fails:
            raise RuntimeError("the end")
        return made

    monkeypatch.setattr(quantize, "quantize_package", watched)
    options = Options(samples="random")
    if fails:
        with pytest.raises(RuntimeError, match="the end"):
            quantize_activations(bundle, target, options, silent)
    else:
        quantize_activations(bundle, target, options, silent)
    assert seen
    assert not list(temporary.iterdir())
    assert {path.name for path in tmp_path.iterdir()} == (
        {"temporary"} if fails else {"temporary", "a8"}
    )


def test_smoothed(bundle: Bundle, tiny_checkpoint: Checkpoint, tmp_path: Path) -> None:
    options = Options(smooth=True)
    quantized, what = quantize_activations(
        bundle, tmp_path / "a8", options, silent, tiny_checkpoint
    )
    assert what.options == options
    assert cosine(logits(quantized, "prefill"), logits(bundle, "prefill")) > 0.97
