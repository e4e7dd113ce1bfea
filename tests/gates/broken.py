"""Broken recipes and ports, and the cause that the gate must name for each."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from cetane.engine import host
from cetane.engine.session import gather
from cetane.families import Blend
from cetane.gates import observe
from cetane.gates.explain import Cause

from .mutations.ports import AuthoredPort
from .mutations.table import PORT, TABLE


@dataclass(frozen=True)
class Broken:
    """A port that is refused, what broke it, and what the gate must say."""

    name: str
    family: str
    cause: Cause
    says: str
    """Words of the sentence."""
    recipe: dict[str, Any] = field(default_factory=dict)
    """Tables of its recipe."""
    form: str = "fp16"
    change: Callable[[AuthoredPort], None] = lambda port: None
    bug: Callable[[pytest.MonkeyPatch], None] = lambda patch: None
    """A mistake in cetane itself, from the port's making to its explanation."""
    mends: str | None = None
    """The change of the recipe that the gate must offer."""

    @contextmanager
    def at_work(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            self.bug(patch)
            yield


@contextmanager
def converting_with(bug: Callable[[pytest.MonkeyPatch], None], cache: Path) -> Iterator[None]:
    """A mistake in cetane while it converts. No other test takes these programs from a cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CETANE_CACHE", str(cache))
        bug(patch)
        yield


def write_one_slot_off(patch: pytest.MonkeyPatch) -> None:
    """The graph of the contract `blend` writes beside the slot that the mask shows."""
    write = Blend.write
    patch.setattr(Blend, "write", lambda *given: write(*given).roll(1, -1))


def hide_the_oldest(patch: pytest.MonkeyPatch) -> None:
    """The host's masks of calls of 4 tokens hide the first one."""
    mask = host.mask

    def changed(source: Any, call: Any, dtype: type) -> Any:
        made = mask(source, call, dtype)
        if call.width == 4:
            made[..., 0] = -4e4
        return made

    patch.setattr(host, "mask", changed)


def give_the_first_row(patch: pytest.MonkeyPatch) -> None:
    """Who asks for the last token's logits gets those of its call's first one."""

    def changed(calls: Any, wanted: Any) -> Any:
        rows = calls[-1].logits.rows
        return rows[0].copy() if wanted == "last" else gather(calls, wanted)

    patch.setattr(observe, "gather", changed)


def named(name: str) -> Callable[[AuthoredPort], None]:
    return TABLE[name].change


BROKEN = [
    Broken("query weights doubled in the package", "llama", "weights", "q_proj.weight",
           change=named("stored queries doubled")),
    Broken("one element of a package is off", "llama", "weights", "down_proj.weight",
           form="4 bits", change=named("one stored element is off")),
    Broken("rows of the embedding moved by one", "llama", "weights", "rows are not the model's",
           change=named("embedding rows one off")),
    Broken("a recipe without the q/k norm", "zaya", "authoring", "attn-00",
           {"family": {"departures": ["no-qk-norm"]}, "layout": {"kind": "per-block"}},
           mends="[family]\ndepartures = []"),
    Broken("a recipe of four departures", "zaya", "authoring", "the model",
           {"family": {"departures": list(PORT)}}, form="4 bits",
           mends="[family]\ndepartures = []"),
    Broken("a recipe that cuts full attention", "gemma3", "authoring", "the model",
           {"family": {"full_window": 32}}, mends="[family]\nfull_window = 160"),
    Broken("conversion permutes query heads", "llama", "conversion", "chunk-01",
           change=named("query heads of the wrong group")),
    Broken("conversion takes the other GELU", "gemma3", "conversion", "activations",
           change=named("gelu in its other form, or for silu")),
    Broken("the contract writes another slot", "llama", "contract", "a cache or a mask",
           {"cache": {"contract": "blend", "context": 160}}, bug=write_one_slot_off,
           mends='[cache]\ncontract = "readonly"'),
    Broken("masks of T = 4 hide a token", "llama", "contract", "of verify is wrong",
           bug=hide_the_oldest),
    Broken("refused tokens stay in histories", "lfm2", "contract", "tokens after a draft",
           change=named("refused columns are kept")),
    Broken("branches of a tree see each other", "llama", "contract", "--speculative none",
           change=named("branches see each other")),
    Broken("a rewind leaves windows as they are", "gemma3", "contract", "--prefixes 0",
           change=named("a mark shares its windows with later calls")),
    Broken("the last token's logits are another's", "llama", "contract", "last token alone",
           bug=give_the_first_row),
    Broken("one bit a weight", "llama", "compression", "allows",
           {"quality": "good"}, form="palette1-kmeans-per-tensor",
           mends='[compression]\ndefault = "palette6-kmeans-group32"'),
    Broken("four bits a row", "llama", "compression", "int4 rows",
           {"quality": "near-lossless", "embedding": {"format": "int4"}},
           mends='[embedding]\nformat = "int8"'),
]  # fmt: skip
