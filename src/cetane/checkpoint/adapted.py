"""Checkpoints with adapters: merged into the base, or kept beside it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cetane.checkpoint.checkpoint import Checkpoint
from cetane.checkpoint.lora import Lora, open_lora
from cetane.checkpoint.safetensors import read_tensor
from cetane.checkpoint.stored_tensors import Identity
from cetane.checkpoint.wrapped import WrappedCheckpoint
from cetane.errors import CetaneError
from cetane.validation import ADAPTER_NAME

if TYPE_CHECKING:
    import torch


MOST_ADAPTERS = 32
SHARED_BASE = "--lora FOLDER merges it into the base"


class MergedCheckpoint(WrappedCheckpoint):
    """A checkpoint with an adapter merged into its tensors, in fp32, as they are read."""

    def __init__(self, base: Checkpoint, lora: Lora) -> None:
        super().__init__(base)
        self.merged = (*base.merged, lora)
        self.lora = lora

    def dtype(self, name: str) -> str:
        if name in self.lora.changes:
            return "F32"
        replaced = self.lora.replaced.get(name)
        return self.base.dtype(name) if replaced is None else replaced.stored_as

    def read(self, name: str) -> torch.Tensor:
        replaced = self.lora.replaced.get(name)
        tensor = self.base.read(name) if replaced is None else read_tensor(replaced)
        return self._changed(name, tensor, 0)

    def _read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        replaced = self.lora.replaced.get(name)
        if replaced is None:
            rows = self.base.read_rows(name, start, stop)
        else:
            rows = read_tensor(replaced.rows(start, stop))
        return self._changed(name, rows, start)

    def _changed(self, name: str, rows: torch.Tensor, start: int) -> torch.Tensor:
        """Rows of the base, or of what replaces them, with the adapter's change."""
        change = self.lora.changes.get(name)
        if change is not None:
            return check_sound(self.lora, name, change.merged(rows, start), rows)
        return check_sound(self.lora, name, rows) if name in self.lora.replaced else rows

    def identified(self, identity: Identity) -> str:
        return combined(self.base, {"": self.lora}, identity)


@dataclass(frozen=True)
class AdapterTensor:
    """One tensor that an adapter adds beside the base: `PART of WEIGHT` of the adapter `NAME`."""

    adapter: str
    weight: str
    part: str
    """`down (r, I)`, `up (O, r)` with the scale in it, `factor (O,)` of DoRA, or `bias (O,)`."""

    def __str__(self) -> str:
        return f"{self.adapter}:{self.weight}:{self.part}"

    @classmethod
    def parse(cls, name: object) -> AdapterTensor | None:
        """The tensor of a name; None for a tensor of the base."""
        pieces = name.split(":") if isinstance(name, str) else ()
        return cls(*pieces) if len(pieces) == 3 else None


class CheckpointWithAdapters(WrappedCheckpoint):
    """A checkpoint with adapters beside it. Their tensors have names of `AdapterTensor`.

    `names` lists only the base's tensors.
    """

    def __init__(self, base: Checkpoint, adapters: Mapping[str, Lora]) -> None:
        super().__init__(base)
        self.adapters = adapters
        for name, lora in adapters.items():
            check_beside(name, lora)

    def with_merged(self, adapter: str) -> Checkpoint:
        return MergedCheckpoint(self.base, self.adapters[adapter])

    def __contains__(self, name: object) -> bool:
        wanted = AdapterTensor.parse(name)
        if wanted is None:
            return name in self.base
        lora = self.adapters.get(wanted.adapter)
        return lora is not None and wanted.part in parts_of(lora, wanted.weight)

    def shape(self, name: str) -> tuple[int, ...]:
        wanted = AdapterTensor.parse(name)
        if wanted is None:
            return self.base.shape(name)
        lora = self._adapter(wanted)
        if wanted.part == "bias":
            return lora.replaced[wanted.weight].shape
        change = lora.changes[wanted.weight]
        outputs, inputs = change.shape
        shapes = {"down": (change.rank, inputs), "up": (outputs, change.rank), "factor": (outputs,)}
        return shapes[wanted.part]

    def read(self, name: str) -> torch.Tensor:
        shape = self.shape(name)
        return (
            self._read_rows(name, 0, shape[0]) if AdapterTensor.parse(name) else super().read(name)
        )

    def _read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        wanted = AdapterTensor.parse(name)
        if wanted is None:
            return super()._read_rows(name, start, stop)
        lora = self._adapter(wanted)
        if wanted.part == "bias":
            made = read_tensor(lora.replaced[wanted.weight].rows(start, stop))
        elif wanted.part == "down":
            made = lora.changes[wanted.weight].down()[start:stop]
        elif wanted.part == "up":
            made = lora.changes[wanted.weight].up(start, stop)
        else:
            rows = self.base.read_rows(wanted.weight, start, stop)
            made = lora.changes[wanted.weight].factor(rows, start)
            return check_sound(lora, wanted.weight, made, rows)
        return check_sound(lora, wanted.weight, made)

    def _adapter(self, wanted: AdapterTensor) -> Lora:
        if str(wanted) not in self:
            raise CetaneError(f"{self.source} has no tensor {str(wanted)!r}")
        return self.adapters[wanted.adapter]

    def identified(self, identity: Identity) -> str:
        return combined(self.base, self.adapters, identity)


def check_sound(
    lora: Lora, name: str, tensor: torch.Tensor, base: torch.Tensor | None = None
) -> torch.Tensor:
    """A tensor that an adapter makes, perhaps of rows of the base.

    Raises CetaneError, which names the adapter, for NaN or infinity that are not the base's own.
    """
    if tensor.isfinite().all() or (base is not None and not base.float().isfinite().all()):
        return tensor
    raise CetaneError(
        f"{lora.folder}: the adapter makes NaN or infinity of {name}",
        f"its tensors or its lora_alpha, {lora.config.lora_alpha:g}, are damaged: save it again",
    )


def parts_of(lora: Lora, name: str) -> tuple[str, ...]:
    """The parts of a tensor that an adapter adds beside the base."""
    if name in lora.replaced:
        return ("bias",)
    change = lora.changes.get(name)
    if change is None:
        return ()
    return ("down", "up") if change.magnitude is None else ("down", "up", "factor")


def check_beside(name: str, lora: Lora) -> None:
    """Raise CetaneError for an adapter that must be merged: it changes more than projections."""
    if not re.fullmatch(ADAPTER_NAME, name):
        raise CetaneError(
            f"--adapter {name!r}: not a name of an adapter",
            "use letters, digits and underscores, a letter first, 32 at most",
        )
    whole = [tensor for tensor in lora.replaced if not tensor.endswith(".bias")]
    if whole:
        raise CetaneError(
            f"adapter {name}: {lora.folder} replaces {whole[0]} as a whole, so it does not share "
            "the base's",
            SHARED_BASE,
        )
    tables = [tensor for tensor, change in lora.changes.items() if change.embedding]
    if tables:
        raise CetaneError(
            f"adapter {name}: {lora.folder} changes {tables[0]}, a table of the host", SHARED_BASE
        )


def combined(base: Checkpoint, adapters: Mapping[str, Lora], identity: Identity) -> str:
    """What a base with adapters is identified by."""
    digest = hashlib.sha256(base.identified(identity).encode())
    for name, lora in adapters.items():
        digest.update(f"{name} {lora.identified(identity)}\n".encode())
    return digest.hexdigest()


def with_lora(base: Checkpoint, folder: str | Path) -> Checkpoint:
    """The base with the adapter of a folder merged into it. Raises CetaneError as `open_lora`."""
    return MergedCheckpoint(base, open_lora(Path(folder).expanduser(), base))


def with_adapters(base: Checkpoint, folders: Mapping[str, str | Path]) -> Checkpoint:
    """The base with the adapters of some folders beside it, by name.

    Raises CetaneError as `open_lora`, for too many adapters, and for one that must be merged.
    """
    if len(folders) > MOST_ADAPTERS:
        raise CetaneError(f"{len(folders)} adapters: more than {MOST_ADAPTERS}")
    opened = {
        name: open_lora(Path(folder).expanduser(), base) for name, folder in sorted(folders.items())
    }
    return CheckpointWithAdapters(base, opened)
