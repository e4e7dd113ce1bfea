"""The gate of a folder for ANEMLL: played by its hosts' rules, its logits must be the bundle's.

The export lowers the model once more, with masks, caches and rotary tables of its own. So the
bundle's gates say nothing about these graphs.
"""

from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from cetane.bundle import Bundle
from cetane.checkpoint import Checkpoint
from cetane.engine.authored import host_tables
from cetane.engine.engine import Engine
from cetane.engine.portable import PortableBackend
from cetane.export.anemll.contract import PREFILL
from cetane.export.anemll.host import ChatHost, Folder, PortableModels
from cetane.export.anemll.planner import AnemllPlanner
from cetane.families import Weights
from cetane.files import Progress
from cetane.gates.exported import (
    Span,
    bundle_logits,
    choice_check,
    chosen_logits_check,
    logit_checks,
)
from cetane.gates.probes import text_tokens
from cetane.gates.twin import TwinParameter, result_names
from cetane.gates.verdict import Check
from cetane.lower.template import shard_weights
from cetane.mil import Program
from cetane.mil.substitute import Substitute, substitute
from cetane.planner import Planner
from cetane.planner.encoding import Encoder
from cetane.schema.recipe import Recipe

STEPS = 12
"""Tokens that are fed one by one after every prefill, and compared."""
BATCHES = 2
"""Whole batches before them: the second reads what the first wrote."""
LONGEST = 1536
"""The most tokens of a play: more would take minutes."""


class Play(NamedTuple):
    """A text that a host reads."""

    prefill: int
    """The tokens that batches read. The last of them and all others are fed one by one."""
    tokens: int
    first: int = 0
    """The position of its first token, with nothing before it."""

    @property
    def span(self) -> Span:
        """The tokens that are fed one by one."""
        return Span(max(self.prefill - 1, 0), self.tokens, self.first)


def judge_anemll(
    bundle: Bundle, checkpoint: Checkpoint, path: Path, progress: Progress
) -> tuple[list[Check], list[str]]:
    """Compare a folder with the bundle from which it was exported, both in fp32.

    Returns the checks, and in words what was not judged. The bundle gets the rows of the embedding
    unrounded, since the folder has them in fp16, and the folder's codes of the head.
    """
    folder = Folder(path, PortableModels())
    plays, unjudged = plays_of(folder)
    tokens = text_tokens(bundle.tokenizer, max(play.tokens for play in plays))
    spans = [play.span for play in plays]
    progress("the bundle", 0, len(plays) + 1)
    truths = bundle_logits(engine_of(bundle, checkpoint), tokens, spans)
    checks = list[Check]()
    for done, (play, truth) in enumerate(zip(plays, truths, strict=True)):
        first, (start, stop, _) = play.first, play.span
        progress(f"{play.prefill} tokens and {stop - start} steps", done + 1, len(plays) + 1)
        host = ChatHost(folder, first)
        for at in range(0, play.prefill, folder.batch):
            host.run(tokens[at : at + folder.batch], first + at, PREFILL)
        # As theirs do, it feeds the last token of a prefill once more.
        made = [host.head(tokens[number], first + number) for number in range(start, stop)]
        choices = np.array([host.best(one) for one in made])
        where = f"steps {first + start} to {first + stop - 1} after a prefill of {play.prefill}"
        checks.append(choice_check(where, choices, truth))
        if folder.choose:
            values = np.array([one["argmax_val"].max() for one in made], np.float32)
            checks.append(chosen_logits_check(where, values, choices, truth))
        else:
            parts = [f"logits{number + 1}" for number in range(folder.parts)]
            rows = [np.concatenate([one[part].ravel() for part in parts]) for one in made]
            logits = np.stack(rows)[:, : truth.shape[1]].astype(np.float32)
            checks += logit_checks(where, logits, truth)
    progress("judged", len(spans) + 1, len(spans) + 1)
    return checks, unjudged


def plays_of(folder: Folder) -> tuple[list[Play], list[str]]:
    """What the hosts play, and what is not judged: no prefill, some batches, a whole window,
    batches beyond it, and the end of the context.

    A short context is played as a whole. The end of a longer one has nothing before it. That needs
    caches without a window: where all slots of a window are in use, no mask hides one.
    """
    context, batch, window = folder.context, folder.batch, folder.window
    most = context - STEPS + 1
    filled, slides = max(batch, most // batch * batch), window is not None and window < context
    lengths, unjudged = {0, min(BATCHES * batch, filled)}, []
    if window is not None and slides:
        wanted = (window, window + BATCHES * batch)
        beyond = {length for length in wanted if length <= min(filled, LONGEST)}
        if len(beyond) < 2:
            late = "batches" if beyond else "positions"
            unjudged.append(f"{late} beyond the window of {window} tokens")
        lengths |= beyond
    if context <= LONGEST:
        lengths.add(filled)
    plays = [Play(n, min(max(n - 1, 0) + STEPS, context)) for n in sorted(lengths)]
    if context <= LONGEST:
        plays[-1] = Play(filled, context)
        return plays, unjudged
    reached, judged_again = plays[-1].tokens, context
    if not slides:
        judged_again = most - BATCHES * batch
        plays.append(Play(BATCHES * batch, context - judged_again, judged_again))
    if reached < judged_again:
        unjudged.append(f"positions {reached:,} to {judged_again - 1:,}")
    return plays, unjudged


def engine_of(bundle: Bundle, checkpoint: Checkpoint) -> Engine:
    """The bundle in fp32, with the folder's values where the folder has others."""
    planner, tables = Planner(checkpoint, bundle.plan.recipe), bundle.tables()
    backend = PortableBackend(bundle)
    if tables.tokens is not None:  # the folder has these rows in fp16
        tables = replace(tables, tokens=host_tables(planner, checkpoint).tokens)
    if encoded_anew(bundle):
        backend = AsExported(bundle, planner, checkpoint)
    return Engine(bundle.plan, backend, tables)


def encoded_anew(bundle: Bundle) -> bool:
    """Whether the folder's codes of the embedding or the head may be others than the bundle's: an
    embedding inside a shard becomes fp16, and codes for a whole tensor depend on the head's parts.
    """
    recipe = bundle.plan.recipe
    form = recipe.compression.types.get("head", recipe.compression.default)
    forms = [form, *recipe.compression.names.values()]
    return recipe.embedding.inside or any(form.endswith("per-tensor") for form in forms)


class AsExported(PortableBackend):
    """A bundle's packages in fp32, with other values of the head and of an embedding inside: those
    of the folder's codes, and the checkpoint's."""

    def __init__(self, bundle: Bundle, planner: Planner, checkpoint: Checkpoint) -> None:
        super().__init__(bundle)
        self.planner = planner
        self.sources: dict[str | None, Weights] = {
            "head": FolderHead(checkpoint, bundle.plan.recipe), "embedding": checkpoint
        }  # fmt: skip

    def load(self, shard: str) -> Program:
        made = {
            name: Substitute(f"{shard}/{name}", TwinParameter(constant, source))
            for name, constant in result_names(shard_weights(self.planner, shard)).items()
            if (source := self.sources.get(constant.weight.kind)) is not None
        }
        return substitute(super().load(shard), lambda _: made)


class FolderHead:
    """The head's rows `(V, C)`, as the codes of the folder's parts give them."""

    def __init__(self, checkpoint: Checkpoint, recipe: Recipe) -> None:
        self.planner = AnemllPlanner(checkpoint, recipe)
        self.encoder = Encoder(checkpoint, self.planner.recipe.compression)

    @cached_property
    def rows(self) -> Tensor:
        weights = [weight for head in self.planner.heads for _, weight in head.weights()]
        parts = [self.encoder(weight).decode() for weight in weights if weight.kind is not None]
        return torch.cat([torch.from_numpy(part.reshape(len(part), -1)) for part in parts])

    def read(self, name: str) -> Tensor:
        return self.rows

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        return self.rows[start:stop]
