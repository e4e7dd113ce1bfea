"""Gemma through the commands that everything goes through."""

from pathlib import Path

from tests.cli.conftest import Cetane
from tests.conftest import build_tokenizer
from tests.families.gemma_models import FULL, SLIDING, build_gemma3

RECIPE = """
[layout]
kind = "chunks"
chunks = 1
head = "last"
[cache]
contract = "blend"
sliding = "shift"
context = 64
[tokens]
verify = 0
prefill = 8
"""


def test_port_and_run(cetane: Cetane, tmp_path: Path) -> None:
    model = build_gemma3(num_hidden_layers=2, layer_types=[SLIDING, FULL], vocab_size=288)
    model.save_pretrained(tmp_path / "gemma")
    build_tokenizer().save_pretrained(tmp_path / "gemma")
    (tmp_path / "small.toml").write_text(RECIPE)
    bundle = tmp_path / "bundle"
    ported = cetane(
        "port", tmp_path / "gemma", "-r", tmp_path / "small.toml", "-o", bundle, "--json"
    )
    gates = ported.json["gates"]
    failed = [check for check in gates["golden"]["checks"] if not check["passed"]]
    assert not failed
    assert ported.code == 0
    assert gates["ladder"]["passed"]
    assert gates["golden"]["passed"]
    shown = cetane("info", bundle, "--json").json
    assert shown["manifest"]["plan"]["caches"]["sliding"] == {
        "contract": "shift", "count": 32, "limited": True, "sinks": 0,
    }  # fmt: skip
    said = cetane("run", bundle, "a fuel", "--max-new", "4")
    assert said.code == 0, said.err
    refused = cetane("export", bundle, "-o", tmp_path / "out", "--to", "coreml-llm")
    assert "is for Gemma 4" in refused.error


def test_a_folder_of_another_runtime(cetane: Cetane, tmp_path: Path) -> None:
    (tmp_path / "model_config.json").write_text("{}")
    said = cetane("validate", tmp_path, "--json")
    assert said.code == 1
    assert said.json["problems"] == ["model_config.json: KeyError('context_length')"]
    assert "context_length" in cetane("validate", tmp_path).err
