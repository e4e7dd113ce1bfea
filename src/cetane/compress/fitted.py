"""Constants that are fitted to a model, and do not follow from one weight alone.

GPTQ rounds by the inputs of a layer, tuning by the answers of the whole model. The constants are
made once and lie in a file. A recipe names the file by the hash of its content.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cetane.compress.formats import Format, Palette, Shape
from cetane.compress.recipe_file import RecipeFile
from cetane.errors import CetaneError
from cetane.files import cache_dir, disk_errors, read_text, replacing, sha256
from cetane.validation import parse_json

if TYPE_CHECKING:  # a recipe is read without numpy
    import numpy.typing as npt
    from safetensors import safe_open

    from cetane.compress.encoded import Affine, Encoded, Palettized

METADATA = "cetane"
"""The only entry of safetensors' metadata, a JSON object. The order of several differs from run to
run, and the file's hash with it."""
KEY, MODEL, HARMS = "key", "model", "harms"
"""The keys of this object: hashes of all that the constants depend on, and of the checkpoint alone;
nats by the name of a tensor."""
HINT = "remove compression.fitted from the recipe: cetane port makes the file anew"
"""What to do if the file is not the right one."""
INDICES, LUT, DATA, SCALE = "/indices", "/lut", "/data", "/scale"
"""Suffixes of the names in the file: each follows the name of a checkpoint's tensor."""
Span = tuple[int, int]
"""The start and the stop of some rows or columns."""


class FittedConstants:
    """The constants of a file, read one weight at a time."""

    def __init__(self, path: Path) -> None:
        """Raises CetaneError if the file is not safetensors."""
        from safetensors import SafetensorError, safe_open

        try:
            self.file: safe_open = safe_open(path, "np")
            self.names = frozenset(self.file.keys())
        except (OSError, SafetensorError) as error:
            raise CetaneError(f"{path}: no safetensors file: {error}") from error
        self.path = path

    @property
    def metadata(self) -> dict[str, Any]:
        """The object in the file's metadata; empty for an older file or a damaged one."""
        with suppress(KeyError, CetaneError):
            content = parse_json((self.file.metadata() or {})[METADATA], str(self.path))
            return content if isinstance(content, dict) else {}
        return {}

    @property
    def harms(self) -> dict[str, float]:
        """The KL, in nats a token, that the rounding of each tensor was predicted to cost, by its
        name; empty if nothing predicted it."""
        with suppress(KeyError, ValueError, TypeError, AttributeError):
            return {str(name): float(harm) for name, harm in self.metadata[HARMS].items()}
        return {}

    def __contains__(self, name: object) -> bool:
        """Whether the file has constants of a tensor."""
        return f"{name}{LUT}" in self.names or f"{name}{SCALE}" in self.names

    def check_model(self, checkpoint: Any) -> None:
        """Raise CetaneError if the constants were fitted to another checkpoint, by its `content`.

        A model that was trained on from it has weights so near that a gate may take these constants
        for its own. Older files do not say their model.
        """
        model = self.metadata.get(MODEL)
        if model is not None and model != checkpoint.content:
            raise CetaneError(
                f"compression.fitted: the constants were fitted to another model than "
                f"{checkpoint.source}",
                HINT,
            )

    def of(
        self, name: str, shape: Shape, form: Format, rows: Span | None, columns: Span | None
    ) -> Affine | Palettized | None:
        """The constants of a weight of this shape, which is a part of the named tensor.

        `rows` and `columns` are that part; None stands for all. Returns None for a tensor that was
        not fitted. Raises CetaneError if the file has it in another format or shape, or
        with a value that is not finite.
        """
        from safetensors import SafetensorError

        try:
            if name + LUT in self.names:
                return self._palettized(name, shape, form, rows, columns)
            if name + SCALE in self.names:
                return self._affine(name, shape, form, rows, columns)
        except (ValueError, LookupError, AttributeError, TypeError, SafetensorError) as error:
            raise CetaneError(
                f"{self.path}: {name} is not fitted to a {form.name} of shape {shape}", HINT
            ) from error
        return None

    def _finite(self, name: str) -> Any:
        """A tensor of the file. Raises CetaneError if it holds NaN or infinity."""
        import numpy as np

        values = self.file.get_tensor(name)
        if not np.isfinite(values).all():
            raise CetaneError(f"{self.path}: {name} holds NaN or infinity", HINT)
        return values

    def _palettized(
        self, name: str, shape: Shape, form: Format, rows: Span | None, columns: Span | None
    ) -> Palettized:
        from cetane.compress.encoded import Palettized

        indices, lut = self.file.get_tensor(name + INDICES), self._finite(name + LUT)
        if (indices.dtype, lut.dtype) != ("uint8", "float16") or indices.ndim != 2:
            raise ValueError
        if not isinstance(form, Palette):
            raise ValueError
        outputs, size = len(indices) * form.vector, 2**form.index_bits
        if lut.shape != (form.groups((outputs,)), size * form.vector):
            raise ValueError
        if indices.max(initial=0) >= size:
            raise ValueError
        start, stop = rows or (0, outputs)
        whole = form.group or form.vector
        if start % whole or stop % whole:
            raise ValueError
        span = slice(start // form.vector, stop // form.vector)
        own = indices[span, slice(*columns) if columns else slice(None)]
        groups = lut if form.group is None else lut[start // form.group : stop // form.group]
        return Palettized(
            own.reshape(form.indices_shape(shape)),
            groups.reshape(form.lut_shape(shape)),
            form.index_bits,
        )

    def _affine(
        self, name: str, shape: Shape, form: Format, rows: Span | None, columns: Span | None
    ) -> Affine:
        from cetane.compress.encoded import Affine

        data, scale = self.file.get_tensor(name + DATA), self._finite(name + SCALE)
        if (data.dtype, scale.dtype) != ("int8", "float16") or data.ndim != 2:
            raise ValueError
        if form.name != f"int{form.bits}-per-channel" or scale.shape != (len(data),):
            raise ValueError
        limit = 2 ** (form.bits - 1) - 1
        if data.min(initial=0) < -limit or data.max(initial=0) > limit:
            raise ValueError
        part = slice(*rows) if rows else slice(None)
        own = data[part, slice(*columns) if columns else slice(None)].reshape(shape)
        return Affine(own, scale[part].reshape(-1, *[1] * (len(shape) - 1)), form.bits)


class FittedFile(RecipeFile):
    """A recipe's `[compression.fitted]`: beside the recipe, else in the cache folder, by its
    hash."""

    def read(self) -> FittedConstants:
        """The constants. Raises CetaneError if the file cannot be read or has another hash."""
        if not self.path.is_file() and (kept := by_content(self.sha256)).path.is_file():
            return kept.read()
        return FittedConstants(self.verify("compression.fitted", HINT))


def folder() -> Path:
    """The folder of fitted constants; a file's name is its hash."""
    return cache_dir() / "fitted"


def save(
    constants: Mapping[str, Encoded], key: str, model: str, harms: Mapping[str, float] | None = None
) -> FittedFile:
    """Keep constants, by the names of a checkpoint's tensors, in the cache folder.

    `key` is a hash of all that they depend on, `model` that of the checkpoint alone. `harms` is the
    KL that each is predicted to cost. Raises CetaneError if nothing can be written.
    """
    import numpy as np
    from safetensors.numpy import save as serialized

    from cetane.compress.encoded import Affine, Palettized

    tensors: dict[str, npt.NDArray[Any]] = {}
    for name, made in constants.items():
        if isinstance(made, Palettized):
            tensors[name + INDICES] = made.indices.reshape(len(made.indices), -1)
            tensors[name + LUT] = made.lut.reshape(len(made.lut), -1)
        elif isinstance(made, Affine):
            tensors[name + DATA] = made.data.reshape(len(made.data), -1)
            tensors[name + SCALE] = made.scale.reshape(-1)
    metadata = {KEY: key, MODEL: model, HARMS: dict(harms or {})}
    # safetensors writes an array's memory, whatever the order of its axes there
    dense = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    content = serialized(dense, {METADATA: json.dumps(metadata)})
    digest = hashlib.sha256(content).hexdigest()
    with disk_errors(folder()):
        folder().mkdir(parents=True, exist_ok=True)
        with replacing(folder() / f"{digest}.safetensors") as temporary:
            temporary.write_bytes(content)
        with replacing(folder() / f"{key}.json") as temporary:
            temporary.write_text(json.dumps(digest), encoding="utf-8")
    return by_content(digest)


def by_content(digest: str) -> FittedFile:
    """The file of this hash in the cache folder, which need not exist."""
    file = FittedFile(file=f"{digest}.safetensors", sha256=digest)
    file.find_beside(folder() / "recipe.toml")
    return file


def kept(key: str) -> FittedFile | None:
    """The file that `save` wrote for `key`; None if there is none, or if its hash differs."""
    with suppress(OSError, ValueError, CetaneError):
        file = by_content(json.loads(read_text(folder() / f"{key}.json")))
        if sha256(file.path) == file.sha256:
            return file
    return None
