"""The judgement of compressions that are not built yet: the authored modules read a text with a
candidate's weights, and the golden gate's own checks judge the results."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from typing import TypeVar

import numpy as np

from cetane.checkpoint import Checkpoint
from cetane.compress import Selection
from cetane.errors import CetaneError
from cetane.files import Progress, read_json, write_json
from cetane.gates.compressions import Judge, Window, plain
from cetane.gates.limits import limits
from cetane.gates.probes import english, text_tokens
from cetane.gates.quality import Agreement
from cetane.pipeline.judgement import Judgement
from cetane.schema.manifest import producers
from cetane.schema.recipe import Recipe
from cetane.store import cache_store
from cetane.tasks.task import task_key
from cetane.validation import Data, validated

Kept = TypeVar("Kept", bound=Data)

WINDOW = 128
"""Tokens that are judged together, in one call: a large vocabulary's logits take 134 MB."""
FILE = "figure.json"
DECIDING = {"family", "embedding", "head", "quality", "compression"}
"""The recipe's tables on which a judgement depends. It also depends on the caches
(`CandidateJudge.key`)."""


class CandidateJudge:
    """Judges candidates for one model on one text. The store keeps the judgements."""

    def __init__(self, checkpoint: Checkpoint, recipe: Recipe, progress: Progress) -> None:
        self.checkpoint, self.recipe, self.progress = checkpoint, recipe, progress
        ask = limits().evidence
        count = ask.positions if recipe.compression.mix_to is None else ask.most
        """Mixes of few bits are near to their limits, and only a long text decides about them."""
        self.tokens = text_tokens(checkpoint.tokenizer, count, english())

    @cached_property
    def model(self) -> Judge:
        self.progress("weights to choose by", 0, 1)
        return Judge(self.checkpoint, self.recipe, WINDOW)

    @cached_property
    def truth(self) -> list[Window]:
        """The results of the fp16 weights on the text."""
        self.model.compress(Selection())
        self.model.store_rows("fp16")
        return list(self.model.read(self.tokens))

    def release(self) -> None:
        """Give the memory of the weights and of the results back."""
        for name in ("model", "truth"):
            self.__dict__.pop(name, None)

    def __call__(self, candidate: Recipe) -> Judgement:
        """What a candidate costs, judged now or by an earlier port."""

        def measure() -> Judgement:
            self.progress(f"is {candidate.compression.default} {self.recipe.quality}", 0, 1)
            truth = self.truth
            self.model.compress(candidate.compression)
            self.model.store_rows(candidate.embedding.rows)
            return Judgement(checks=tuple(self.compare(truth).judge(self.recipe)))

        return self.kept(Judgement, candidate, measure)

    def compare(self, truth: Sequence[Window]) -> Agreement:
        """The model's results on some windows, with its weights as they are now, against earlier
        results."""
        plan = self.model.engine.plan
        agreement = Agreement(self.recipe, plan.choosable, plan.vocab)
        for before in truth:
            now, targets = self.model.window(before.tokens), np.asarray(before.tokens[1:])
            theirs = before.logits[:-1]
            if self.recipe.head.subset is not None:  # tokens that the subset lacks do not count
                theirs = self.model.predictions(theirs)
            agreement.add(now.logits[:-1], theirs, targets)
        return agreement

    def kept(self, kind: type[Kept], candidate: Recipe, make: Callable[[], Kept]) -> Kept:
        """A figure of a candidate: the store's, or made now and kept."""
        known = self.stored(kind, candidate)
        if known is not None:
            return known
        made = make()
        content = made.model_dump(mode="json")
        key = self.key(kind, candidate)
        cache_store.keep(key, lambda folder: write_json(folder / FILE, content), measured=True)
        return made

    def known(self, candidate: Recipe) -> Judgement | None:
        """An earlier port's judgement of a candidate; None if there is none. Reads no weight."""
        return self.stored(Judgement, candidate)

    def stored(self, kind: type[Kept], candidate: Recipe) -> Kept | None:
        """A figure of a candidate, if the store has it."""
        with cache_store.opened(self.key(kind, candidate)) as folder, suppress(CetaneError):
            return None if folder is None else validated(kind, read_json(folder / FILE), FILE)
        return None

    def key(self, kind: type[Data], candidate: Recipe) -> str:
        """A hash of everything that a figure depends on, limits and other data included."""
        recipe = candidate.model_dump(mode="json", include=DECIDING)
        recipe["cache"] = plain(candidate, WINDOW).cache.model_dump(mode="json")
        return task_key(kind.__name__, self.checkpoint.content, recipe, self.tokens, producers())
