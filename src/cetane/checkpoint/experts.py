"""Experts that are stored one by one, as the tensors of all experts of a layer.

transformers 5 keeps the experts of a layer in two tensors, `gate_up_proj (E, 2I, H)` and `down_proj
(E, H, I)`. Files on disk have three matrices for each expert, or those two tensors. Nemotron-H has
no gates: `up_proj (E, I, H)`, and two matrices for each expert.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

from cetane.checkpoint.stored_tensors import JoinedTensor, StackedTensor, StoredTensor
from cetane.errors import CetaneError

_HOMES = {
    "mlp": "mlp", "feed_forward": "feed_forward", "block_sparse_moe": "mlp", "mixer": "mixer",
}  # fmt: skip
"""The part of a layer that has the experts in transformers, by its name on disk."""
_EXPERT = re.compile(rf"(.+)\.({'|'.join(_HOMES)})\.experts\.(0|[1-9][0-9]{{0,5}})\.(\w+)\.weight")
_UNGATED = ".mixer"
"""The end of the name of a part whose experts have no gates."""
_MATRICES = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up",
             "w2": "down"}  # fmt: skip
"""The matrices of an expert; Mixtral's and LFM2's have numbers."""

Matrices = dict[str, dict[int, StoredTensor]]
"""The matrices of a layer's experts, by kind and number."""


def stack_experts(tensors: dict[str, StoredTensor], path: Path) -> dict[str, StoredTensor]:
    """The tensors, with all experts of a layer in two.

    `path` is the checkpoint's config.json. Raises CetaneError for experts that are missing or
    differ.
    """
    rest: dict[str, StoredTensor] = {}
    layers: defaultdict[str, Matrices] = defaultdict(lambda: defaultdict(dict))
    for name, tensor in tensors.items():
        match = _EXPERT.fullmatch(name)
        if match is None or match[4] not in _MATRICES:
            rest[name] = tensor
        else:
            home = f"{match[1]}.{_HOMES[match[2]]}"
            layers[home][_MATRICES[match[4]]][int(match[3])] = tensor
    for home, matrices in layers.items():
        where = f"{path.parent}: the experts of {home}"
        kinds = ("up", "down") if home.endswith(_UNGATED) else ("gate", "up", "down")
        if {kind: sorted(numbers) for kind, numbers in matrices.items()} != {
            kind: list(range(len(matrices["up"]))) for kind in kinds
        }:
            raise CetaneError(f"{where} are not all there", "download the rest")
        *gate, up, down = (numbered(matrices[kind], where) for kind in kinds)
        first, stacked = ("gate_up_proj", joined(gate[0], up, where)) if gate else ("up_proj", up)
        rest[f"{home}.experts.{first}"] = StackedTensor.stack(tuple(stacked))
        rest[f"{home}.experts.down_proj"] = StackedTensor.stack(tuple(down))
    return rest


def numbered(matrices: dict[int, StoredTensor], where: str) -> list[StoredTensor]:
    """The matrices in the order of their numbers. CetaneError unless they are alike."""
    inorder = [matrices[number] for number in sorted(matrices)]
    if len({(one.shape, one.dtype) for one in inorder}) > 1 or len(inorder[0].shape) != 2:
        raise CetaneError(f"{where} have different shapes or dtypes")
    return inorder


def joined(gate: list[StoredTensor], up: list[StoredTensor], where: str) -> list[JoinedTensor]:
    """Each expert's gates, and its ups below them. CetaneError unless they are alike."""
    kinds = [f"{one.shape} in {one.dtype}" for one in (gate[0], up[0])]
    if kinds[0] != kinds[1]:
        raise CetaneError(
            f"{where} have gates of {kinds[0]}, but {kinds[1]} beside them",
            "load the model with transformers in one dtype, and save it",
        )
    return [JoinedTensor.join(pair) for pair in zip(gate, up, strict=True)]
