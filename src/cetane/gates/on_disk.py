"""A model's weights in a file that is mapped into memory, so that they take room only in use."""

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
"""Bytes of weights below which they stay in memory."""
ALIGNED = 64
"""Bytes, as torch's own tensors are: the math library's sums may depend on it."""


class OnDisk:
    """The parameters of a model in a file without a name, which goes with the process.

    What was read of it takes memory until its module is done.
    """

    def __init__(self, model: nn.Module) -> None:
        """Move them. Small ones stay in memory, and so do all where no file can be written."""
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
        """A context for passes, after which nothing takes memory: not every module is called."""
        try:
            yield
        finally:
            if self._mapped is not None:
                self._mapped.madvise(mmap.MADV_DONTNEED)
