"""The GGUF container: metadata and tensor positions. The reader trusts no length in the file.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import hashlib
import math
import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from cetane.checkpoint.stored_tensors import StoredTensor
from cetane.errors import CetaneError
from cetane.files import open_regular, refuse_pointer

MAGIC = b"GGUF"
_MAX_KEYS = 1 << 16  # models have under 100
_MAX_TENSORS = 1 << 18  # the largest models have under 2**16, with a tensor for each expert
_MAX_ITEMS = 1 << 24  # entries of any list; the largest vocabularies have under 2**20
_MAX_DIMS = 4
LARGEST_HEADER = 1 << 28
"""Bytes of a header: released models have up to 30 MB. A file with holes may be larger than any
memory, and its holes read as empty texts."""
_MAX_PARTS = 10_000
_PART = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.gguf")
_STRING, _ARRAY = 8, 9
_SCALARS = dict(  # metadata value type -> numpy dtype; 8 and 9 are above
    zip(
        (0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12),
        ("<u1", "<i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?", "<u8", "<i8", "<f8"),
        strict=True,
    )
)
_TENSOR_TYPES = {int(t): (t.name, *GGML_QUANT_SIZES[t]) for t in GGMLQuantizationType}


@dataclass(frozen=True)
class GGUFFile:
    """A parsed header.

    Metadata values are int, float, bool, str, a list of str, or a numpy array of numbers. Tensors
    have GGUF's names and their shapes in row-major order (GGUF lists the fastest axis first).
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, StoredTensor]
    digest: str  # SHA-256 of the header
    tokenizer_digest: str  # SHA-256 of the metadata that describes the tokenizer


def read_gguf(path: Path) -> GGUFFile:
    """Parse the header of a little-endian GGUF file, version 2 or 3.

    Raises CetaneError if it is cut short or malformed, or has an unknown version or tensor type.
    """
    try:
        with (
            open_regular(path) as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            return _Parser(path, data).parse()
    except (OSError, ValueError) as error:  # mmap: ValueError for an empty file
        raise CetaneError(f"cannot read {path}: {error}") from error


def read_split(first: GGUFFile) -> GGUFFile:
    """All parts of a split model as one file, from any of them.

    llama.cpp names the parts `NAME-00001-of-00003.gguf`. The first has all metadata. Raises
    CetaneError unless every part is there and belongs to the others.
    """
    count = first.metadata.get("split.count", 1)
    if type(count) is not int or not 0 <= count <= _MAX_PARTS:
        raise CetaneError(f"{first.path}: metadata split.count is {count!r}")
    if count <= 1:
        return first
    match = _PART.fullmatch(first.path.name)
    if match is None or int(match[3]) != count:
        raise CetaneError(
            f"{first.path} is one of {count} parts, but is not named NAME-00001-of-{count:05}.gguf",
            "give the parts the names that llama.cpp gave them",
        )
    parts: list[GGUFFile] = []
    for number in range(count):
        path = first.path.with_name(f"{match[1]}-{number + 1:05}-of-{match[3]}.gguf")
        if not path.is_file():
            raise CetaneError(f"{path} is missing, one of {count} parts", "download the rest")
        part = read_gguf(path)
        told = part.metadata.get("split.no"), part.metadata.get("split.count")
        if told != (number, count):
            raise CetaneError(f"{path} is not part {number} of {count} by its metadata, {told}")
        parts.append(part)
    tensors: dict[str, StoredTensor] = {}
    for part in parts:
        if tensors.keys() & part.tensors.keys():
            raise CetaneError(f"{part.path} holds tensors that an earlier part holds too")
        tensors |= part.tensors
    digest = hashlib.sha256("".join(part.digest for part in parts).encode()).hexdigest()
    head = parts[0]
    return GGUFFile(head.path, head.metadata, tensors, digest, head.tokenizer_digest)


class _Parser:
    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.size = len(data)
        self.most = min(self.size, LARGEST_HEADER)
        """The byte at which the header must have ended."""
        self.position = 0

    def parse(self) -> GGUFFile:
        if self.take(4) != MAGIC:
            refuse_pointer(self.path)
            raise CetaneError(f"{self.path} is not a GGUF file: it does not start with GGUF")
        version = self.uint32()
        if version not in (2, 3):
            raise CetaneError(
                f"{self.path} is GGUF version {version}; little-endian versions 2 and 3 are read",
                "convert the model again with a current llama.cpp",
            )
        tensor_count = self.count("tensors", _MAX_TENSORS, minimum_bytes=24)
        metadata_count = self.count("metadata keys", _MAX_KEYS, minimum_bytes=13)

        metadata: dict[str, Any] = {}
        tokenizer = hashlib.sha256()
        for _ in range(metadata_count):
            start = self.position
            key = self.string()
            if key in metadata:
                raise self.bad(f"metadata key {key!r} appears twice")
            metadata[key] = self.value(self.uint32())
            if key.startswith("tokenizer."):
                tokenizer.update(self.data[start : self.position])

        infos = [self.tensor_info() for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment <= 0 or alignment % 8:
            raise self.bad(f"general.alignment is {alignment!r}")
        start = -(-self.position // alignment) * alignment
        tensors: dict[str, StoredTensor] = {}
        for name, tensor in infos:
            if name in tensors:
                raise self.bad(f"tensor {name!r} appears twice")
            tensors[name] = self.placed(name, tensor, start, alignment)
        self.check_apart(tensors)
        digest = hashlib.sha256(self.data[: self.position]).hexdigest()
        return GGUFFile(self.path, metadata, tensors, digest, tokenizer.hexdigest())

    def bad(self, why: str) -> CetaneError:
        return CetaneError(f"{self.path} is not a valid GGUF file: {why}", "download it again")

    def unended(self) -> CetaneError:
        """The error for a header that goes on where it must have ended."""
        if self.size > self.most:
            return self.bad(f"its header has more than {self.most:,} bytes")
        return self.bad(f"it ends inside its header, at byte {self.size}")

    def take(self, nbytes: int) -> bytes:
        if nbytes > self.most - self.position:
            raise self.unended()
        self.position += nbytes
        return self.data[self.position - nbytes : self.position]

    def uint32(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def uint64(self) -> int:
        return int.from_bytes(self.take(8), "little")

    def count(self, items: str, most: int, minimum_bytes: int) -> int:
        """A number of items, each of at least `minimum_bytes`; they must fit the remaining
        bytes."""
        count = self.uint64()
        if count > (self.most - self.position) // minimum_bytes:
            raise self.bad(f"it announces {count} {items}, more than it can hold")
        if count > most:
            raise self.bad(f"it announces {count} {items}; at most {most} are read")
        return count

    def string(self) -> str:
        return self.strings(1)[0]

    def strings(self, count: int) -> list[str]:
        # The only hot loop: vocabularies and merges have several hundred thousand strings.
        data, most, position = self.data, self.most, self.position
        length_at = struct.Struct("<Q").unpack_from
        result = []
        try:
            for _ in range(count):
                (length,) = length_at(data, position)
                start = position + 8
                position = start + length
                if position > most:
                    if position > self.size:
                        raise self.bad(f"a string of {length} bytes runs past its end")
                    raise self.unended()
                result.append(data[start:position].decode())
        except struct.error:
            raise self.unended() from None
        except UnicodeDecodeError as error:
            raise self.bad(f"a string at byte {start} is not UTF-8") from error
        self.position = position
        return result

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array(self.uint32())
        return self.numbers(kind, 1)[0].item()

    def array(self, kind: int) -> list[str] | np.ndarray:
        if kind == _STRING:
            return self.strings(self.count("texts", _MAX_ITEMS, minimum_bytes=8))
        return self.numbers(kind, self.count("numbers", _MAX_ITEMS, minimum_bytes=1))

    def numbers(self, kind: int, count: int) -> np.ndarray:
        if kind not in _SCALARS:
            raise self.bad(f"it holds a metadata value of unknown type {kind}")
        dtype = np.dtype(_SCALARS[kind])
        return np.frombuffer(self.take(count * dtype.itemsize), dtype)

    def tensor_info(self) -> tuple[str, StoredTensor]:
        """A tensor's name and place; the offset still counts from the data section."""
        name = self.string()
        rank = self.uint32()
        if not 1 <= rank <= _MAX_DIMS:
            raise self.bad(f"tensor {name!r} has {rank} dimensions")
        shape = tuple(self.uint64() for _ in range(rank))[::-1]
        kind, offset = self.uint32(), self.uint64()
        if kind not in _TENSOR_TYPES:
            raise self.bad(f"tensor {name!r} is of unknown type {kind}")
        type_name, block, block_bytes = _TENSOR_TYPES[kind]
        if 0 in shape or shape[-1] % block:
            raise self.bad(f"tensor {name!r} has shape {shape}, impossible in {type_name}")
        nbytes = math.prod(shape) // block * block_bytes
        return name, StoredTensor(self.path, offset, nbytes, shape, type_name)

    def check_apart(self, tensors: dict[str, StoredTensor]) -> None:
        """Raise CetaneError for tensors that share bytes. llama.cpp refuses them too; a small file
        could hold a model of any size."""
        end = 0
        for name, tensor in sorted(tensors.items(), key=lambda item: item[1].offset):
            if tensor.offset < end:
                raise self.bad(f"tensor {name!r} overlaps another")
            end = tensor.offset + tensor.nbytes

    def placed(self, name: str, tensor: StoredTensor, start: int, alignment: int) -> StoredTensor:
        end = start + tensor.offset + tensor.nbytes
        if tensor.offset % alignment:
            raise self.bad(f"tensor {name!r} is not aligned to {alignment} bytes")
        if end > self.size:
            raise self.bad(
                f"tensor {name!r} ends {end - self.size} bytes after the end of the file"
            )
        return StoredTensor(
            self.path, start + tensor.offset, tensor.nbytes, tensor.shape, tensor.dtype
        )
