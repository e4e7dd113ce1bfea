"""LoRA adapters in peft's form: their tensors in adapter_model.safetensors, checked against a base.

Source: peft 0.21, `tuners/lora` (layer.py, dora.py, model.py) and `utils/save_and_load.py`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cetane.checkpoint.checkpoint import Checkpoint
from cetane.checkpoint.lora_config import MERGED_ELSEWHERE, LoraConfig, read_config
from cetane.checkpoint.safetensors import EMBEDDING, HEAD, read_tensor, without_backbone
from cetane.checkpoint.safetensors_files import read_header, refuse_pickle
from cetane.checkpoint.stored_tensors import Identity, StoredTensor
from cetane.checkpoint.text_part import text_name
from cetane.errors import CetaneError
from cetane.files import file_identity

if TYPE_CHECKING:
    import torch

CONFIG, WEIGHTS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
RESAVE = "save the adapter with peft again: save_pretrained writes safetensors"
PREFIX = "base_model.model."
"""The beginning of every tensor's name in peft's files."""
COMMIT = re.compile("[0-9a-f]{40}")
FLOATS = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class LowRank:
    """A change of a weight `(O, I)`: it becomes `W + scale * up @ down`, with `up (O, r)` and
    `down (r, I)`.

    With a `magnitude (O,)` (DoRA), each of its rows is then brought to that length.
    """

    a: StoredTensor
    """`down`, or of an embedding the transpose of `up`."""
    b: StoredTensor
    """`up`, or of an embedding the transpose of `down`."""
    scale: float
    magnitude: StoredTensor | None = None
    embedding: bool = False

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the weight."""
        outputs, inputs = self.b.shape[0], self.a.shape[1]
        return (inputs, outputs) if self.embedding else (outputs, inputs)

    def down(self) -> torch.Tensor:
        """fp32 `(r, I)`."""
        return read_tensor(self.b).float().T if self.embedding else read_tensor(self.a).float()

    def up(self, start: int, stop: int) -> torch.Tensor:
        """Rows of `scale * up`, fp32 `(stop - start, r)`."""
        if self.embedding:
            return read_tensor(self.a).float()[:, start:stop].T * self.scale
        return read_tensor(self.b.rows(start, stop)).float() * self.scale

    def merged(self, rows: torch.Tensor, start: int) -> torch.Tensor:
        """The changed weight, fp32, for some rows of the base's."""
        stop = start + len(rows)
        changed = rows.float() + self.up(start, stop) @ self.down()
        if self.magnitude is not None:
            changed *= self._factor(changed, start)[:, None]
        return changed

    def factor(self, rows: torch.Tensor, start: int) -> torch.Tensor:
        """The factors `(n,)` that bring the rows of `W + scale * up @ down` to their magnitudes,
        for some rows of the base's."""
        stop = start + len(rows)
        return self._factor(rows.float() + self.up(start, stop) @ self.down(), start)

    def _factor(self, changed: torch.Tensor, start: int) -> torch.Tensor:
        assert self.magnitude is not None
        lengths = read_tensor(self.magnitude.rows(start, start + len(changed))).float()
        return lengths / changed.norm(dim=1)


@dataclass(frozen=True)
class Lora:
    """An adapter that fits a base, by canonical tensor names. No weight is read yet."""

    folder: Path
    config: LoraConfig
    changes: Mapping[str, LowRank]
    replaced: Mapping[str, StoredTensor]
    """Tensors that take the place of the base's: biases, and modules that were trained whole."""
    modules: Mapping[str, str]
    """The path of each changed module in peft's file, by the name of its weight."""

    @property
    def rank(self) -> int:
        """The largest rank of a change; 0 if no weight has one."""
        return max((change.rank for change in self.changes.values()), default=0)

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of headers, file sizes and modification times."""
        return self.identified(file_identity)

    def identified(self, identity: Identity) -> str:
        """SHA-256 (hex) of headers, and of what `identity` says of the file."""
        digest = hashlib.sha256(self.config.model_dump_json().encode())
        digest.update(identity(self.folder / WEIGHTS).encode())
        for name, stored in (*self.replaced.items(), *stored_tensors(self.changes)):
            digest.update(f"{name} {stored.offset} {stored.shape} {stored.dtype}\n".encode())
        return digest.hexdigest()


def stored_tensors(changes: Mapping[str, LowRank]) -> Iterator[tuple[str, StoredTensor]]:
    """All stored tensors of some changes."""
    for name, change in changes.items():
        for part in (change.a, change.b, change.magnitude):
            if part is not None:
                yield name, part


def open_lora(folder: Path, base: Checkpoint) -> Lora:
    """Open an adapter for a base. Reads only headers.

    Raises CetaneError for another kind of adapter, for an unknown key or tensor, and for a tensor
    that does not fit the base.
    """
    if not (folder / CONFIG).is_file():
        raise CetaneError(f"{folder} has no {CONFIG}", "give the folder that peft saved")
    config = read_config(folder / CONFIG)
    if not (folder / WEIGHTS).is_file():
        refuse_pickle([p for p in (folder / PICKLE,) if p.is_file()], RESAVE)
        raise CetaneError(f"{folder} has no {WEIGHTS}", RESAVE)
    return AdapterReader(folder, config, base).read()


ENDINGS = {
    ".lora_A.weight": "a",
    ".lora_B.weight": "b",
    ".lora_embedding_A": "embedding_a",
    ".lora_embedding_B": "embedding_b",
    ".lora_magnitude_vector": "magnitude",
    ".lora_magnitude_vector.weight": "magnitude",
}


class AdapterReader:
    """Reads the header of an adapter, and checks it against its base."""

    def __init__(self, folder: Path, config: LoraConfig, base: Checkpoint) -> None:
        self.file, self.config, self.base = folder / WEIGHTS, config, base
        self.folder = folder
        self.tied = HEAD not in base or base.config.get("tie_word_embeddings") is True

    def read(self) -> Lora:
        self.check_revision()
        modules: dict[str, dict[str, StoredTensor]] = {}
        replaced: dict[str, StoredTensor] = {}
        for name, stored in read_header(self.file).items():
            if stored.dtype not in FLOATS:
                raise self.wrong(f"{name} is {stored.dtype}, not one of {', '.join(FLOATS)}")
            if not name.startswith(PREFIX):
                raise self.wrong(f"{name} does not begin with {PREFIX}")
            own = name.removeprefix(PREFIX)
            ending = next((e for e in ENDINGS if own.endswith(e)), None)
            if ending is not None:
                given = modules.setdefault(own.removesuffix(ending), {})
                given[ENDINGS[ending]] = stored
            elif "lora_" in own:
                raise self.wrong(f"{name} is not known here", MERGED_ELSEWHERE)
            else:
                known = self.replacement(own, stored)
                if known in replaced:
                    raise self.wrong(f"two of its tensors replace {known}")
                replaced[known] = stored
        if not modules:
            raise self.wrong("it changes no weight")
        changes = {self.canonical(f"{m}.weight"): self.change(m, p) for m, p in modules.items()}
        names = {self.canonical(f"{module}.weight"): module for module in modules}
        if len(names) < len(modules):
            raise self.wrong("two of its modules change one weight")
        return Lora(self.folder, self.config, changes, replaced, names)

    def check_revision(self) -> None:
        """Raise CetaneError if the adapter and its base state different commits of the hub."""
        stated, own = self.config.revision, self.base.revision
        if own and stated and COMMIT.fullmatch(stated) and stated != own:
            raise self.wrong(
                f"its base is revision {stated}, but {self.base.source} is {own}",
                f"download revision {stated} of the base",
            )

    def canonical(self, name: str) -> str:
        """The base's name for a tensor of the model that the adapter was trained on."""
        known = name if name in self.base else text_name(name) or without_backbone(name)
        if self.tied and known in (EMBEDDING, HEAD):
            raise self.wrong(
                f"it changes {name}, which is embedding and head at once: peft changes only one",
                "train it without embed_tokens and lm_head",
            )
        if known not in self.base:
            raise self.wrong(
                f"it changes {name}, which {self.base.source} does not have",
                f"{self.stated}; give that base",
            )
        return known

    def replacement(self, name: str, stored: StoredTensor) -> str:
        known = self.canonical(name.replace(".base_layer.", "."))
        self.check(name, stored.shape, tuple(self.base.shape(known)))
        return known

    def change(self, module: str, given: Mapping[str, StoredTensor]) -> LowRank:
        """The change of a module's weight."""
        embedding = "embedding_a" in given
        a, b = (given.get(f"embedding_{n}" if embedding else n) for n in "ab")
        magnitude = given.get("magnitude")
        if a is None or b is None or len(given) != 2 + (magnitude is not None):
            raise self.wrong(f"{module} has only {', '.join(sorted(given))}")
        if (magnitude is not None) != self.config.use_dora:
            raise self.wrong(f"{module}: use_dora is {self.config.use_dora}, its tensors differ")
        if embedding and self.config.use_dora:
            raise self.wrong(f"{module}: DoRA of an embedding is not known", MERGED_ELSEWHERE)
        if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[1]:
            raise self.wrong(f"{module}: shapes {a.shape} and {b.shape} do not fit each other")
        rank = self.config.rank(module)
        if a.shape[0] != rank:
            raise self.wrong(f"{module} has rank {a.shape[0]}, but the config says {rank}")
        change = LowRank(a, b, self.config.scale(module), magnitude, embedding)
        self.check(module, change.shape, tuple(self.base.shape(self.canonical(f"{module}.weight"))))
        if magnitude is not None:
            self.check(f"the magnitude of {module}", magnitude.shape, change.shape[:1])
        return change

    def check(self, what: str, shape: tuple[int, ...], wanted: tuple[int, ...]) -> None:
        """Raise CetaneError unless a shape is the base's."""
        if tuple(shape) != wanted:
            raise self.wrong(
                f"{what} is for shape {tuple(shape)}, but {self.base.source} has {wanted}",
                f"{self.stated}; give that base",
            )

    @property
    def stated(self) -> str:
        """The base that the adapter states, for hints."""
        return f"it says that its base is {self.config.base_model_name_or_path or 'unknown'}"

    def wrong(self, why: str, hint: str = "save the adapter with peft again") -> CetaneError:
        return CetaneError(f"{self.file}: {why}", hint)
