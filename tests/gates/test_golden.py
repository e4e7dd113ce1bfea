"""The golden gate is green for a right port and red for a wrong one."""

import json
import shutil
import weakref
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.conftest import build_tokenizer, tiny_recipe
from tests.converting import converted_once

from cetane.bundle import Bundle
from cetane.checkpoint import Checkpoint, open_checkpoint
from cetane.engine.authored import authored_engine
from cetane.engine.engine import Engine
from cetane.engine.portable import PortableBackend
from cetane.gates.explain import explain
from cetane.gates.golden import golden, judge_ranges
from cetane.gates.golden_result import GoldenResult, Range
from cetane.gates.manifest import OTHER_PLAN, OTHER_TAGS
from cetane.gates.observe import ProbeTask, observe
from cetane.gates.port import ArithmeticBackend
from cetane.gates.probes import Probe, ProbePart, text_tokens
from cetane.gates.reference import Reference
from cetane.gates.rounding import Rounding, judge_rounding
from cetane.gates.scores import shard_scores
from cetane.gates.structure import Deviation, judge_structure
from cetane.hardware import LARGEST_FP16
from cetane.mil.blob import BlobFile
from cetane.mil.package import Package
from cetane.pipeline.build import build
from cetane.planner import Planner, as_recipe_asks

from .conftest import ROUTED, changed, zaya_recipe


def run(bundle: Bundle, checkpoint: Checkpoint, **options: Any) -> GoldenResult:
    return golden(bundle, checkpoint, lambda *_: None, greedy_tokens=12, **options)


def failed(result: GoldenResult) -> set[str]:
    """The questions with a red check."""
    return {check.name.partition(":")[0].partition(",")[0] for check in result.checks
            if not check.passed}  # fmt: skip


@pytest.fixture(scope="module")
def result(good: Bundle, tiny_checkpoint_folder: Path) -> GoldenResult:
    return run(good, open_checkpoint(tiny_checkpoint_folder))


def test_a_right_port_passes(result: GoldenResult, good: Bundle, checkpoint: Checkpoint) -> None:
    assert result.passed, [check for check in result.checks if not check.passed]
    assert explain(good, checkpoint, result) is None
    assert result.greedy == (1.0, 1.0)
    assert result.loader == "transformers"
    assert result.wrong_weights == result.unused == result.misread == ()
    assert {one.mode for one in result.structure} == {"decode", "prefill"}
    assert {one.probe for one in result.structure} == {"text", "end of the context", "faint"}
    assert result.warnings == ()


def test_every_question_is_asked(result: GoldenResult) -> None:
    asked = {check.name.partition(":")[0] for check in result.checks}
    assert asked == {"weights", "structure", "fp16", "compression, good"}


def test_enough_is_judged(result: GoldenResult) -> None:
    """At least 256 positions of text, and shares with the intervals that they lie in."""
    assert result.positions >= 256
    shares = [check for check in result.checks if check.interval is not None]
    assert shares
    for check in shares:
        low, high = check.interval or (0, 0)
        assert low <= check.value <= high
        assert high - low < 0.25


def test_single_tokens_are_judged_on_as_many(
    tiny_bundle: Callable[..., Bundle], checkpoint: Checkpoint
) -> None:
    small = tiny_bundle(verify=None, prefill=None, layout={"kind": "per-block"}, context=32)
    found = run(small, checkpoint)
    assert found.passed
    assert found.positions >= 256
    assert found.greedy == (1.0, 1.0)


def test_the_same_seed_gives_the_same_verdict(
    result: GoldenResult, good: Bundle, checkpoint: Checkpoint
) -> None:
    again = run(good, checkpoint)
    assert again.checks == result.checks
    assert again.probes == result.probes


def test_the_figures_are_those_of_fp16(result: GoldenResult) -> None:
    """Rounding shows, and only rounding; the structure's errors are those of sums."""
    for one in result.rounding:
        assert 0 < one.kl < 1e-3
        assert 0.9999 < one.hidden_cosine < 1
        assert one.finite
    assert 0 < max(one.relative for one in result.structure) < 5e-6
    assert result.twin_kl < 1e-4


@pytest.mark.parametrize("wrong", ["softcap", "positions"])
def test_a_wrong_plan_fails(
    good: Bundle, checkpoint: Checkpoint, tmp_path: Path, wrong: str
) -> None:
    """What hosts run is the manifest's plan, so this one is judged."""
    shutil.copytree(good.path, tmp_path / "bundle")
    manifest = tmp_path / "bundle" / "manifest.json"
    content = json.loads(manifest.read_text())
    if wrong == "softcap":
        content["plan"]["softcap"] = 1.0
    else:  # the cosines for the sines, and the other way round
        for shard in content["plan"]["shards"]:
            for function in shard["functions"]:
                for item in function["inputs"]:
                    if item["source"]["host"] == "rotary":
                        part = item["source"]["part"]
                        item["source"]["part"] = {"cos": "sin", "sin": "cos"}[part]
    manifest.write_text(json.dumps(content))
    assert not run(Bundle(tmp_path / "bundle"), checkpoint).passed


def test_experts_in_another_order_fail(
    zaya_bundle: Callable[..., Bundle], zaya_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """Though no token needs to reach them."""
    source = zaya_bundle(**ROUTED).path
    shutil.copytree(source, tmp_path / "bundle")
    manifest = tmp_path / "bundle" / "manifest.json"
    content = json.loads(manifest.read_text())
    route = next(step for step in content["plan"]["modes"]["decode"]["steps"] if "experts" in step)
    route["experts"].reverse()
    manifest.write_text(json.dumps(content))
    found = run(Bundle(tmp_path / "bundle"), zaya_checkpoint, prompts=0)
    assert OTHER_PLAN in [check.name for check in found.checks if not check.passed]
    why = explain(Bundle(tmp_path / "bundle"), zaya_checkpoint, found)
    assert why is not None and (why.cause, why.where) == ("contract", "manifest.json")


def test_a_manifest_with_other_figures_fails(
    good: Bundle, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """A model card tells them."""
    shutil.copytree(good.path, tmp_path / "bundle")
    manifest = tmp_path / "bundle" / "manifest.json"
    content = json.loads(manifest.read_text())
    content["plan"] |= {"mean_bits": 0.5, "layers": 99}
    manifest.write_text(json.dumps(content))
    bundle = Bundle(tmp_path / "bundle")
    found = run(bundle, checkpoint, prompts=0)
    assert [check.name for check in found.checks if not check.passed] == [OTHER_PLAN]
    why = explain(bundle, checkpoint, found)
    assert why is not None and "layers, mean_bits" in why.sentence


@pytest.mark.parametrize(
    ("tags", "passed"),
    [
        ({}, True),  # an older bundle has none
        ({"attn_implementation": "gqa_readonly_kvcache_rope_qkvo_fp16"}, True),
        ({"attn_implementation": "mha_stateful_kvcache_rope_qkvo_fp16"}, False),
        ({"attn_implementation": "gqa_readonly_kvcache_rope_qkvo_fp16", "cca": "whole"}, False),
        ({"cca": "whole"}, False),
    ],
)
def test_tags_of_another_attention_fail(
    tags: dict[str, str], passed: bool, good: Bundle, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """Here they are written by hand."""
    shutil.copytree(good.path, tmp_path / "bundle")
    manifest = tmp_path / "bundle" / "manifest.json"
    content = json.loads(manifest.read_text()) | {"tags": tags}
    manifest.write_text(json.dumps(content))
    bundle = Bundle(tmp_path / "bundle")
    found = run(bundle, checkpoint, prompts=0)
    assert [check.name for check in found.checks if not check.passed] == [OTHER_TAGS][passed:]
    if not passed:
        why = explain(bundle, checkpoint, found)
        assert why is not None and why.where == "manifest.json" and ": tags. " in why.sentence


def test_a_wrong_weight_fails(bad: Bundle, checkpoint: Checkpoint) -> None:
    """It is found, and named; the graph is right."""
    found = run(bad, checkpoint)
    assert {"weights"} <= failed(found) <= {"weights", "compression"}
    (wrong,) = found.wrong_weights
    assert wrong.parameter == "model.layers.1.mlp.down_proj.weight"
    assert wrong.shard == "chunk-00"


def test_another_tokenizer_fails(good: Bundle, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """The programs do not show it: they take ids."""
    shutil.copytree(good.path, tmp_path / "bundle")
    (tmp_path / "bundle" / "tokenizer" / "chat_template.jinja").write_text("Hello")
    bundle = Bundle(tmp_path / "bundle")
    found = run(bundle, checkpoint, prompts=0)
    assert failed(found) == {"weights"}
    why = explain(bundle, checkpoint, found)
    assert why is not None and "In tokenizer, chat template differs" in why.sentence


@pytest.fixture
def damaged(good: Bundle, tmp_path: Path) -> Callable[[str, float], Bundle]:
    """`damaged(name, factor)`: a copy in which a stored constant is multiplied."""

    def damage(name: str, factor: float) -> Bundle:
        folder = tmp_path / "bundle"
        shutil.copytree(good.path, folder)
        package = Package(Bundle(folder).shard("chunk-00"))
        for function in package.spec.mlProgram.functions.values():
            for op in function.block_specializations[function.opset].operations:
                if op.outputs and op.outputs[0].name == name:
                    value = op.attributes["val"].blobFileValue
                    file = package.file(value.fileName)
                    start, size = BlobFile(file).extent(value.offset)
                    with file.open("r+b") as stream:
                        stream.seek(start)
                        values = np.frombuffer(stream.read(size), np.float16)
                        stream.seek(start)
                        stream.write((values * np.float16(factor)).tobytes())
                    return Bundle(folder)
        raise AssertionError(name)

    return damage


@pytest.mark.parametrize(
    ("name", "parameter"),
    [
        ("blocks_0_self_attn_q_proj_weight", "model.layers.0.self_attn.q_proj.weight"),
        ("blocks_1_input_layernorm_weight", "model.layers.1.input_layernorm.weight"),
    ],
)
def test_a_constant_of_a_package_that_was_doubled(
    name: str, parameter: str, damaged: Callable[..., Bundle], checkpoint: Checkpoint
) -> None:
    found = run(damaged(name, 2.0), checkpoint, prompts=0)
    assert "weights" in failed(found)
    assert "structure" not in failed(found)  # which puts the true one in its place
    assert [wrong.parameter for wrong in found.wrong_weights] == [parameter]


def test_fewer_bits_are_no_excuse(
    tiny_checkpoint_folder: Path, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """One bit a weight is another model: its weights and its graph are right all the same."""
    recipe = zaya_recipe(
        layout={"kind": "chunks", "chunks": 1},
        compression={"default": "palette1-kmeans-per-tensor"},
        quality="usable",
    )
    with converted_once():
        bundle = build(checkpoint, recipe, tmp_path / "one-bit", lambda *_: None)
    assert failed(run(bundle, checkpoint, prompts=0)) == {"compression"}


def test_a_wrong_port_passes_beside_its_own_checkpoint(bad: Bundle) -> None:
    """The gate judges the port: the checkpoint is right by definition."""
    assert run(bad, open_checkpoint(bad.manifest.source), prompts=1).passed


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The shards that are opened in fp16, in order; fails when one is while another is there."""
    names: list[str] = []
    alive: list[weakref.ref[Any]] = []
    opens = ArithmeticBackend.open

    def spy(self: ArithmeticBackend, shard: str) -> Any:
        if self.arithmetic == "fp32":
            return opens(self, shard)
        assert [ref for ref in alive if ref() is not None] == []
        program = opens(self, shard)
        names.append(shard)
        alive.extend([weakref.ref(program), weakref.ref(program.program)])
        return program

    monkeypatch.setattr(ArithmeticBackend, "open", spy)
    return names


ZAYA_SHARDS = {
    "dense": [
        ("attn-00", "hidden", "model.layers.0.post_attention_residual_scale"),
        ("moe-00", "hidden", "model.layers.0"),
        ("moe-00", "router", "model.layers.0"),
        ("attn-01", "hidden", "model.layers.1.post_attention_residual_scale"),
        ("moe-01", "hidden", "model.layers.1"),
    ],
    "routed": [
        ("layer-00", "hidden", "model.layers.0.post_attention_residual_scale"),
        ("layer-00", "router", "model.layers.0"),
        ("layer-00", "hidden", "model.layers.0"),
        ("layer-01", "hidden", "model.layers.1.post_attention_residual_scale"),
        ("layer-01", "hidden", "model.layers.1"),
    ],
}
"""What every shard hands on when it decodes, in the order of the calls."""


@pytest.mark.parametrize(("kind", "options"), [("dense", {}), ("routed", ROUTED)])
def test_a_zaya_passes(
    kind: str,
    options: dict[str, Any],
    zaya_bundle: Callable[..., Bundle],
    zaya_checkpoint: Checkpoint,
    opened: list[str],
) -> None:
    """Its hidden states and its routers' states, with one shard in memory at a time."""
    bundle = zaya_bundle(**options)
    opened.clear()
    found = run(bundle, zaya_checkpoint, prompts=1)
    assert found.passed, found.checks
    assert found.greedy == (1.0,)
    assert opened == [shard.name for shard in bundle.plan.shards]
    scored = {
        mode: [(s.shard, s.tensor, s.truth) for s in found.shards if s.mode == mode]
        for mode in bundle.plan.modes
    }
    expected = {"decode": ZAYA_SHARDS[kind]}
    if kind == "routed":  # text is read by prefill, where all experts are one call
        expected = {
            "decode": [],
            "prefill": [
                ("layer-00", "hidden", "model.layers.0"),
                ("layer-00", "router", "model.layers.0"),
                ("layer-01", "hidden", "model.layers.1"),
            ],
        }
    assert scored == expected
    decoded = {
        (one.shard, one.tensor, one.truth) for one in found.structure if one.mode == "decode"
    }
    assert set(ZAYA_SHARDS[kind]) <= decoded
    for score in found.shards:
        near_tie, *others = sorted(score.by_position)  # others attend to a token near a tie
        assert 0.98 < near_tie < 1 and min(others) > 0.999
    routers = {one.shard for one in found.structure if one.tensor == "router"}
    assert routers == {opened[1 if kind == "dense" else 0]}
    assert all(one.other_experts is not None for one in found.rounding)


def test_a_departure_fails(departed: Bundle, zaya_checkpoint: Checkpoint) -> None:
    """What ZAYA does not do is found in the block that does it, and after it."""
    found = run(departed, zaya_checkpoint, prompts=0)
    assert not found.passed
    failed = {check.name for check in found.checks if not check.passed}
    assert {"structure: hidden of attn-00 (decode)"} <= failed


def test_ranges(
    zaya_bundle: Callable[..., Bundle], zaya_checkpoint: Checkpoint, zaya_model: Any
) -> None:
    """The largest magnitudes of the model itself, by block."""
    found = run(zaya_bundle(), zaya_checkpoint, prompts=0)
    seen: dict[str, float] = dict.fromkeys(("attn-00", "moe-00", "attn-01", "moe-01"), 0.0)

    def note(block: str) -> Callable[..., None]:
        def hook(_: Any, __: Any, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            seen[block] = max(seen[block], float(hidden.abs().max()))

        return hook

    layers = zaya_model.model.layers
    modules = [m for x in layers for m in (x.post_attention_residual_scale, x)]
    hooks = [m.register_forward_hook(note(b)) for m, b in zip(modules, seen, strict=True)]
    with torch.inference_mode():
        for name, tokens in found.probes.items():
            if name.startswith(("text from", "start, ")):
                zaya_model(torch.tensor([tokens]), use_cache=False)
    for hook in hooks:
        hook.remove()
    assert {found.block: found.largest for found in found.ranges} == pytest.approx(seen, rel=1e-4)


@pytest.mark.parametrize(("largest", "warned"), [(30_000, False), (36_000, True), (60_000, True)])
def test_a_residual_stream_near_the_limit_of_fp16(
    largest: float,
    warned: bool,
    zaya_bundle: Callable[..., Bundle],
    zaya_folder: Path,
    tmp_path: Path,
) -> None:
    """Of the model: the embedding's affine sets the scale of what follows."""
    channel = 3
    scale, bias = (f"model.input_hidden_states_{what}" for what in ("scale", "bias"))

    def raise_one_channel(weights: dict[str, torch.Tensor]) -> None:
        for name in weights:
            if "residual_scale.residual_scale" in name or "residual_scale.residual_bias" in name:
                weights[name].fill_(float("scale.residual_scale" in name))
        weights[scale].fill_(1)
        weights["model.embed_tokens.weight"][:, channel] = 0
        weights[bias][channel] = largest

    folder = changed(zaya_folder, tmp_path / "zaya", raise_one_channel)
    found = run(zaya_bundle(), open_checkpoint(folder), prompts=0)
    assert found.ranges[0].largest == pytest.approx(largest, rel=0.01)
    said = [warning for warning in found.warnings if warning.startswith("attn-00: ")]
    assert bool(said) is warned
    if warned:
        assert "the residual stream reaches" in said[0]
        assert "65504" in said[0]


def test_a_model_too_large_to_decode(
    good: Bundle, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy decoding would need all of it in memory: it is left out, and that is said."""
    monkeypatch.setattr("cetane.gates.golden.RESIDENT", 1000)
    monkeypatch.setattr("cetane.gates.reference.RESIDENT", 1000)
    found = run(good, checkpoint)
    assert found.passed
    assert found.greedy == ()
    assert not [check for check in found.checks if check.name.startswith("greedy")]
    left_out, only_ours, as_chance = found.warnings
    assert left_out.startswith("greedy decoding was left out")
    assert only_ours.startswith("only cetane read the model's weights")
    assert "hardly better than chance" in as_chance  # its weights are random


def test_a_prompt_that_leaves_fp16_with_its_bos(
    tiny_checkpoint_folder: Path, tmp_path: Path
) -> None:
    """No other token reaches the end of fp16's range, but every prompt begins with BOS."""
    channel, row, bos = 7, 5, 287

    def enlarge(weights: dict[str, torch.Tensor]) -> None:
        embedding = weights["model.embed_tokens.weight"]
        embedding[:, channel] *= 0.01
        embedding[bos] = 0
        embedding[bos, channel] = 40_000
        weights["model.layers.0.post_attention_layernorm.weight"][channel] = 1
        for name in ("gate_proj", "up_proj"):
            weights[f"model.layers.0.mlp.{name}.weight"][row] = 0
            weights[f"model.layers.0.mlp.{name}.weight"][row, channel] = 10
        down = weights["model.layers.0.mlp.down_proj.weight"]
        down[:, row] = 0
        down[channel, row] = 5

    folder = changed(tiny_checkpoint_folder, tmp_path / "model", enlarge)
    tokenizer = build_tokenizer()
    tokenizer.bos_token = tokenizer.convert_ids_to_tokens(bos)
    tokenizer.save_pretrained(folder)
    begins = open_checkpoint(folder)
    assert begins.tokenizer.bos_id == bos
    options = {"verify": None, "layout": {"kind": "single"}}
    unscaled = tiny_recipe(**options, family={"residual_scale": 1.0})
    with converted_once():
        bundle = build(begins, unscaled, tmp_path / "bundle", lambda *_: None)
    found = run(bundle, begins, prompts=0)
    assert failed(found) == {"fp16"}
    assert max(one.largest for one in found.ranges) > LARGEST_FP16
    why = explain(bundle, begins, found)
    assert why is not None and why.changes == {"family.residual_scale": 0.25}
    with converted_once():  # a build finds a scale by itself, with BOS too
        scaled = build(begins, tiny_recipe(**options), tmp_path / "scaled", lambda *_: None)
    assert run(scaled, begins, prompts=0).passed


@pytest.mark.parametrize(
    ("size", "gain", "back", "kind", "says", "mends"),
    [
        (40_000, 10, 5, "add", "The residual stream reaches", {"family.residual_scale": 0.25}),
        (100, 100, 5e-4, "mul", "an op inside leaves fp16's range", {}),
    ],
    ids=["stream", "inside"],
)
def test_a_later_token_that_leaves_fp16(
    size: float, gain: float, back: float, kind: str, says: str, mends: dict[str, float],
    tiny_checkpoint_folder: Path, tmp_path: Path,
) -> None:  # fmt: skip
    """It is the largest of the gate's text, so each mode reads it."""
    channel, row = 7, 5
    text = text_tokens(open_checkpoint(tiny_checkpoint_folder).tokenizer, 64)
    token = next(one for one in text[30:] if one not in text[:30])

    def enlarge(weights: dict[str, torch.Tensor]) -> None:
        embedding = weights["model.embed_tokens.weight"]
        embedding[:, channel] *= 0.01
        embedding[token] = 0
        embedding[token, channel] = size
        weights["model.layers.0.post_attention_layernorm.weight"][channel] = 1
        for name in ("gate_proj", "up_proj"):
            weights[f"model.layers.0.mlp.{name}.weight"][row] = 0
            weights[f"model.layers.0.mlp.{name}.weight"][row, channel] = gain
        down = weights["model.layers.0.mlp.down_proj.weight"]
        down[:, row] = 0
        down[channel, row] = back

    folder = changed(tiny_checkpoint_folder, tmp_path / "model", enlarge)
    layout = {"kind": "chunks", "chunks": 1}
    unscaled = tiny_recipe(verify=None, layout=layout, family={"residual_scale": 1.0})
    large = open_checkpoint(folder)
    with converted_once():
        bundle = build(large, unscaled, tmp_path / "bundle", lambda *_: None)
    halves = Engine(bundle.plan, PortableBackend(bundle, "fp16"), bundle.tables())
    lost = ~np.isfinite(halves.session().feed(list(text), "all")).all(1)
    first = text.index(token)
    assert lost[first:].all() and not lost[: first - 8].any()  # a user gets NaN from its call on
    found = run(bundle, large, prompts=0)
    red = {check.name for check in found.checks if not check.passed}
    read = ("prefill, text", "prefill", "decode")
    assert {f"fp16: infinity or NaN ({told})" for told in read} <= red
    assert ("fp16: residual stream" in red) is bool(mends)
    assert failed(found) == {"fp16"}
    assert found.lost is not None and found.lost.kind == kind
    why = explain(bundle, large, found)
    assert why is not None and says in why.sentence
    assert why.changes == mends


def test_a_stream_at_the_end_of_fp16() -> None:
    """No fp16 text needs to reach the token: the model's own stream is known."""
    for largest, passed in ((LARGEST_FP16, True), (LARGEST_FP16 + 32, False)):
        ranges = [Range(block="a", largest=1), Range(block="b", largest=largest)]
        assert judge_ranges(ranges).passed is passed


def test_heads_that_stream_are_judged_by_what_they_miss(
    tiny_checkpoint_folder: Path, tmp_path: Path
) -> None:
    """Heads that see two tokens compute their graph exactly, and are not the model."""

    def look_far(weights: dict[str, torch.Tensor]) -> None:
        for name, weight in weights.items():
            if name.endswith(("v_proj.weight", "o_proj.weight")):
                weight *= 6

    folder = changed(tiny_checkpoint_folder, tmp_path / "model", look_far)
    scores: dict[str, Any] = {"source": "", "model_type": "llama", "method": "mass"}
    scores |= {"settings": {}, "layers": [[0.1, 0.2], [0.3, 0.4]]}
    streaming = {"scores": scores, "full": 0.5, "sinks": 0, "window": 2}
    recipe = tiny_recipe(
        verify=None,
        layout={"kind": "single"},
        cache={"contract": "readonly", "context": 64, "streaming": streaming},
    )
    streamed = as_recipe_asks(open_checkpoint(folder), recipe)
    with converted_once():
        bundle = build(streamed, recipe, tmp_path / "bundle", lambda *_: None)
    found = run(bundle, streamed, prompts=1)
    assert failed(found) == {"compression"}
    why = explain(bundle, streamed, found)
    assert why is not None and "heads that stream" in why.sentence
    assert why.changes == {"cache.streaming.full": 0.75}


@pytest.mark.parametrize("contract", ["shift", "readonly"])
@pytest.mark.parametrize("routed", ["decode", "prefill"])
def test_a_tensor_that_only_some_calls_hand_on(
    contract: str, routed: str, zaya_model: Any, in_memory: Callable[..., Any]
) -> None:
    """Where experts are routed to, a shard hands on more: what is compared is of all tokens."""
    checkpoint = in_memory(zaya_model)
    recipe = zaya_recipe(
        cache={"contract": contract, "context": 64},
        layout={"kind": "per-layer", "routed": [routed]},
        tokens={"verify": 0, "prefill": 8},
    )
    planner = Planner(checkpoint, recipe)
    probe = Probe("x", tuple(range(20, 34)))  # one call of 8, and 6 more tokens
    tasks = [ProbeTask(mode, probe, (ProbePart(mode, 14),)) for mode in ("decode", "prefill")]
    results = observe(authored_engine(planner, checkpoint), planner, tasks)
    for task, seen in zip(tasks, results, strict=True):
        observed, mode = seen.whole(14), task.mode
        assert {len(rows) for rows in observed.tensors.values()} == {14}
        truths = Reference(checkpoint).run([probe.tokens], list(observed.tensors))
        scores = list(shard_scores(planner, mode, [observed], truths))
        assert {score.shard for score in scores} == {"layer-00", "layer-01"}
        assert all(score.cosine_min > 1 - 1e-5 for score in scores)


def deviation(**changes: Any) -> Deviation:
    right = {"shard": "s", "tensor": "hidden", "truth": "a.b", "mode": "decode", "probe": "text",
             "relative": 1e-5, "position": 3, "positions": 9}  # fmt: skip
    return Deviation.model_validate(right | changes)


def test_an_older_deviation() -> None:
    """It told what lay behind the first near tie of experts."""
    older = deviation(undecided=0.02, decided=3)
    assert older.model_dump() == deviation().model_dump()


@pytest.mark.parametrize(
    ("changes", "red"),
    [
        ({}, []),
        ({"relative": 0.9e-4}, []),
        ({"relative": 1.1e-4}, ["structure: hidden of s (decode)"]),
        ({"relative": 1e308}, ["structure: hidden of s (decode)"]),
        ({"relative": 1.1e-4, "mode": "prefill"}, ["structure: hidden of s (prefill)"]),
        ({"relative": 1.1e-4, "probe": "faint"}, ["structure: hidden of s (decode)"]),
        ({"relative": 0.9e-3, "tensor": "one logit"}, []),
        ({"relative": 1.1e-3, "tensor": "one logit"}, ["structure: one logit of s (decode)"]),
    ],
)
def test_structure_can_fail(changes: dict[str, Any], red: list[str]) -> None:
    checks = judge_structure([deviation(), deviation(**changes)])
    assert [check.name for check in checks if not check.passed] == red


def test_choices_that_fp16_changes_can_fail() -> None:
    right = {"mode": "decode", "positions": 8, "hidden_cosine": 1, "logit_cosine": 1, "kl": 0}
    for others, passed in ((0, True), (1, True), (2, False)):
        told = {"finite": True, "chooses": True, "other_choices": others}
        one = Rounding.model_validate(right | told)
        assert all(check.passed for check in judge_rounding("fp16", [one])) is passed


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_cosine": 0.9998, "chooses": True},
        {"logit_cosine": 0.9998},
        {"kl": 0.0021},
        {"kl": float("inf")},
    ],
)
def test_rounding_can_fail(changes: dict[str, float]) -> None:
    right = {"mode": "decode", "positions": 8, "hidden_cosine": 1, "logit_cosine": 1, "kl": 0}
    one = Rounding.model_validate(right | {"finite": True} | changes)
    for arithmetic in ("fp16", "ane"):
        checks = list(judge_rounding(arithmetic, [one]))
        assert [check.passed for check in checks].count(False) == 1
        assert {check.name.partition(":")[0] for check in checks} == {arithmetic}


CAPACITIES = {"context": 256, "capacities": [64]}


def test_every_capacity_is_judged(
    tiny_bundle: Callable[..., Bundle], tiny_checkpoint_folder: Path
) -> None:
    """Each mode crosses from one to the next, and each capacity runs in fp16. An ANE's arithmetic
    is asked where it has rules: from 256 keys on."""
    bundle = tiny_bundle(cache=CAPACITIES, layout={"kind": "single"})
    checkpoint = open_checkpoint(tiny_checkpoint_folder)
    right = run(bundle, checkpoint)
    assert right.passed, [check for check in right.checks if not check.passed]
    crossing = {one.mode for one in right.structure if one.probe == "beyond 64"}
    modes = {"decode", "verify", "prefill"}
    assert crossing == modes
    assert {(one.mode, one.capacity) for one in right.rounding} == set(product(modes, (64, 256)))
    assert {(one.mode, one.capacity) for one in right.ane} == {(mode, 256) for mode in modes}


@pytest.mark.parametrize(
    ("arithmetic", "function", "red"),
    [
        ("fp16", "verify-c64", {"(verify, at 64)"}),
        ("fp16", "decode", {"(decode, at 256)", "(decode, text, at 256)"}),
        ("ane", "verify", {"(verify, at 256)"}),
    ],
)
def test_a_function_that_an_arithmetic_spoils(
    arithmetic: str, function: str, red: set[str], tiny_bundle: Callable[..., Bundle],
    tiny_checkpoint_folder: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Each one runs in it: not the widest mode and `decode` alone, nor one capacity."""
    opens = PortableBackend.open

    def spoiled(self: PortableBackend, shard: str) -> Any:
        program = opens(self, shard)
        if self.arithmetic == arithmetic:
            call = program.call

            def changed(name: str, *given: Any) -> Any:
                lost = np.nan if name == function else 1
                return {output: lost * value for output, value in call(name, *given).items()}

            program.call = changed  # type: ignore[method-assign]
        return program

    monkeypatch.setattr(PortableBackend, "open", spoiled)
    bundle = tiny_bundle(cache=CAPACITIES, layout={"kind": "single"})
    found = run(bundle, open_checkpoint(tiny_checkpoint_folder), prompts=0)
    names = [check.name for check in found.checks if not check.passed]
    assert {name.partition(": ")[0] for name in names} == {arithmetic}
    assert {name[name.index("(") :] for name in names} == red


def test_a_zaya_of_flexible_shapes_passes(
    zaya_bundle: Callable[..., Bundle], zaya_checkpoint: Checkpoint
) -> None:
    """The published verifier of 1 to 4 tokens, with all of ZAYA in it."""
    flexible = zaya_bundle(
        tensor_layout="ct1",
        cache={"contract": "blend", "context": 64},
        tokens={"verify": 4, "prefill": 0, "shapes": "range"},
    )
    assert run(flexible, zaya_checkpoint, prompts=0).passed
