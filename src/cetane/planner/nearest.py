"""The family that is nearest to an architecture which cetane does not know."""

import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass

from cetane.errors import CetaneError
from cetane.families import ADDING, author, families
from cetane.hardware.quiet import quiet_transformers
from cetane.planner.weights import ModelSource, check_layers

UPKEEP = re.compile(
    r"_|architectures$|model_type$|transformers_version$|(torch_)?dtype$|use_cache$|auto_map$"
    r"|.*_token_id$|.*dropout$|initializer_range$|pretraining_tp$|.*pdrop$"
)
"""Keys of a config that change no result of a model."""
LAYER = re.compile(r"model\.layers\.(\d+)\.")
"""How the names of a layer's tensors begin, in every family."""
FEWEST_EXPERTS = dict.fromkeys(
    ("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"), 1
)
"""For a config that counts no experts. transformers' defaults are up to 512 a layer, which take a
minute to make; their number changes no tensor's name."""


@dataclass(frozen=True)
class FamilyCandidate:
    """A family, and the tensors that it would read of a checkpoint's model."""

    model_type: str
    tensors: set[str]
    share: float
    """The tensors that it has in common with the checkpoint, as a share of all of both."""

    @property
    def keys(self) -> set[str]:
        """The keys that the family reads from a config, as its protocols list them.

        `num_hidden_layers` is always among them: transformers makes `layer_types` from it.
        """
        members = vars(families()[self.model_type]).values()
        protocols = [one for one in members if isinstance(one, type)
                     and one.__name__.endswith("Config")]  # fmt: skip
        bases = [base for protocol in protocols for base in protocol.__mro__]
        keys = {key for base in bases for key in getattr(base, "__annotations__", {})}
        return keys | {"num_hidden_layers"}


@dataclass(frozen=True)
class Nearest:
    """A family, and what keeps it from being the model's. Names have `*` for a layer's number."""

    model_type: str
    reads: int
    """The tensors of the checkpoint that the family would read."""
    tensors: int
    unread: tuple[str, ...]
    """Tensors that it would not read."""
    missing: tuple[str, ...]
    """Tensors that it needs, and the checkpoint lacks."""
    keys: tuple[str, ...]
    """Keys of the config that it does not read."""


def nearest_family(checkpoint: ModelSource) -> Nearest | None:
    """The family that would read most of a checkpoint's tensors; None if no family reads any.

    A tie goes to the family that reads most keys of the config. Of these it goes to the one with
    the fewest tensors, and last to the one whose module has its name. CetaneError for a config with
    more layers than the checkpoint has tensors: every family would make them all.
    """
    check_layers(checkpoint)

    def rank(candidate: FamilyCandidate) -> tuple[float, int, int, bool]:
        kind = candidate.model_type
        named = families()[kind].__name__.endswith(f".{kind}")
        read = len(candidate.keys & checkpoint.config.keys())
        return candidate.share, read, -len(candidate.tensors), named

    names = set(checkpoint.names())
    best = max(candidates(checkpoint, names), key=rank, default=None)
    if best is None or best.share == 0:
        return None
    known = best.keys
    return Nearest(
        model_type=best.model_type,
        reads=len(best.tensors & names),
        tensors=len(names),
        unread=patterns(names - best.tensors),
        missing=patterns(best.tensors - names),
        keys=tuple(k for k in checkpoint.config if k not in known and not UPKEEP.match(k)),
    )


def candidates(checkpoint: ModelSource, names: set[str]) -> Iterator[FamilyCandidate]:
    """Every family whose config a checkpoint's can be; none for a checkpoint without their layers.

    `names` are those of the checkpoint's tensors.

    A config that lacks the number of layers has those of the checkpoint: transformers' defaults are
    up to 48. The activation changes no tensor, so one that cetane does not know is no obstacle.
    """
    layers = {found[1] for name in names if (found := LAYER.match(name))}
    if not layers:
        return
    known = FEWEST_EXPERTS | {"num_hidden_layers": len(layers)} | checkpoint.config
    for kind in sorted(families()):
        with suppress(CetaneError), quiet_transformers():  # a config that is none of this family's
            config = known | {"model_type": kind, "hidden_act": "silu"}
            wanted = author(config, "c1t", {}, checkpoint).tensors()
            yield FamilyCandidate(kind, wanted, len(wanted & names) / len(wanted | names))


def patterns(names: Collection[str]) -> tuple[str, ...]:
    """Names with `*` in place of numbers, each once, sorted."""
    return tuple(sorted({re.sub(r"\.\d+\.", ".*.", name) for name in names}))


def refuse_unknown(checkpoint: ModelSource) -> None:
    """Raise CetaneError for a checkpoint of an architecture that no family has."""
    kind = checkpoint.config.get("model_type")
    if not isinstance(kind, str) or not kind or kind in families():
        return
    near = nearest_family(checkpoint)
    if near is None:
        return  # `parse_config` lists the families
    raise CetaneError(
        f"unknown architecture {kind!r}; nearest is {near.model_type}, which {described(near)}",
        f"cetane inspect MODEL lists what it does not read; how to add a family: {ADDING}",
    )


def described(near: Nearest) -> str:
    """What a family reads of a model, and what it misses there: a family that reads every tensor
    may still be another model."""
    read = f"reads {near.reads} of its {near.tensors} tensors"
    if not near.missing:
        return read
    first, *more = near.missing
    return f"{read}, and misses {first}" + (f" and {len(more)} more" if more else "")
