"""LoRA adapters in peft's form: adapter_config.json and adapter_model.safetensors.

Source: peft 0.21, `tuners/lora` (layer.py, dora.py, model.py) and `utils/save_and_load.py`.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from cetane.checkpoint.checkpoint import Checkpoint
from cetane.checkpoint.safetensors import EMBEDDING, HEAD, read_tensor
from cetane.checkpoint.safetensors_files import read_header, refuse_pickle
from cetane.checkpoint.stored_tensors import Identity, StoredTensor
from cetane.checkpoint.text_part import text_name
from cetane.errors import CetaneError
from cetane.files import file_identity, read_json
from cetane.validation import Data, Finite, validated

if TYPE_CHECKING:
    import torch

CONFIG, WEIGHTS, PICKLE = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
RESAVE = "save the adapter with peft again: save_pretrained writes safetensors"
MERGED_ELSEWHERE = "merge it with peft (merge_and_unload), and give the merged model"
PREFIX = "base_model.model."
"""The beginning of every tensor's name in peft's files."""
LARGEST_RANK = 4096
COMMIT = re.compile("[0-9a-f]{40}")
FLOATS = ("F32", "F16", "BF16")

NEUTRAL = {
    "auto_mapping", "inference_mode", "task_type", "peft_version", "target_modules",
    "exclude_modules", "lora_dropout", "fan_in_fan_out", "modules_to_save", "layers_to_transform",
    "layers_pattern", "megatron_core", "qalora_group_size", "loftq_config", "eva_config",
    "corda_config", "lora_ga_config", "runtime_config", "ensure_weight_tying",
}  # fmt: skip
"""Keys that do not change what an adapter computes: the file's tensors say what it changes. peft
itself ignores `fan_in_fan_out` for linear layers, and all layers here are linear."""
PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the base as it is."""
ATOM = r"(?:[\w.-]|\\[.d]|\[[\w-]+\])"
PATTERN = re.compile(rf"\^?(?:{ATOM}[*+]?)+\$?")
MOST_REPEATS, LONGEST_PATTERN, MOST_PATTERNS = 2, 200, 1024
"""Patterns of names are regular expressions of an untrusted file: without groups and with few
repeats, a match takes no long time. Each module is matched with all of them; the largest adapters
name each of some 900 modules."""

Pattern = Annotated[str, Field(max_length=LONGEST_PATTERN)]
Rank = Annotated[int, Field(ge=1, le=LARGEST_RANK)]


class LoraConfig(Data):
    """The keys of adapter_config.json that decide what an adapter computes."""

    peft_type: str = ""
    base_model_name_or_path: str | None = None
    revision: str | None = None
    r: Rank
    lora_alpha: Finite
    rank_pattern: dict[Pattern, Rank] = Field(default_factory=dict)
    alpha_pattern: dict[Pattern, Finite] = Field(default_factory=dict)
    use_rslora: bool = False
    use_dora: bool = False
    bias: Literal["none", "all", "lora_only"] = "none"
    init_lora_weights: bool | str | None = True

    def rank(self, module: str) -> int:
        return self.rank_pattern.get(matching(self.rank_pattern, module), self.r)

    def scale(self, module: str) -> float:
        """The factor on `up @ down`."""
        alpha = self.alpha_pattern.get(matching(self.alpha_pattern, module), self.lora_alpha)
        rank = self.rank(module)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def matching(patterns: Mapping[str, object], module: str) -> str:
    """The first pattern that a module's path ends with, as in peft; else the path."""
    return next((p for p in patterns if compiled(p).match(module)), module)


@lru_cache(2 * MOST_PATTERNS)  # for each module again; re itself keeps 512
def compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(rf"(.*\.)?({pattern})$")


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


def read_config(path: Path) -> LoraConfig:
    """The config of an adapter. CetaneError names a key that would change what it computes."""
    content = read_json(path, unique=True)
    kind = content.get("peft_type")
    if kind is None and "lora_parameters" in content:
        raise CetaneError(
            f"{path} is of mlx-lm; only adapters of peft are known",
            f"merge it: mlx_lm.fuse --model {content.get('model') or 'BASE'} --adapter-path"
            f" {path.parent} --save-path merged; then give the folder merged",
        )
    if kind != "LORA":
        raise CetaneError(f"{path}: peft_type is {kind!r}; only LORA is known", MERGED_ELSEWHERE)
    known = LoraConfig.model_fields.keys()
    for key, value in content.items():
        if key not in known and key not in NEUTRAL and value:
            raise CetaneError(f"{path}: {key} is not known here", MERGED_ELSEWHERE)
    config = validated(LoraConfig, {k: v for k, v in content.items() if k in known}, str(path))
    if config.init_lora_weights not in PLAIN_STARTS:
        raise CetaneError(
            f"{path}: init_lora_weights = {config.init_lora_weights!r} also changed the base",
            "convert it with peft: save_pretrained(..., path_initial_model_for_weight_conversion)",
        )
    for key, patterns in (("rank", config.rank_pattern), ("alpha", config.alpha_pattern)):
        if len(patterns) > MOST_PATTERNS:
            raise CetaneError(
                f"{path}: {key}_pattern has {len(patterns):,} entries, more than {MOST_PATTERNS:,}",
                MERGED_ELSEWHERE,
            )
        for pattern in patterns:
            check_pattern(pattern, path)
    return config


def check_pattern(pattern: str, path: Path) -> None:
    """Raise CetaneError for a pattern of names that might take long to match, or that is none."""
    if not is_plain(pattern):
        raise CetaneError(
            f"{path}: the pattern {pattern!r} is not a plain name of a module",
            "write names of modules, such as layers.0.self_attn.q_proj",
        )


def is_plain(pattern: str) -> bool:
    """Whether a pattern of names compiles, and is soon matched."""
    repeats = pattern.count("*") + pattern.count("+")
    if not PATTERN.fullmatch(pattern) or repeats > MOST_REPEATS:
        return False
    try:
        re.compile(pattern)
    except re.error:  # [z-a]
        return False
    return True


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
                replaced[self.replacement(own, stored)] = stored
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
        known = name if name in self.base else text_name(name) or name
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
