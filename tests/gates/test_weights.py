"""The host's tables are judged bit for bit: what their format makes of the checkpoint's rows. So is
the tokenizer."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.conftest import InMemoryCheckpoint
from tests.families.test_mixtral import MODELS, build
from tests.families.test_qwen3_next import MODELS as DELTAS
from tests.families.zaya_models import recipe

from cetane.bundle import Bundle
from cetane.checkpoint import Checkpoint, Tokenizer, open_checkpoint
from cetane.compress import parse_format
from cetane.compress.encoded import Half
from cetane.gates.golden import golden
from cetane.gates.weights import (
    BLOCK,
    MOST_BLOCK_ERROR,
    arrays,
    times_best,
    too_far,
    unlike,
    unused_parameters,
    wrong_palette,
    wrong_tables,
    wrong_tokenizer,
)  # fmt: skip
from cetane.planner import Planner


@pytest.fixture(params=["fp16", "int8", "int4"])
def bundle(tiny_bundle: Callable[..., Bundle], request: pytest.FixtureRequest) -> Bundle:
    return tiny_bundle(embedding={"format": request.param}, verify=None, prefill=None)


def test_a_build_is_right(bundle: Bundle, checkpoint: Checkpoint) -> None:
    verdict = golden(bundle, checkpoint, lambda *_: None, prompts=0)
    assert not verdict.wrong_weights
    assert [check.passed for check in verdict.checks if check.name.startswith("weights")] == [
        True, True
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["qwen2_moe", "qwen3_next", "qwen3_5_moe_text"])
def test_a_gate_of_no_shared_experts_is_not_missed(kind: str) -> None:
    """A gate that no program uses is missed where the shared experts have channels."""
    own = build(
        kind,
        **(DELTAS | {"qwen2_moe": MODELS["qwen2_moe"][1]})[kind]
        | {"shared_expert_intermediate_size": 0},
    )
    planner = Planner(InMemoryCheckpoint(own), recipe())  # type: ignore[arg-type]
    shapes = {name: tuple(tensor.shape) for name, tensor in own.named_parameters()}
    gates = [name for name in shapes if name.endswith("shared_expert_gate.weight")]
    assert gates
    assert [*unused_parameters(planner, shapes)] == []
    filled = {name: shape if 0 not in shape else (8, 64) for name, shape in shapes.items()}
    problems = [*unused_parameters(planner, filled)]
    assert all(f"{name}: 0 of 64 elements are used" in problems for name in gates)


def test_one_bit(bundle: Bundle, checkpoint: Checkpoint, tmp_path: Path) -> None:
    """Of a code, or of a scale: no other row will do."""
    for name in sorted(bundle.manifest.files):
        if not name.startswith("embedding"):
            continue
        folder = tmp_path / name
        shutil.copytree(bundle.path, folder)
        array = np.load(folder / name)
        array.view(np.uint8).reshape(-1)[-1] ^= 16
        np.save(folder / name, array)
        changed = Bundle(folder).tables()
        problems = list(wrong_tables(Planner(checkpoint, bundle.plan.recipe), checkpoint, changed))
        assert [problem.label for problem in problems] == ["embedding tokens"]


def swap_two_tokens(content: Any) -> None:
    """A tokenizer of as many tokens, two of which have each other's ids."""
    ids = content["model"]["vocab"]
    first, second = sorted(ids)[100:102]
    ids[first], ids[second] = ids[second], ids[first]


@pytest.mark.parametrize(
    ("file", "change", "label"),
    [
        ("tokenizer.json", swap_two_tokens, "vocabulary"),
        ("tokenizer.json", lambda made: made.update(normalizer={"type": "NFC"}), "vocabulary"),
        ("tokenizer_config.json", lambda made: made.update(bos_token="a"), "special tokens"),
        ("tokenizer_config.json", lambda made: made.update(image_token="a"), "special tokens"),
        (
            "tokenizer_config.json",
            lambda made: made.update(split_special_tokens=True),
            "splitting of special tokens",
        ),
        ("generation_config.json", lambda made: made.update(eos_token_id=[5]), "stop tokens"),
        ("chat_template.jinja", None, "chat template"),
        ("additional_chat_templates/tool_use.jinja", None, "tool template"),
    ],
)
def test_another_tokenizer(
    file: str,
    change: Callable[[Any], None] | None,
    label: str,
    tiny_checkpoint_folder: Path,
    tmp_path: Path,
) -> None:
    model = replace(open_checkpoint(tiny_checkpoint_folder).tokenizer, tool_template="tools")
    model.save(tmp_path)
    assert not list(wrong_tokenizer(Tokenizer.load(tmp_path), model))
    path = tmp_path / file
    if change is None:
        path.write_text("other")
    else:
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))
    assert label in [wrong.label for wrong in wrong_tokenizer(Tokenizer.load(tmp_path), model)]


WEIGHT = np.random.default_rng(4).normal(size=(32, 24)).astype(np.float16)


@pytest.mark.parametrize(
    ("made_as", "change", "problem"),
    [
        ("palette4-kmeans-group8", None, None),
        ("palette4-kmeans-per-tensor", None, "shapes"),
        ("palette6-kmeans-group8", None, "shapes"),
        ("palette4-kmeans-group8", np.nan, "times what they need to"),
        ("palette4-kmeans-group8", 2.0, "nearest entry"),
    ],
)
def test_palettes_without_their_sensitivities(
    made_as: str, change: float | None, problem: str | None
) -> None:
    made = parse_format(made_as).encode(WEIGHT)
    lut = made.lut if change is None else made.lut * np.float16(change)
    parts = {"indices": made.indices, "lut": lut}
    found = wrong_palette(parts, WEIGHT, parse_format("palette4-weighted-group8"))
    assert found is None if problem is None else problem in str(found)


def test_a_palette_of_zeros_among_others() -> None:
    """Its zeros are the nearest that it has, and hide among the errors of three right palettes."""
    made = parse_format("palette2-kmeans-group8").encode(WEIGHT)
    lut = made.lut.copy()
    lut[2] = 0
    found = wrong_palette({"indices": made.indices, "lut": lut}, WEIGHT,
                          parse_format("palette2-weighted-group8"))  # fmt: skip
    assert "channel 16 " in str(found)


MATRIX = np.random.default_rng(5).normal(size=(64, 96)).astype(np.float32)
SWAPPED = [*range(8), 16, *range(9, 16), 8, *range(17, 64)]
WRONG: dict[str, Callable[[Half], Half]] = {
    "all too large": lambda made: made * np.float16(1.15),
    "one channel too large": lambda made: np.concatenate([made[:8], made[8:9] * 2, made[9:]]),
    "one channel of zeros": lambda made: np.concatenate([made[:8], made[8:9] * 0, made[9:]]),
    "two channels changed places": lambda made: made[SWAPPED],
    "another sign": lambda made: -made,
    "not a number": lambda made: made * np.float16("nan"),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("name", ["palette4-kmeans-group8", "int4-per-channel"])
def test_fitted_constants_without_their_file(name: str, wrong: str) -> None:
    """They are not the nearest, and near enough. A wrong channel does not hide among right ones."""
    form = parse_format(name)
    fitted = form.encode(MATRIX + np.random.default_rng(6).normal(size=MATRIX.shape) * 0.06)
    assert too_far(arrays(fitted), MATRIX, form) is None
    times = times_best(fitted.decode(), form.encode(MATRIX).decode(), MATRIX, BLOCK)
    assert times.min() > 1
    changed = times_best(WRONG[wrong](fitted.decode()), form.encode(MATRIX).decode(), MATRIX, BLOCK)
    assert not (changed <= MOST_BLOCK_ERROR).all()


SIGNS = np.random.default_rng(7).integers(-1, 2, MATRIX.shape).astype(np.float32)
STEP = np.abs(MATRIX).max(1, keepdims=True).astype(np.float16).astype(np.float32) / 7
EXACT: dict[str, tuple[str, np.ndarray]] = {
    "all weights equal": ("palette4-kmeans-group8", np.full_like(MATRIX, 0.1)),
    "a scale and signs": ("palette2-kmeans-group8", SIGNS * np.float32(0.0123)),
    "a scale for each channel": ("int4-per-channel", SIGNS * STEP * np.float32(1.0001)),
    "already four bits": ("int4-per-channel", (MATRIX / STEP).round() * STEP),
    "eight equal channels": (
        "palette4-kmeans-group8", np.concatenate([MATRIX[:8], 0 * MATRIX[:8] + 0.3, MATRIX[16:]]),
    ),
    "a turned outlier": ("palette4-kmeans-group8", MATRIX + 300 * SIGNS[:1] * (SIGNS[:, :1] == 1)),
}  # fmt: skip
"""Weights that a format makes nearly exactly: what is left is one entry's or one scale's fp16."""


@pytest.mark.parametrize("kind", EXACT)
def test_a_formats_own_rounding_is_never_too_far(kind: str) -> None:
    """Wrong constants are, by any of the plants: they err far more than fp16 does."""
    name, values = EXACT[kind]
    form = parse_format(name)
    plain = form.encode(values)
    assert too_far(arrays(plain), values, form) is None
    part = "scale" if "int4" in name else "lut"
    right = arrays(plain)
    for factor in (0.5, 0.9, 1.05, 1.15, 2.0, -1.0):
        assert too_far(right | {part: right[part] * np.float16(factor)}, values, form)
    codes = next(key for key in right if key in ("indices", "data"))
    other = arrays(form.encode(MATRIX[::-1].copy()))
    wrong = [other, right | {part: np.zeros_like(right[part])}]
    if kind != "all weights equal":  # any two of their channels are the same
        wrong.append(right | {codes: right[codes][SWAPPED]})
    assert all(too_far(parts, values, form) for parts in wrong)


@pytest.mark.parametrize("wrong", ["one channel too large", "two channels changed places"])
def test_large_equal_channels_hide_no_wrong_one(wrong: str) -> None:
    """The part along the weights that their fp16 leaves is larger than all weights beside them."""
    values = np.concatenate([MATRIX[:9], 0 * MATRIX[:7] + 30.007, MATRIX[16:]])
    form = parse_format("int4-per-channel")
    right = form.encode(values)
    assert too_far(arrays(right), values, form) is None
    changed = WRONG[wrong](right.decode())
    assert times_best(changed, right.decode(), values, BLOCK)[1] > MOST_BLOCK_ERROR


@pytest.mark.parametrize("wrong", ["one channel of zeros", "two channels changed places"])
def test_a_wrong_channel_of_two_bits(wrong: str) -> None:
    """Its error hides among those of the channels beside it. Its direction does not."""
    form = parse_format("palette2-kmeans-group8")
    fitted = form.encode(MATRIX + np.random.default_rng(6).normal(size=MATRIX.shape) * 0.6)
    assert too_far(arrays(fitted), MATRIX, form) is None
    changed = WRONG[wrong](fitted.decode())
    plain = form.encode(MATRIX).decode()
    assert (times_best(changed, plain, MATRIX, BLOCK) <= MOST_BLOCK_ERROR).all()
    assert "channel 8 " in str(unlike(changed, plain, MATRIX))


def test_a_channel_that_no_palette_serves() -> None:
    """It is small beside the others of its group, so even plain palettes turn it."""
    small = np.concatenate([MATRIX[:8], MATRIX[8:9] * 0.01, MATRIX[9:]])
    form = parse_format("palette2-kmeans-group8")
    assert too_far(arrays(form.encode(small)), small, form) is None
    small[8] = 0
    assert too_far(arrays(form.encode(small)), small, form) is None
