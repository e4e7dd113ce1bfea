"""Apple's runtime, with a host that follows the rules of Apple's own engine.

The rules are those of `CoreAIStaticShapeEngine.swift` (apple/coreai-models at 86b363d): which
function runs, where its tokens start, what its mask shows.
"""

import asyncio
import os
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from cetane.errors import CetaneError
from cetane.export.coreai import contract
from cetane.export.coreai.converter import import_coreai
from cetane.schema.interface import MASKED

if TYPE_CHECKING:
    from coreai.runtime import NDArray

Logits = npt.NDArray[np.float32]


class AssetRunner:
    """An asset, open in Apple's runtime. A context manager."""

    def __init__(self, asset: Path) -> None:
        import_coreai()
        self.asset = asset
        self.loop = asyncio.Runner()
        self.stack = AsyncExitStack()
        self.functions: dict[str, Any] = {}

    def __enter__(self) -> Self:
        from coreai.authoring import AIModelAsset

        opened = AIModelAsset.load(self.asset).executable()
        self.model = self.loop.run(self.stack.enter_async_context(opened))
        calls = [n.split("_") for n in self.model.function_names if n.startswith(contract.EXTEND)]
        self.contexts = sorted({int(context) for _, context, _ in calls})
        self.widths = sorted({int(width) for _, _, width in calls})
        self.table = self.run(contract.LOAD, {})[contract.TABLE]
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.functions.clear()
        self.loop.run(self.stack.aclose())
        self.loop.close()

    def start(self, first: int = 0) -> None:
        """Start a sequence, with empty caches. Its first token is at position `first`, a multiple
        of every width."""
        self.first, self.tokens = first, list[int]()
        self.states: dict[str, NDArray] = {}
        self.length = 0

    def feed(self, tokens: Sequence[int]) -> Logits:
        """Append tokens. Returns the logits after the last one, fp32 `(V,)`.

        As in Apple's engine, calls are `prompt_opt` while more tokens are left than a call holds.
        Raises CetaneError for no tokens, and beyond the asset's context.
        """
        position = self.first + len(self.tokens)
        self.tokens += tokens
        logits: Logits | None = None
        if not tokens:
            raise CetaneError("a call needs a token")
        end = self.first + len(self.tokens)
        while position < end:
            left = end - position
            width = next((w for w in self.widths if w >= left), self.widths[-1])
            start = position // width * width
            stop = min(start + width, end)
            kind = contract.PROMPT if left > self.widths[-1] else contract.EXTEND
            made = self._call(kind, self._context(position), width, start, stop)
            if kind == contract.EXTEND:
                logits = made[0, 0, stop - start - 1].astype(np.float32)
            position = stop
        assert logits is not None
        return logits

    def _context(self, position: int) -> int:
        """The shortest context that holds a position."""
        for context in self.contexts:
            if context > position:
                return context
        raise CetaneError(
            f"position {position} is beyond the asset's context of {self.contexts[-1]}"
        )

    def _call(self, kind: str, context: int, width: int, start: int, stop: int) -> Any:
        """The logits of one call `(1, 1, T, V)`; of `prompt_opt` a number without meaning."""
        tokens = np.zeros((1, width), np.int32)
        tokens[0, : stop - start] = self.tokens[start - self.first : stop - self.first]
        mask = np.full((1, context, 1, width), MASKED, np.float16)
        for query in range(stop - start):
            mask[0, self.first : start + query + 1, 0, query] = 0
        rows = self.run(
            contract.gather_name(width),
            {contract.TOKENS: array(tokens), contract.TABLE: self.table},
        )
        inputs = {
            contract.HIDDEN: rows[contract.ROWS],
            contract.POSITIONS: array(np.arange(start, start + width, dtype=np.uint16)[None]),
            contract.STEP: array(np.array([start], np.int32)),
            contract.MASK: array(mask),
        }
        name = contract.call_name(kind, context, width)
        self._lengthen(name, context)
        return self.run(name, inputs, self.states)[contract.LOGITS].numpy()

    def _lengthen(self, name: str, context: int) -> None:
        """Make states of a context, with the columns that shorter ones hold."""
        if self.length == context:
            return
        describe = self._function(name).desc.state_descriptor
        states = {}
        for state in (contract.KEYS, contract.VALUES):
            content = np.zeros(describe(state).shape, np.float16)
            if self.length:
                content[..., : self.length] = self.states[state].numpy()
            states[state] = array(content)
        self.states, self.length = states, context

    def _function(self, name: str) -> Any:
        if name not in self.functions:
            with no_remarks():
                self.functions[name] = self.model.load_function(name)
        return self.functions[name]

    def run(
        self, name: str, inputs: dict[str, "NDArray"], states: dict[str, "NDArray"] | None = None
    ) -> dict[str, "NDArray"]:
        """The outputs of a function."""

        async def call() -> dict[str, "NDArray"]:
            outputs: dict[str, NDArray] = await self._function(name)(inputs, states or {})
            return outputs

        return self.loop.run(call())


@contextmanager
def no_remarks() -> Iterator[None]:
    """A context without the runtime's remarks: its library writes to the file of standard error."""
    kept = os.dup(2)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def array(values: npt.NDArray[Any]) -> "NDArray":
    from coreai.runtime import NDArray

    return NDArray(values)
