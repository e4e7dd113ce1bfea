"""Constants in files, as recipes name them: parts of tensors, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from cetane.compress import Selection, parse_format
from cetane.compress.encoded import Affine, Palettized
from cetane.compress.fitted import FittedConstants, FittedFile, folder, kept, save
from cetane.errors import CetaneError

RANDOM = np.random.default_rng(0)
PALETTE = Palettized(
    RANDOM.integers(0, 16, (16, 6)).astype(np.uint8),
    np.sort(RANDOM.normal(size=(2, 1, 16, 1)), axis=2).astype(np.float16),
    4,
)
LINEAR = Affine(RANDOM.integers(-7, 8, (4, 6)).astype(np.int8), np.full((4, 1), 0.5, np.float16), 4)
FOUR, INT4 = parse_format("palette4-kmeans-group8"), parse_format("int4-per-channel")


@pytest.fixture(scope="module")
def file() -> FittedFile:
    return save({"a.weight": PALETTE, "b.weight": LINEAR}, "some-key", "a-model")


def test_constants_are_read_as_they_were_made(file: FittedFile) -> None:
    fitted = file.read()
    whole = fitted.of("a.weight", (16, 6, 1, 1), FOUR, None, None)
    assert isinstance(whole, Palettized)
    assert whole.lut.shape == (2, 1, 1, 1, 16, 1)
    np.testing.assert_array_equal(whole.decode().reshape(16, 6), PALETTE.decode())
    linear = fitted.of("b.weight", (4, 6, 1, 1), INT4, None, None)
    assert isinstance(linear, Affine)
    np.testing.assert_array_equal(linear.decode().reshape(4, 6), LINEAR.decode())
    assert fitted.of("c.weight", (4, 6), INT4, None, None) is None


def test_constants_whose_rows_lie_apart_are_kept_as_they_are() -> None:
    """Second-order rounding makes columns one after another."""
    turned = Affine(np.asfortranarray(LINEAR.data), LINEAR.scale, 4)
    read = save({"a.weight": turned}, "turned", "a-model").read()
    made = read.of("a.weight", (4, 6), INT4, None, None)
    assert made is not None
    np.testing.assert_array_equal(made.decode(), LINEAR.decode())


@pytest.mark.parametrize("factor", [0.25, 0.3, 4.0])
@pytest.mark.parametrize("made", [PALETTE, LINEAR], ids=["palette", "int4"])
def test_constants_of_a_multiple(made: Palettized | Affine, factor: float) -> None:
    wanted = factor * made.decode().astype(np.float64)
    np.testing.assert_allclose(made.times(factor).decode(), wanted, rtol=1e-3)


@pytest.mark.parametrize("made", [PALETTE, LINEAR], ids=["palette", "int4"])
def test_a_multiple_beyond_fp16_is_refused(made: Palettized | Affine) -> None:
    with pytest.raises(CetaneError, match="times 1e\\+06 is not finite in fp16"):
        made.times(1e6)


def test_rows_and_columns_are_parts_of_a_tensor(file: FittedFile) -> None:
    fitted = file.read()
    rows = fitted.of("a.weight", (8, 6), FOUR, (8, 16), None)
    assert rows is not None
    np.testing.assert_array_equal(rows.decode(), PALETTE.decode()[8:])
    columns = fitted.of("a.weight", (16, 4), FOUR, None, (2, 6))
    assert columns is not None
    np.testing.assert_array_equal(columns.decode(), PALETTE.decode()[:, 2:])
    linear = fitted.of("b.weight", (2, 3), INT4, (1, 3), (0, 3))
    assert linear is not None
    np.testing.assert_array_equal(linear.decode(), LINEAR.decode()[1:3, :3])


def test_rows_of_vectors_are_parts_too() -> None:
    form = parse_format("palette2-kmeans-vector2-group4")
    lut = RANDOM.normal(size=(4, 1, 16, 2)).astype(np.float16)
    whole = Palettized(RANDOM.integers(0, 16, (8, 6)).astype(np.uint8), lut, 4)
    fitted = save({"a.weight": whole}, "pairs", "a-model").read()
    rows = fitted.of("a.weight", (8, 6, 1, 1), form, (4, 12), None)
    assert isinstance(rows, Palettized) and rows.bits == 4
    np.testing.assert_array_equal(rows.decode().reshape(8, 6), whole.decode()[4:12])
    everywhere = parse_format("palette2-kmeans-vector2-per-tensor")
    for form_, span in ((form, (2, 14)), (everywhere, (0, 16)), (FOUR, (0, 16))):
        with pytest.raises(CetaneError, match="not fitted to a"):
            fitted.of("a.weight", (span[1] - span[0], 6), form_, span, None)


def test_all_rows_of_one_palette_are_parts_too() -> None:
    """Slices of a head, or queries and keys of one tensor."""
    whole = Palettized(PALETTE.indices, PALETTE.lut[:1], 4)
    fitted = save({"a.weight": whole}, "one-palette", "a-model").read()
    form = parse_format("palette4-kmeans-per-tensor")
    rows = fitted.of("a.weight", (5, 6), form, (3, 8), None)
    assert rows is not None
    np.testing.assert_array_equal(rows.decode(), whole.decode()[3:8])


INDICES, LUT = np.zeros((16, 6), np.uint8), np.zeros((2, 16), np.float16)


@pytest.mark.parametrize(
    "tensors",
    [
        {"a.weight/lut": LUT},
        {"a.weight/lut": LUT[:0], "a.weight/indices": INDICES},
        {"a.weight/lut": np.zeros((17, 16), np.float16), "a.weight/indices": INDICES},
        {"a.weight/lut": LUT.astype(np.float64), "a.weight/indices": INDICES},
        {"a.weight/lut": LUT, "a.weight/indices": INDICES.astype(np.int64)},
        {"a.weight/lut": LUT, "a.weight/indices": INDICES[:, 0].copy()},
        {"a.weight/lut": LUT, "a.weight/indices": INDICES + np.uint8(16)},
    ],
    ids=["no indices", "no palette", "too many", "fp64", "int64", "one axis", "an entry beyond"],
)
def test_a_strangers_tensors(tmp_path: Path, tensors: dict[str, Any]) -> None:
    save_file(tensors, tmp_path / "x.safetensors")
    with pytest.raises(CetaneError, match=r"a\.weight is not fitted to a palette4"):
        FittedConstants(tmp_path / "x.safetensors").of("a.weight", (16, 6), FOUR, None, None)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("made", [PALETTE, LINEAR], ids=["palette", "int4"])
def test_values_that_are_not_finite(made: Palettized | Affine, value: float) -> None:
    part, form = ("lut", FOUR) if isinstance(made, Palettized) else ("scale", INT4)
    values = np.array(getattr(made, part))
    values.flat[-1] = value
    read = save({"a.weight": replace(made, **{part: values})}, "odd", "a-model").read()
    with pytest.raises(CetaneError, match=rf"a\.weight/{part} holds NaN or infinity \(remove comp"):
        read.of("a.weight", made.decode().shape, form, None, None)


@pytest.mark.parametrize(
    "said", ["[" * 100_000, '{"harms": {"a": 1' + "0" * 400 + "}}", "{", "[1]"]
)
def test_metadata_that_says_nothing(tmp_path: Path, said: str) -> None:
    """Its constants are used, as those of an older file."""
    tensors = {"b.weight/data": LINEAR.data, "b.weight/scale": LINEAR.scale[:, 0]}
    save_file(tensors, tmp_path / "x.safetensors", {"cetane": said})
    fitted = FittedConstants(tmp_path / "x.safetensors")
    assert (fitted.metadata, fitted.harms) == ({}, {})
    made = fitted.of("b.weight", (4, 6), INT4, None, None)
    assert made is not None
    np.testing.assert_array_equal(made.decode(), LINEAR.decode())


@pytest.mark.parametrize(
    ("name", "shape", "form", "rows"),
    [
        ("a.weight", (16, 6), "palette4-kmeans-group16", None),
        ("a.weight", (16, 6), "palette3-kmeans-group8", None),
        ("a.weight", (16, 6), "int4-per-channel", None),
        ("a.weight", (8, 6), "palette4-kmeans-group8", (4, 12)),
        ("a.weight", (16, 7), "palette4-kmeans-group8", None),
        ("b.weight", (4, 6), "palette4-kmeans-group8", None),
        ("b.weight", (4, 6), "int4-per-tensor", None),
    ],
)
def test_what_was_fitted_otherwise_is_refused(
    file: FittedFile,
    name: str,
    shape: tuple[int, ...],
    form: str,
    rows: tuple[int, int] | None,
) -> None:
    with pytest.raises(CetaneError, match=f"{name} is not fitted to a {form}"):
        file.read().of(name, shape, parse_format(form), rows, None)


def test_equal_constants_are_equal_files(file: FittedFile) -> None:
    """Its header has no order that another process would not choose."""
    with safe_open(file.path, "np") as opened:
        assert list(opened.metadata()) == ["cetane"]


def test_what_was_made_is_found_by_what_it_depends_on(file: FittedFile) -> None:
    assert kept("some-key") == file
    assert kept("another-key") is None
    (folder() / "damaged.json").write_text("[")
    assert kept("damaged") is None
    (folder() / "gone.json").write_text(json.dumps("0" * 64))
    assert kept("gone") is None
    half = save({"h.weight": LINEAR}, "half", "a-model")
    half.path.write_bytes(half.path.read_bytes()[:-4])
    assert kept("half") is None


def test_a_recipe_finds_its_file_in_the_cache_or_beside_it(
    file: FittedFile, tmp_path: Path
) -> None:
    named = FittedFile(file="mine.safetensors", sha256=file.sha256)
    named.find_beside(tmp_path / "recipe.toml")
    assert "a.weight/lut" in named.read().names
    (tmp_path / "mine.safetensors").write_bytes(b"another file")
    with pytest.raises(CetaneError, match=r"compression.fitted: .*is not the file"):
        named.read()
    (tmp_path / "mine.safetensors").write_bytes(file.path.read_bytes())
    assert named.read().path == tmp_path / "mine.safetensors"
    missing = FittedFile(file="mine.safetensors", sha256="0" * 64)
    with pytest.raises(CetaneError, match=r"compression.fitted: cannot read"):
        missing.read()


def test_a_file_of_anything_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"no tensors")
    with pytest.raises(CetaneError, match="no safetensors file"):
        FittedConstants(tmp_path / "x")


def test_a_method_has_formats_and_a_file_of_its_own() -> None:
    with pytest.raises(ValueError, match="palette4-uniform-group8 places its palettes"):
        Selection(default="palette4-uniform-group8", method="gptq")
    with pytest.raises(ValueError, match="fitted: plain constants"):
        Selection(default="palette4-kmeans-group8", fitted=FittedFile(file="x", sha256="0" * 64))
    plain = Selection(default="palette4-kmeans-group8").model_dump()
    assert "method" not in plain
    assert "fitted" not in plain


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CETANE_CACHE", str(tmp_path / "file"))
    with pytest.raises(CetaneError, match=r"cannot write .*fitted"):
        save({"a.weight": PALETTE}, "some-key", "a-model")
