"""Sensitivities in files, and in recipes that name them."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from cetane.compress import Selection, Sensitivities, SensitivityFile
from cetane.errors import CetaneError
from cetane.schema.recipe import load_recipe

INPUTS = {"a.weight": np.array([1, 2, 3, 4], np.float32)}


def test_they_are_read_as_they_were_written(tmp_path: Path) -> None:
    digest = Sensitivities(INPUTS).save(tmp_path / "s.safetensors")
    named = SensitivityFile(file="s.safetensors", sha256=digest)
    named.find_beside(tmp_path / "recipe.toml")
    found = named.read()
    np.testing.assert_array_equal(
        found.of("a.weight", (8, 4, 1, 1)), [[[[1]], [[2]], [[3]], [[4]]]]
    )
    np.testing.assert_array_equal(found.of("a.weight", (8, 2), columns=(1, 3)), [[2, 3]])


@pytest.mark.parametrize(
    ("name", "shape", "columns", "message"),
    [
        ("b.weight", (8, 4), None, "no sensitivities of b.weight"),
        ("a.weight", (8, 3), None, "sensitivities have 4 inputs"),
        ("a.weight", (4,), None, "sensitivities have 4 inputs"),
        ("a.weight", (8, 4), (2, 6), "sensitivities have 2 inputs"),
    ],
)
def test_those_of_another_model_are_refused(
    name: str, shape: tuple[int, ...], columns: tuple[int, int] | None, message: str
) -> None:
    with pytest.raises(CetaneError, match=message):
        Sensitivities(INPUTS).of(name, shape, columns)


def write(folder: Path, tensors: dict[str, torch.Tensor]) -> str:
    save_file(tensors, folder / "s.safetensors")
    return hashlib.sha256((folder / "s.safetensors").read_bytes()).hexdigest()


def test_a_recipe_finds_the_file_beside_it(tmp_path: Path) -> None:
    digest = Sensitivities(INPUTS).save(tmp_path / "s.safetensors")
    recipe = tmp_path / "mine.toml"
    text = '[compression]\ndefault = "palette3-weighted-group8"\n'
    recipe.write_text(text)
    with pytest.raises(CetaneError, match="palette3-weighted-group8 needs"):
        load_recipe(str(recipe))
    text += f'[compression.sensitivity]\nfile = "s.safetensors"\nsha256 = "{digest}"\n'
    recipe.write_text(text)
    chosen = load_recipe(str(recipe))
    assert chosen.compression.sensitivity is not None
    assert chosen.compression.sensitivity.read().inputs.keys() == INPUTS.keys()
    # What a bundle's manifest says of it is the same recipe, wherever the file lies.
    assert type(chosen).model_validate(chosen.model_dump(mode="json")) == chosen
    assert str(tmp_path) not in chosen.model_dump_json()


def test_another_file_is_refused(tmp_path: Path) -> None:
    digest = Sensitivities(INPUTS).save(tmp_path / "s.safetensors")
    named = SensitivityFile(file="s.safetensors", sha256="0" * 64)
    named.find_beside(tmp_path / "recipe.toml")
    with pytest.raises(CetaneError, match="not the file that the recipe was written for"):
        named.read()
    missing = SensitivityFile(file="other.safetensors", sha256=digest)
    missing.find_beside(tmp_path / "recipe.toml")
    with pytest.raises(CetaneError, match="cannot read"):
        missing.read()


@pytest.mark.parametrize(
    "tensors", [{"a": torch.zeros(2, 2)}, {"a": torch.zeros(2, dtype=torch.float64)}]
)
def test_other_tensors_are_refused(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    named = SensitivityFile(file="s.safetensors", sha256=write(tmp_path, tensors))
    named.find_beside(tmp_path / "recipe.toml")
    with pytest.raises(CetaneError, match="must be vectors"):
        named.read()


def test_what_is_no_safetensors_file_is_refused(tmp_path: Path) -> None:
    content = b"\x80\x04a pickle, perhaps"
    (tmp_path / "s.safetensors").write_bytes(content)
    named = SensitivityFile(file="s.safetensors", sha256=hashlib.sha256(content).hexdigest())
    named.find_beside(tmp_path / "recipe.toml")
    with pytest.raises(CetaneError, match="not a safetensors file"):
        named.read()


@pytest.mark.parametrize("content", [{"file": "", "sha256": "0" * 64}, {"file": "a", "sha256": "0"},
                                     {"file": "a"}])  # fmt: skip
def test_a_bad_table_is_refused(content: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="sensitivity"):
        Selection.model_validate({"sensitivity": content})
