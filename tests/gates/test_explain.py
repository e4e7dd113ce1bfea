"""The sentence names the true cause."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from tests.conftest import TINY, build_model, build_tokenizer, tiny_recipe

from cetane.bundle import Bundle
from cetane.checkpoint import Checkpoint, open_checkpoint
from cetane.errors import CetaneError
from cetane.gates.explain import Cause, Explanation, explain, explain_ladder
from cetane.gates.explain.golden import beyond_fp16, lost_products
from cetane.gates.explain.graph import erring, first_off
from cetane.gates.explain.mends import better_format
from cetane.gates.golden import Proof, golden
from cetane.gates.golden_result import GoldenResult, Range
from cetane.gates.reference import Reference
from cetane.gates.rounding import Rounding, judge_rounding
from cetane.mil import MilFunction, Op, load
from cetane.mil.program import Program, StoredConstant
from cetane.pipeline.build import build
from cetane.planner import Planner
from cetane.schema.recipe import Mode, parse_recipe

from .broken import BROKEN, Broken, converting_with, write_one_slot_off
from .mutations.families import build as model_of
from .mutations.families import recipe, tokenizer_of
from .mutations.ports import AuthoredPort, TinyCheckpoint
from .test_ladder import climb
from .test_mutations import model


def told(bundle: Bundle, checkpoint: Checkpoint) -> Explanation | None:
    return explain(bundle, checkpoint, golden(bundle, checkpoint, lambda *_: None, prompts=0))


def test_wrong_weights(bad: Bundle, checkpoint: Checkpoint) -> None:
    explanation = told(bad, checkpoint)
    assert explanation is not None
    assert explanation.cause == "weights"
    assert "model.layers.1.mlp.down_proj.weight" in explanation.sentence


def rounding(mode: Mode, hidden: float, logits: float, kl: float) -> Rounding:
    return Rounding(mode=mode, positions=8, hidden_cosine=hidden, logit_cosine=logits, kl=kl,
                    finite=True)  # fmt: skip


def test_the_mode_that_failed() -> None:
    """Hidden states are not judged: another mode's may be worse."""
    ane = rounding("prefill", 0.9, 1, 1e-5), rounding("decode", 0.95, 0.98, 0.04)
    verdict = GoldenResult(
        passed=False, fingerprint="", checks=tuple(judge_rounding("ane", ane)), shards=(),
        logits=(), ranges=(), warnings=(), greedy=(), probes={}, greedy_tokens=0, ane=ane,
    )  # fmt: skip
    explanation = lost_products(verdict, tiny_recipe())
    assert explanation.where == "the decode functions"
    assert "KL 0.04" in explanation.sentence
    (page,) = re.findall(r"\S+\.md", explanation.sentence)
    assert Path(page).is_file()  # also from a wheel, and in any folder


@pytest.mark.parametrize("arithmetic", ["fp16", "ane"])
@pytest.mark.parametrize(
    ("share", "says"),
    [
        ({"other_experts": 0.5}, "changes the choice of experts in 50% of all cases (decode)"),
        ({"other_far": 0.3, "other_experts": 0.0}, "changes which experts are far in 30%"),
    ],
)
def test_experts_that_rounding_chooses(
    arithmetic: Literal["fp16", "ane"], share: dict[str, float], says: str
) -> None:
    """Products of attention are not blamed, nor a model that magnifies rounding."""
    rows = (rounding("decode", 0.99, 0.99, 0.04).model_copy(update=share),)
    verdict = GoldenResult(
        passed=False, fingerprint="", checks=tuple(judge_rounding(arithmetic, rows)), shards=(),
        logits=(), ranges=(Range(block="layer-02", largest=3),), warnings=(), greedy=(),
        probes={}, greedy_tokens=0, rounding=rows, ane=rows,
    )  # fmt: skip
    if arithmetic == "ane":
        why = lost_products(verdict, tiny_recipe())
    else:
        planner = Planner(TinyCheckpoint(model_of("phimoe"), tokenizer_of()), recipe("fp16"))
        why = beyond_fp16(verdict, planner, lambda: pytest.fail("no model runs"))
    assert why.cause == "experts" and says in why.sentence


@pytest.mark.parametrize(
    ("family", "says"),
    [("qwen3_5", "the model itself magnifies"), ("llama", "an op inside loses too many digits")],
)
def test_digits_that_are_lost(family: str, says: str) -> None:
    """A token of these has a query nearly at a right angle to its keys: the delta rule's answer
    is what little is left, and a norm makes it large."""
    checkpoint = TinyCheckpoint(model_of(family), tokenizer_of())
    rows = (rounding("decode", 0.9990, 0.9991, 7e-4),)
    verdict = GoldenResult(
        passed=False, fingerprint="", checks=tuple(judge_rounding("fp16", rows)), shards=(),
        logits=(), ranges=(Range(block="layer-02", largest=3),), warnings=(), greedy=(),
        probes={"start, decode": (82, 69, 221, 70, 79, 76, 68, 275)}, greedy_tokens=0,
        rounding=rows,
    )  # fmt: skip
    planner = Planner(checkpoint, recipe("fp16"))
    why = beyond_fp16(verdict, planner, lambda: Reference(checkpoint))
    assert why.cause == "fp16 range" and not why.changes
    assert says in why.sentence


@pytest.mark.parametrize(("form", "passed"), [("int8", False), ("fp16", True)])
def test_caches_of_8_bits_that_cost_too_much(form: str, passed: bool, tmp_path: Path) -> None:
    """One large channel of all keys takes the steps of the others. That is no loss by fp16."""
    skewed = build_model("qwen2", initializer_range=0.3)
    with torch.no_grad():
        for layer in skewed.model.layers:
            bias = layer.self_attn.k_proj.bias.view(TINY["num_key_value_heads"], -1)
            bias[:, TINY["head_dim"] // 2 - 1] = 25
    skewed.save_pretrained(tmp_path / "model")
    build_tokenizer().save_pretrained(tmp_path / "model")
    checkpoint = open_checkpoint(tmp_path / "model")
    content = {
        "name": "skewed",
        "quality": "near-lossless",
        "layout": {"kind": "single"},
        "cache": {"context": 64, "format": form},
        "tokens": {"prefill": 8, "verify": 0},
        "target": {"deployment": "iOS26"},
    }
    bundle = build(checkpoint, parse_recipe(content, ""), tmp_path / "bundle", lambda *_: None)
    verdict = golden(bundle, checkpoint, lambda *_: None, prompts=0)
    red = {check.name.partition(",")[0] for check in verdict.checks if not check.passed}
    assert red == (set() if passed else {"compression"})
    why = explain(bundle, checkpoint, verdict)
    if passed:
        assert why is None
    else:
        assert why is not None and "caches of 8 bits" in why.sentence
        assert why.changes == {"cache.format": "fp16"}


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.name)
def test_the_cause(broken: Broken, asked: Callable[..., None]) -> None:
    """Of ports of authored modules, which need no conversion; on little text."""
    asked("evidence", positions=48, most=48)
    checkpoint, reference = model(broken.family)
    with broken.at_work():
        port = AuthoredPort(checkpoint, recipe(broken.form, **broken.recipe))
        broken.change(port)
        proof = Proof(port, checkpoint, reference, port.tables, lambda *_: None)  # type: ignore[arg-type]
        explanation = explain(port, checkpoint, proof.run(prompts=0, greedy_tokens=0))  # type: ignore[arg-type]
    assert explanation is not None
    assert explanation.cause == broken.cause, explanation.sentence
    assert broken.says in explanation.sentence
    assert explanation.recipe_change == broken.mends


def round_epsilons_up(patch: pytest.MonkeyPatch) -> None:
    """Conversion takes an epsilon of 1 for each smaller one."""
    patch.setattr("cetane.lower.frontend.SMALLEST_FP16", 1.0)


@pytest.mark.parametrize(
    ("bug", "options", "cause", "says", "mends"),
    [
        (write_one_slot_off, {"contract": "blend"}, "contract", "of decode, prefill is wrong",
         '[cache]\ncontract = "readonly"'),
        (round_epsilons_up, {}, "conversion", "Make a bundle with cetane build", None),
    ],
)  # fmt: skip
def test_the_cause_of_wrong_first_shards(
    bug: Callable[[pytest.MonkeyPatch], None],
    options: dict[str, Any],
    cause: Cause,
    says: str,
    mends: str | None,
    checkpoint: Checkpoint,
    tmp_path: Path,
) -> None:
    """Of packages with the graph of a mistake in cetane."""
    wanted = tiny_recipe(verify=None, layout={"kind": "chunks", "chunks": 1}, **options)
    with converting_with(bug, tmp_path / "cache"):
        bundle = build(checkpoint, wanted, tmp_path / "bundle", lambda *_: None)
        found = climb(bundle, checkpoint)
        explanation = explain_ladder(found, checkpoint, wanted)
    assert explanation.cause == cause, explanation.sentence
    assert says in explanation.sentence
    assert explanation.where.startswith("chunk-00, after model.layers.")
    assert explanation.recipe_change == mends


def test_first_shards_of_another_model(departed: Bundle, zaya_checkpoint: Checkpoint) -> None:
    """The authored modules depart from the model, as the recipe says."""
    found = climb(departed, zaya_checkpoint)
    explanation = explain_ladder(found, zaya_checkpoint, departed.plan.recipe)
    assert explanation.cause == "authoring", explanation.sentence
    assert explanation.recipe_change == "[family]\ndepartures = []"


@pytest.mark.parametrize(
    ("form", "advised"),
    [
        ("palette1-kmeans-per-tensor", "int8-per-channel"),
        ("palette6-kmeans-per-tensor", "int8-per-channel"),
        ("int8-per-channel", "fp16"),
    ],
)
def test_the_advice_fits_the_model(form: str, advised: str) -> None:
    """Outputs of 40 and 88 channels are no groups of 32."""
    sizes = {"hidden_size": 40, "intermediate_size": 88, "num_attention_heads": 5, "head_dim": 8}
    narrow = build_model("qwen3", num_key_value_heads=5, **sizes)
    checkpoint = TinyCheckpoint(narrow, tokenizer_of())
    planner = Planner(checkpoint, recipe(form))
    assert better_format(form, planner) == advised
    Planner(checkpoint, recipe(advised))
    with pytest.raises(CetaneError, match="cannot divide its 40 output channels"):
        Planner(checkpoint, recipe("palette6-kmeans-group32"))


def without_angles(function: MilFunction) -> MilFunction:
    """The function with cosines in place of sines."""
    names = {name: name.replace("sin", "cos") for name in function.inputs if "sin" in name}
    ops = tuple(
        replace(op, inputs={k: tuple(names.get(a, a) for a in v) for k, v in op.inputs.items()})  # type: ignore[arg-type]
        for op in function.ops
    )
    return replace(function, body=replace(function.body, ops=ops))


def with_larger_weight(function: MilFunction) -> MilFunction:
    """The function with a weight of its own."""

    def changed(op: Op) -> Op:
        held = op.inputs.get("val", ("",))[0]
        if not (isinstance(held, StoredConstant) and op.name.endswith("q_proj_weight")):
            return op
        own = StoredConstant(held.type, lambda: held.numpy() * np.float16(1.01))
        return replace(op, inputs=op.inputs | {"val": (own,)})

    ops = tuple(map(changed, function.ops))
    return replace(function, body=replace(function.body, ops=ops))


def test_one_function_of_one_capacity(
    checkpoint: Checkpoint,
    tiny_bundle: Callable[..., Bundle],
    asked: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its capacity is named, and so is a function that holds a weight of its own."""
    asked("evidence", positions=48, most=48)
    cache = {"contract": "stateful", "context": 64, "capacities": [32]}
    bundle = tiny_bundle(cache=cache, layout={"kind": "single"}, verify=None, prefill=None)

    def judged(change: Callable[[MilFunction], MilFunction]) -> GoldenResult:
        def loaded(path: Path) -> Program:
            program = load(path)
            own = {"decode-c32": change(program.functions["decode-c32"])}
            return replace(program, functions={**program.functions, **own})

        for module in ("engine.portable", "gates.twin", "gates.port"):
            monkeypatch.setattr(f"cetane.{module}.load", loaded)
        return golden(bundle, checkpoint, lambda *_: None, prompts=0)

    first = first_off(judged(without_angles).structure)
    assert first is not None
    assert "after lm_head (decode at 32, text, position " in erring(first)
    explanation = explain(bundle, checkpoint, judged(with_larger_weight))
    assert explanation is not None
    assert "differs from the checkpoint: in decode-c32, " in explanation.sentence
