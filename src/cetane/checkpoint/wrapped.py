"""The base of checkpoints that change what another one reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cetane.checkpoint.checkpoint import Checkpoint

if TYPE_CHECKING:
    import torch

    from cetane.checkpoint.tokenizer import Tokenizer


class WrappedCheckpoint(Checkpoint):
    """A checkpoint that reads from another one."""

    def __init__(self, base: Checkpoint) -> None:
        super().__init__(base.source, base.config, {})
        self.base = base
        self.quantization, self.revision = base.quantization, base.revision
        self.merged, self.folder, self.part_of = base.merged, base.folder, base.part_of

    @property
    def unchanged(self) -> Checkpoint:
        return self.base.unchanged

    def __contains__(self, name: object) -> bool:
        return name in self.base

    def names(self) -> list[str]:
        return self.base.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.base.shape(name)

    def dtype(self, name: str) -> str:
        return self.base.dtype(name)

    def read(self, name: str) -> torch.Tensor:
        return self.base.read(name)

    def _read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        return self.base.read_rows(name, start, stop)

    def _load_tokenizer(self) -> Tokenizer:
        return self.base.tokenizer
