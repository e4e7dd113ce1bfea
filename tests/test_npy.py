"""Headers of `.npy` arrays: what numpy writes is read, anything else is refused."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cetane.errors import CetaneError
from cetane.npy import open_array, read_data, read_header

ARRAY = np.arange(24).reshape(2, 3, 4)


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "i1", "i4", "i8", "u1", "u2", "u8", "?"])
@pytest.mark.parametrize("array", [ARRAY, ARRAY.T, ARRAY[0, 0], ARRAY[0, 0, 1], ARRAY[:0]])
def test_what_numpy_writes_is_read(dtype: str, array: np.ndarray) -> None:
    file = io.BytesIO()
    np.save(file, array.astype(dtype))
    file.seek(0)
    read = read_data(file, read_header(file))
    assert read.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(read, array.astype(dtype))


def text(header: str, data: bytes = bytes(4), version: bytes = b"\x01\x00") -> bytes:
    return b"\x93NUMPY" + version + len(header).to_bytes(2, "little") + header.encode() + data


GOOD = "{'descr': '<f4', 'fortran_order': False, 'shape': (1,), }\n"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x93NUMPY\x01",
        text(GOOD, version=b"\x02\x00"),
        text(GOOD)[:40],
        text(GOOD.replace("(1,)", "(-1,)")),
        text(GOOD.replace("(1,)", "(1_0,)")),
        text(GOOD.replace("(1,)", f"({10**13},)")),
        text(GOOD.replace("(1,)", "(" + "1, " * 40 + "1)")),
        text(GOOD.replace("'<f4'", "'|O'")),
        text(GOOD.replace("'<f4'", "'>f4'")),
        text(GOOD.replace("'<f4'", "'<b4'")),
        text(GOOD.replace("'<f4'", "[('a', '<f4')]")),
        text(GOOD.replace("False", "print(1)")),
        text(GOOD, data=bytes(3)),
        text(GOOD, data=bytes(5)),
    ],
)
def test_anything_else_is_refused(content: bytes) -> None:
    file = io.BytesIO(content)
    with pytest.raises(ValueError):
        read_data(file, read_header(file))


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((2, 3), "f2"), None),
        (np.zeros((4, 3), "f2"), None),
        (np.zeros((3, 2), "f2").T, "by columns"),
        (np.zeros((2, 4), "f2"), r"float16 of shape \(2, 4\), not <f2 of \(None, 3\)"),
        (np.zeros((2, 3), "f4"), "float32 of shape"),
        (np.zeros((2, 3), ">f2"), "not an array of numbers"),
    ],
)
def test_a_mapped_array_is_what_was_asked_for(tmp_path: Path, array: Any, message: str) -> None:
    np.save(tmp_path / "a.npy", array)
    if message:
        with pytest.raises(CetaneError, match=message):
            open_array(tmp_path / "a.npy", "<f2", (None, 3))
    else:
        np.testing.assert_array_equal(open_array(tmp_path / "a.npy", "<f2", (None, 3)), array)


def test_a_mapped_array_is_whole_and_no_link(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    np.save(path, np.zeros((2, 3), "f2"))
    (tmp_path / "link.npy").symlink_to(path)
    with pytest.raises(CetaneError, match="cannot read"):
        open_array(tmp_path / "link.npy", "<f2", (2, 3))
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CetaneError, match="11 bytes do not fit"):
        open_array(path, "<f2", (2, 3))
