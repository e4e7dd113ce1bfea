"""Names of models, from the places that they were opened at."""

from pathlib import Path

import pytest

from cetane.checkpoint.names import model_name


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("HuggingFaceTB/SmolLM2-135M", "HuggingFaceTB/SmolLM2-135M"),
        ("/weights/model.Q4_1.gguf", "model.Q4_1"),
        ("model.safetensors", "model"),
        ("../zaya-tiny/", "zaya-tiny"),
    ],
)
def test_a_models_name(source: str, name: str) -> None:
    assert model_name(source) == name


def test_a_folder_that_looks_like_an_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org/model").mkdir(parents=True)
    assert model_name("org/model") == "model"


def test_an_id_in_the_config() -> None:
    assert model_name("/weights/x", {"_name_or_path": "org/model"}) == "org/model"
    assert model_name("/weights/x", {"_name_or_path": "/a/path/to"}) == "x"
