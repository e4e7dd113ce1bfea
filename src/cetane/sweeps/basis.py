"""The model that a sweep judges, in one basis of its channels: the checkpoint's own, or the turned
one (`compression.rotate`). A basis is the truth of its own points, since their hidden states are in
it."""

from collections.abc import Sequence
from functools import cached_property

from cetane.checkpoint import Checkpoint
from cetane.compress import Selection
from cetane.files import Progress
from cetane.gates.compressions import Judge, Window
from cetane.planner import Planner, as_recipe_asks
from cetane.schema.recipe import Recipe
from cetane.sweeps import smoke


class Basis:
    """A model in one basis. Its weights are loaded for the first figure that needs them, and run in
    fp16 first."""

    def __init__(self, checkpoint: Checkpoint, recipe: Recipe, progress: Progress) -> None:
        """`recipe` says by `compression.rotate` which basis it is."""
        self.recipe, self.progress = recipe, progress
        self.checkpoint = as_recipe_asks(checkpoint, recipe)
        self.planner = Planner(self.checkpoint, recipe)
        self.read: dict[tuple[int, ...], list[Window]] = {}
        """The fp16 weights' results on texts."""

    @cached_property
    def judge(self) -> Judge:
        self.progress("weights", 0, 1)
        return Judge(self.checkpoint, self.recipe)

    def truth(self, tokens: Sequence[int]) -> list[Window]:
        """The fp16 weights' results on a text."""
        key = tuple(tokens)
        if key not in self.read:
            self.judge.compress(Selection())
            self.read[key] = list(self.judge.read(tokens))
        return self.read[key]

    @cached_property
    def answers(self) -> list[list[int]]:
        """The fp16 weights' answers to the smoke prompts."""
        self.judge.compress(Selection())
        return smoke.ask(self.judge)

    def release(self) -> None:
        """Give the memory of the weights back; results stay."""
        self.__dict__.pop("judge", None)
