"""The folder for CoreML-LLM: driven as its Swift runtime does, by hand, it is the model."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.conftest import build_tokenizer
from tests.families.gemma_models import build_gemma3, build_gemma4, recipe
from tests.families.parity import tokens
from tests.lower.test_parity import half_logits_of

from cetane.checkpoint import open_checkpoint
from cetane.engine.portable import ReferenceProgram
from cetane.errors import CetaneError
from cetane.export.coreml_llm import ContractPlanner, check, export, packages
from cetane.mil import load

CONTEXT, WINDOW, LENGTH = 64, 32, 40
LAYOUT = {"kind": "chunks", "cuts": [2, 4], "head": "last"}


class Made:
    """What `export` takes of a bundle."""

    def __init__(self, **options: Any) -> None:
        self.plan = type("Plan", (), {"recipe": recipe(**options)})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("coreml-llm")
    build_gemma4().save_pretrained(root / "checkpoint")
    build_tokenizer().save_pretrained(root / "checkpoint")
    made = Made(
        contract="blend", sliding="shift", layout=LAYOUT, tokens={"verify": 0, "prefill": 0}
    )
    export(made, open_checkpoint(root / "checkpoint"), root / "out", lambda *_: None)
    return root / "out"


def dequantized(folder: Path, name: str, token: int, width: int, factor: float) -> np.ndarray:
    values = np.fromfile(folder / f"{name}_q8.bin", np.int8).reshape(-1, width)[token]
    scale = np.fromfile(folder / f"{name}_scales.bin", np.float16)[token]
    return values.astype(np.float32) * (np.float32(scale) / 127) * factor


def decode(folder: Path, ids: list[int]) -> list[int]:
    """The greedy choice after every token, by the rules of ChunkedEngine.swift."""
    config = json.loads((folder / "model_config.json").read_text())
    names = ("chunk1", "chunk2_3way", "chunk3_3way")
    chunks = {n: load(folder / f"{n}.mlpackage").functions["main"] for n in names}
    programs = {n: ReferenceProgram(load(folder / f"{n}.mlpackage"), "fp32") for n in names}
    rows = {
        n: np.load(folder / f"{n}.npy")
        for n in ("cos_sliding", "sin_sliding", "cos_full", "sin_full")
    }
    caches = {
        (chunk, name): np.zeros(tuple(kind.shape), np.float32)
        for chunk, function in chunks.items()
        for name, kind in function.inputs.items()
        if name.startswith(("K_", "V_"))
    }
    states = {chunk: program.make_state("main") for chunk, program in programs.items()}
    chosen = []
    for position, token in enumerate(ids):
        full = np.where(np.arange(CONTEXT) <= position, 0, -4e4)
        sliding = np.where(np.arange(WINDOW) >= WINDOW - min(position + 1, WINDOW), 0, -4e4)
        width = config["num_layers"] * config["per_layer_dim"]
        flow = {
            "hidden_states": dequantized(
                folder, "embed_tokens", token, config["hidden_size"], config["embed_scale"]
            ),
            "per_layer_raw": dequantized(
                folder, "embed_tokens_per_layer", token, width, config["per_layer_embed_scale"]
            ),
            "causal_mask_full": full,
            "causal_mask_sliding": sliding,
            "update_mask": np.arange(CONTEXT) == position,
            "cos_s": rows["cos_sliding"][position],
            "sin_s": rows["sin_sliding"][position],
            "cos_f": rows["cos_full"][position],
            "sin_f": rows["sin_full"][position],
        }
        for chunk, function in chunks.items():
            inputs = {
                name: caches[chunk, name]
                if (chunk, name) in caches
                else np.asarray(flow[name], np.float32).reshape(tuple(kind.shape))
                for name, kind in function.inputs.items()
            }
            outputs = programs[chunk].call("main", inputs, states[chunk])
            for name, value in outputs.items():
                if name.startswith(("K_", "V_")):
                    caches[chunk, name.replace("_out", "_in")] = value
            flow |= {n: v for n, v in outputs.items() if n.startswith("kv1")}
            flow["hidden_states"] = outputs["hidden_states_out"]
            if "per_layer_combined_out" in outputs:
                flow["per_layer_combined"] = outputs["per_layer_combined_out"]
        chosen.append(int(outputs["token_id"].reshape(-1)[0]))
    return chosen


def test_driven_as_their_runtime_does(folder: Path) -> None:
    ids = tokens(288, LENGTH)
    model = build_gemma4()
    logits = half_logits_of(model, ids)
    found = decode(folder, ids)
    top = np.sort(logits, 1)
    clear = top[:, -1] - top[:, -2] > 0.1  # int8 embeddings move what is nearly equal
    assert clear.sum() > LENGTH // 2
    assert (np.array(found) == logits.argmax(1))[clear].all()


def test_the_contract_is_kept(folder: Path) -> None:
    assert check(folder) == []


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda f: (f / "cos_full.npy").unlink(), "cos_full.npy"),
        (lambda f: np.save(f / "cos_full.npy", np.zeros((64, 32), np.float16)), "of \\(64, 32\\)"),
        (lambda f: (f / "embed_tokens_q8.bin").write_bytes(b"x"), "has 1 bytes"),
        (lambda f: shutil.rmtree(f / "chunk1.mlpackage"), "chunk1"),
        (lambda f: edit(f, context_length=128), "causal_mask_full of shape"),
        (lambda f: edit(f, vocab_size=None), "vocab_size = None"),
        (lambda f: (f / "model_config.json").write_text("{"), "model_config.json"),
        (lambda f: (f / "hf_model" / "tokenizer.json").unlink(), "tokenizer.json is missing"),
    ],
)
def test_a_damaged_folder(folder: Path, tmp_path: Path, damage: Any, problem: str) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    damage(copy)
    problems = check(copy)
    assert any(re.search(problem, found) for found in problems), problems


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "model_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"contract": "readonly"}, "full layers have blend caches"),
        ({"contract": "blend"}, "sliding layers have shift caches"),
        (
            {"contract": "blend", "sliding": "shift", "layout": {"kind": "single"}},
            "3 or 4 packages",
        ),
        ({"contract": "blend", "sliding": "shift", "windowed": False}, "keep a window"),
    ],
)
def test_bundles_that_their_runtime_cannot_load(folder: Path, options: Any, message: str) -> None:
    checkpoint = open_checkpoint(folder.parent / "checkpoint")
    wanted = recipe(**({"layout": LAYOUT} | options))
    with pytest.raises(CetaneError, match=message):
        packages(ContractPlanner(checkpoint, wanted))


def test_other_models(tmp_path: Path) -> None:
    build_gemma3().save_pretrained(tmp_path)
    with pytest.raises(CetaneError, match="is for Gemma 4"):
        packages(ContractPlanner(open_checkpoint(tmp_path), recipe(layout={"kind": "single"})))
