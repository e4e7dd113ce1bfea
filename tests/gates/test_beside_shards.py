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

from cetane.bundle import Bundle
from cetane.checkpoint import Checkpoint, Tokenizer, open_checkpoint
from cetane.gates.beside_shards import wrong_tables, wrong_tokenizer
from cetane.gates.golden import golden
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
