"""Runs the shard of a draft head: its inputs, its cache, and which columns of that count."""

from collections.abc import Sequence
from math import prod

import numpy as np

from cetane.bundle import Bundle
from cetane.bundle.draft_heads import TRAIN_AGAIN, HeadShard
from cetane.bundle.tables import Tables
from cetane.engine.backend import Array, Arrays, Backend
from cetane.engine.host import EMPTY, Call, host_input, place
from cetane.errors import CetaneError
from cetane.schema.function import Function
from cetane.schema.interface import FromCache, FromTensor, ToCache, ToTensor, hidden_shape


class HeadRunner:
    """An opened head. Logits are fp32, over the tokens of `vocabulary (R,)`."""

    def __init__(self, head: HeadShard, bundle: Bundle, backend: Backend) -> None:
        manifest = head.manifest
        self.head, self.steps, self.dtype = head, manifest.steps, backend.dtype
        self.vocabulary = np.array(head.vocabulary())
        self.order, self.hidden = bundle.plan.recipe.tensor_layout, bundle.plan.hidden
        self.tables = Tables(bundle.tables().embedding, head.rotary())
        self.functions = {function.name: function for function in manifest.functions}
        self.program = backend.open(head.name)
        self.slots = dict(manifest.caches)
        self.caches: Arrays = {
            item.source.name: np.zeros(item.shape, self.dtype)
            for function in manifest.functions
            for item in function.inputs
            if isinstance(item.source, FromCache)
        }
        self.forget()
        for function in manifest.functions:  # nothing compiles while somebody waits for tokens
            tensors = {
                item.source.name: np.zeros(item.shape, self.dtype)
                for item in function.inputs
                if isinstance(item.source, FromTensor)
            }
            self.call(function, [0], tensors)
        self.forget()

    def forget(self) -> None:
        """A new sequence begins."""
        self.held = {name: np.full(slots.count, EMPTY) for name, slots in self.slots.items()}
        """By cache group: the position that every slot holds."""
        self.done = 0
        """Positions that are certain."""

    def call(
        self, function: Function, tokens: Sequence[int], tensors: Arrays, at: int = 0
    ) -> Arrays:
        """Call a function for tokens at positions from `at`, and write their columns into the
        cache; what it hands on, by name."""
        positions = at + np.arange(len(tokens))
        groups = {
            name: place(slots, self.held[name], positions, function.tokens)
            for name, slots in self.slots.items()
        }
        call = Call(np.asarray(tokens), positions, function.tokens, self.order, groups)
        inputs = {}
        for item in function.inputs:
            if isinstance(item.source, FromTensor):
                inputs[item.name] = tensors[item.source.name]
            elif isinstance(item.source, FromCache):
                inputs[item.name] = self.caches[item.source.name]
            else:
                inputs[item.name] = host_input(item, call, self.tables, self.dtype)
        outputs = self.program.call(function.name, inputs, None)
        made: Arrays = {}
        for output in function.outputs:
            value = outputs.get(output.name)
            if value is None or value.size != prod(output.shape):  # a package is not to be trusted
                raise CetaneError(
                    f"{self.head.path}: {function.name} does not give the {output.name} of its "
                    "manifest",
                    TRAIN_AGAIN,
                )
            if isinstance(output.sink, ToCache):
                targets = groups[output.sink.group].targets
                self.caches[output.sink.name][..., targets] = value[..., : len(tokens)]
            elif isinstance(output.sink, ToTensor):
                made[output.sink.name] = value.reshape(value.shape[1], -1)
        self.held = {name: placed.slots for name, placed in groups.items()}
        return made

    def columns(self, rows: Array, width: int) -> Array:
        """Rows `(n, C)` as the hidden tensor of a call, padded to its width."""
        padded = np.zeros((rows.shape[1], width), self.dtype)
        padded[:, : len(rows)] = rows.T
        return padded.reshape(hidden_shape(self.order, *padded.shape))


class MedusaRunner(HeadRunner):
    """All tokens of a draft from one hidden state."""

    def draft(self, last: Array) -> Array:
        """Logits `(steps, R)` from the last hidden state `(C,)` of the last token that was fed."""
        tensors = {"hidden": self.columns(last[None], 1)}
        made = self.call(self.functions["draft"], [0], tensors)
        return made["logits"].T.astype(np.float32)


class Eagle3Runner(HeadRunner):
    """Follows the tokens that are certain, then goes on from its own output, of which it keeps
    nothing."""

    def forget(self) -> None:
        super().forget()
        self.drafted = 0
        """Tokens after those that are certain."""
        self.made = np.zeros((self.hidden, 1), self.dtype)

    @property
    def room(self) -> int:
        """How many more tokens its cache has room for."""
        return min(slots.count for slots in self.slots.values()) - self.done - self.drafted

    def follow(self, features: Array, after: Sequence[int]) -> Array:
        """Run over tokens that are certain: hidden states `(n, 3, C)`, n > 0, and the tokens after
        them. Logits `(R,)` of the token after the last."""
        for held in self.held.values():
            held[held >= self.done] = EMPTY
        self.drafted = 0
        rows, tokens = features.reshape(len(features), -1), after
        follow = self.functions["follow"]
        while len(rows) > follow.tokens:
            function = self.functions.get("read", follow)
            count = min(function.tokens, len(rows) - 1)
            self.take(function, rows[:count], tokens[:count])
            rows, tokens = rows[count:], tokens[count:]
        return self.keep(self.take(follow, rows, tokens))

    def take(self, function: Function, rows: Array, tokens: Sequence[int]) -> Arrays:
        """A call for tokens that are certain."""
        tensors = {"features": self.columns(rows, function.tokens)}
        made = self.call(function, tokens, tensors, self.done)
        self.done += len(tokens)
        return {name: value[:, : len(tokens)] for name, value in made.items()}

    def step(self, token: int) -> Array:
        """Go on with a drafted token; logits `(R,)` of the one after it."""
        tensors = {"hidden": self.columns(self.made.T, 1)}
        at = self.done + self.drafted
        self.drafted += 1
        return self.keep(self.call(self.functions["draft"], [token], tensors, at))

    def keep(self, made: Arrays) -> Array:
        self.made = made["hidden"][:, -1:]
        return made["logits"][:, -1].astype(np.float32)


def open_runner(head: HeadShard, bundle: Bundle, backend: Backend) -> MedusaRunner | Eagle3Runner:
    """Open a bundle's head; `backend` is one of its shard."""
    return (MedusaRunner if head.name == "medusa" else Eagle3Runner)(head, bundle, backend)
