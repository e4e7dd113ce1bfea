"""The checkpoint: config, tokenizer and tensors, whatever the form of its files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from cetane.checkpoint.names import model_name
from cetane.checkpoint.stored_tensors import Identity, StoredTensor
from cetane.errors import CetaneError
from cetane.files import content_identity, file_identity

if TYPE_CHECKING:
    import torch

    from cetane.checkpoint.lora import Lora
    from cetane.checkpoint.tokenizer import Tokenizer


class Checkpoint(ABC):
    """A model's config, tokenizer and tensors. Only headers are read until a tensor is asked for.

    `source` is the path or name that was opened. `config` is the content of Hugging Face's
    config.json, without its quantisation: tensors are read as plain weights.
    """

    quantization: str | None = None
    """The quantisation of the stored weights, for messages; None for plain weights."""
    revision: str | None = None
    """The commit of a model that came from the Hugging Face hub; None if it is not known."""
    part_of: str | None = None
    """The type of the multimodal model of which this is the text part."""
    folder: Path | None = None
    """The folder here of its config and tokenizer, wherever it was opened; None for a GGUF file."""
    merged: tuple[Lora, ...] = ()
    """The adapters that are merged into the tensors, in order."""
    adapters: Mapping[str, Lora] = MappingProxyType({})
    """The adapters beside the tensors, by name."""

    def __init__(
        self, source: str, config: dict[str, Any], tensors: Mapping[str, StoredTensor]
    ) -> None:
        self.source = source
        self.config = config
        self._tensors = tensors

    @property
    def model_name(self) -> str:
        """The model's id on the Hugging Face hub, or its file's name (`model_name`)."""
        return model_name(self.source, self.config)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def names(self) -> list[str]:
        """The tensors' Hugging Face names, sorted."""
        return sorted(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape that `read` returns. Raises CetaneError if there is no such tensor."""
        return self._stored(name).shape

    def dtype(self, name: str) -> str:
        """The file's name of the number format: F32, F16, BF16, or a GGUF type such as Q4_1. For a
        quantised weight its storage, such as int4 (awq)."""
        return self._stored(name).stored_as

    @abstractmethod
    def read(self, name: str) -> torch.Tensor:
        """The tensor, in memory of its own. Raises CetaneError if it is missing or unreadable.

        Safetensors give the stored dtype. GGUF tensors are dequantised to float32.
        """

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """`read(name)[start:stop]`, in memory of its own.

        From safetensors nothing else is read; if experts are stored one by one, only the experts of
        these rows. Raises CetaneError as `read`, and unless 0 <= start <= stop <= rows.
        """
        shape = self.shape(name)
        if not shape or not 0 <= start <= stop <= shape[0]:
            raise CetaneError(
                f"{self.source}: tensor {name!r} of shape {shape} has no rows {start} to {stop}"
            )
        return self._read_rows(name, start, stop)

    def _read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        return self.read(name)[start:stop].clone()

    @property
    def unchanged(self) -> Checkpoint:
        """The checkpoint as it was opened: without adapters, rotation or another order of heads."""
        return self

    def with_merged(self, adapter: str) -> Checkpoint:
        """The base with one of `adapters` merged into it: the truth of a port's adapter."""
        raise CetaneError(f"{self.source} has no adapter {adapter!r}")

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises CetaneError, only on access, if there is no usable one."""
        return self._load_tokenizer()

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of headers, file sizes and modification times: a key for caches."""
        return self.identified(file_identity)

    @cached_property
    def content(self) -> str:
        """SHA-256 (hex) of headers and of the content of all files, wherever they lie: a key for
        stores. All files are read once."""
        return self.identified(content_identity)

    def check_unchanged(self) -> None:
        """Raise CetaneError if the files here are not those that were opened, perhaps on another
        machine."""
        if self.identified(file_identity) != self.fingerprint:
            raise CetaneError(
                f"{self.source}: not the files here that the work was begun with",
                "put the checkpoint where all workers read the same files: a shared folder, or a "
                "URL such as hf://org/name",
            )

    @abstractmethod
    def _load_tokenizer(self) -> Tokenizer: ...

    @abstractmethod
    def identified(self, identity: Identity) -> str:
        """SHA-256 (hex) of headers, and of what `identity` says of each file."""

    def _stored(self, name: str) -> StoredTensor:
        try:
            return self._tensors[name]
        except KeyError:
            raise CetaneError(f"{self.source} has no tensor {name!r}") from None
