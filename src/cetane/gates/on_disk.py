"""A model's weights in a file that is mapped into memory, so they take memory only in use."""

import mmap
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
from torch import nn

from cetane.files import cache_dir
from cetane.hardware.memory import give_back

LEAST = 1 << 26
"""The bytes of weights below which a model stays in memory."""
ALIGNED = 64
"""The alignment of weights in bytes, as of torch's own tensors: sums may depend on it."""


class OnDisk:
    """The parameters of a model in a file without a name, which goes with the process.

    A module's parameters take memory from its call until its end.
    """

    def __init__(self, model: nn.Module) -> None:
        """Move the parameters to the file. They stay in memory if they are smaller than `LEAST`, or
        if no file can be written."""
        self._mapped: mmap.mmap | None = None
        if sum(parameter.nbytes for parameter in model.parameters()) >= LEAST:
            with suppress(OSError):
                self._move(model)

    def _move(self, model: nn.Module) -> None:
        folder = cache_dir()  # not the folder for temporary files, which may be memory
        folder.mkdir(parents=True, exist_ok=True)
        places: dict[nn.Parameter, int] = {}
        with tempfile.TemporaryFile(dir=folder) as file:
            for parameter in model.parameters():
                places[parameter] = file.tell()
                file.write(parameter.detach().contiguous().numpy().data)
                file.seek(-file.tell() % ALIGNED, os.SEEK_CUR)
            file.truncate()
            file.flush()
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        for parameter, place in places.items():
            flat = torch.frombuffer(
                mapped, dtype=parameter.dtype, count=parameter.numel(), offset=place
            )
            parameter.data = flat.reshape(parameter.shape)
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                start = places[parameter] // mmap.PAGESIZE * mmap.PAGESIZE
                size = places[parameter] + parameter.nbytes - start
                module.register_forward_hook(
                    lambda *_, at=start, size=size: mapped.madvise(mmap.MADV_DONTNEED, at, size)
                )
        self._mapped = mapped
        give_back()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """A context for passes. At its end no parameter takes memory, not even one that was read
        without a call of its module."""
        try:
            yield
        finally:
            if self._mapped is not None:
                self._mapped.madvise(mmap.MADV_DONTNEED)
