"""Folders for CoreML-LLM are played and compared: a wrong lowering is red, a right one is green."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.conftest import build_tokenizer
from tests.export.app_models import (
    FOUR,
    MODEL,
    app_recipe,
    authored_folder,
    committed,  # noqa: F401
)
from tests.families.gemma_models import build_gemma4
from torch import Tensor

from cetane.bundle import Bundle
from cetane.checkpoint import open_checkpoint
from cetane.export import coreml_llm
from cetane.export.coreml_llm.adapter import Adapter
from cetane.export.coreml_llm.app_folder import read_folder
from cetane.files import silent
from cetane.gates.coreml_llm import judge_folder, table_checks
from cetane.gates.verdict import Check, at_most
from cetane.pipeline.build import build
from cetane.pipeline.export import export_runtime
from cetane.pipeline.runtime_folder import JUDGES, RuntimeFolder
from cetane.schema.interface import MASKED

OWN = Adapter.mask


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Gemma 4, whose window of 32 tokens is half of the context; it verifies three tokens."""
    root = tmp_path_factory.mktemp("coreml-llm")
    torch.manual_seed(0)
    build_gemma4(**MODEL).save_pretrained(root / "checkpoint")
    build_tokenizer().save_pretrained(root / "checkpoint")
    return build(open_checkpoint(root / "checkpoint"), app_recipe(), root / "bundle", silent)


@pytest.fixture(scope="module")
def exported(bundle: Bundle) -> RuntimeFolder:
    return export_runtime(bundle.path, bundle.path.with_name("folder"), "coreml-llm")


def red(checks: Sequence[Check]) -> set[int]:
    """The lengths of the prompts after which a folder is wrong."""
    wrong = [check.name.partition(":")[0] for check in checks if not check.passed]
    return {int(name.split()[-1]) for name in wrong}


def test_a_right_folder(exported: RuntimeFolder) -> None:
    assert exported.passed and not exported.unjudged
    assert len(exported.checks) == 16


@pytest.mark.parametrize(
    ("file", "form", "red"),
    [
        ("sin_full.npy", None, "sin_full.npy: not the bundle's"),
        ("embed_tokens_q8.bin", np.int8, "embed_tokens_q8.bin or its scales: not the model's"),
        ("embed_tokens_per_layer_scales.bin", np.float16,
         "embed_tokens_per_layer_q8.bin or its scales: not the model's"),
        ("per_layer_projection.bin", np.float16, "per_layer_projection.bin: not the model's"),
        ("per_layer_norm_weight.bin", np.float16, "per_layer_norm_weight.bin: not the model's"),
    ],
)  # fmt: skip
def test_tables(
    file: str, form: Any, red: str, bundle: Bundle, exported: RuntimeFolder, tmp_path: Path
) -> None:
    """One wrong number that no play needs to read."""
    folder = shutil.copytree(exported.path, tmp_path / "folder")
    if form is None:
        values = np.load(folder / file)
        values[bundle.plan.recipe.cache.context - 1, -1] += 1
        np.save(folder / file, values)
    else:
        values = np.fromfile(folder / file, form)
        values[-1] += 1
        values.tofile(folder / file)
    checkpoint = open_checkpoint(bundle.path.with_name("checkpoint"))
    checks = table_checks(bundle, checkpoint, folder)
    assert [check.name for check in checks if not check.passed] == [red]


def without_window(adapter: Adapter, given: Tensor) -> Tensor:
    return given if adapter.mode == "prefill" else OWN(adapter, given)


def forgetting_nothing(adapter: Adapter, given: Tensor) -> Tensor:
    made = OWN(adapter, given)
    if adapter.mode == "verify":
        made[:, :, :, : -adapter.function.tokens] = made[:, :, :1, : -adapter.function.tokens]
    return made


def hiding_a_draft(adapter: Adapter, given: Tensor) -> Tensor:
    made = OWN(adapter, given)
    if adapter.mode == "verify":
        made[:, :, 1:, -adapter.function.tokens] = MASKED
    return made


@pytest.mark.parametrize(
    ("mask", "lengths"),
    [
        (OWN, set()),
        (without_window, {40}),
        (forgetting_nothing, {31, 40}),
        (hiding_a_draft, {0, 1, 31, 40}),
    ],
)
def test_masks(
    mask: Any, lengths: set[int], bundle: Bundle, exported: RuntimeFolder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Wrong ones keep the contract, and only numbers show them."""
    monkeypatch.setattr(Adapter, "mask", mask)
    checkpoint = open_checkpoint(bundle.path.with_name("checkpoint"))
    folder = replace(read_folder(exported.path), call=authored_folder({"layout": FOUR}).call)
    checks, _ = judge_folder(bundle, checkpoint, folder, silent)
    assert red(checks) == lengths


def test_a_wrong_folder(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not count as one of the bundle's."""
    wrong = [at_most("tokens 0 to 1 after a prefill of 0: other tokens", 2, 1)]
    monkeypatch.setitem(JUDGES, "coreml-llm", lambda *_: (wrong, []))
    monkeypatch.setattr(coreml_llm, "export", lambda _, __, folder, ___: folder.mkdir())
    monkeypatch.setattr(coreml_llm, "check", lambda _: [])
    made = export_runtime(bundle.path, bundle.path.with_name("wrong"), "coreml-llm")
    assert not made.passed and not (made.path / "cetane.json").exists()
