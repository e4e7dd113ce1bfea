"""From a checkpoint and a compression to constants that are fitted to the model; made once."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cetane.checkpoint import Checkpoint
from cetane.compress import Format, Selection
from cetane.compress.fitted import FittedConstants, FittedFile, folder, kept, save
from cetane.errors import CetaneError
from cetane.families import Weight
from cetane.files import Progress, check_writable, claimed, disk_errors, json_sha256, remove
from cetane.fitting.attention import fuse_attention
from cetane.fitting.bfloat16 import narrowed
from cetane.fitting.experts import ExpertCollector, modules_of_experts
from cetane.fitting.human_text import EDITION, check_text, human_text, length_of, start_token
from cetane.fitting.importance import (
    Collector,
    Importance,
    importance,
    keep_importance,
    load_importance,
)
from cetane.fitting.lessons import lessons
from cetane.fitting.openings import openings
from cetane.fitting.own_text import TextWriter
from cetane.fitting.rounding import Rounder
from cetane.fitting.seats import Seat, linear_layers, seats_in
from cetane.fitting.teacher import Answers
from cetane.fitting.tunable import Tunable, tunable
from cetane.fitting.tune import Student, Tuner
from cetane.gates.reference import RESIDENT, Reference
from cetane.gates.resemblance import arrays, too_far
from cetane.hardware.memory import give_back
from cetane.planner import Planner
from cetane.planner.encoding import can_be_fitted
from cetane.planner.weights import format_of, refuse_damaged
from cetane.schema.changes import override

if TYPE_CHECKING:
    from cetane.compress.encoded import Encoded

VERSION, READING = 13, 8
"""The versions of fitted constants, and of what they are fitted on: texts, importance and lessons.
Those of another version are made anew. A change of rounding alone keeps texts, which take most of
the time. Another version of Python keeps them too: its documentation differs, but serves as
well."""
SEQUENCES, SEED = 192, 1
"""The sequences and the seed of the model's own text that layers are rounded by.

With a third of these 49,152 tokens, SmolLM2's four bits cost other text 18 % more KL."""
READ = 96
"""The most windows of human text that are read beside it."""
QUICK = 1 / 5
"""The share of sequences and windows that `second_order.effort = "quick"` reads."""
WRITING = 1 / 3
"""The share of tuning's minutes that may write its text. Text that is kept costs none."""


def fit(checkpoint: Checkpoint, planner: Planner, progress: Progress) -> FittedFile:
    """The constants of a planner's compression, from the cache folder if they are there.

    Only weights whose formats have a second order are fitted; all others are encoded plainly.
    Raises CetaneError if there is no such weight, and for a text that is too short. So it does for
    tuning a model that does not fit in memory.
    """
    compression, formats = planner.recipe.compression, fitted_formats(planner)
    key = key_of(checkpoint, formats, compression)
    known = kept(key)
    if known is not None:
        return known
    check_formats(planner)
    check_text(checkpoint, planner)
    check_writable(folder() / key)
    if compression.method != "tuned":
        refuse_damaged(checkpoint, planner.model, planner.blocks)  # before it writes a text
        rounder = Fitter(checkpoint, planner, progress).rounded(formats, compression)
        return save(rounder.constants, key, checkpoint.content, rounder.harms)
    check_size(checkpoint)
    before = override(planner.recipe, {"compression.method": "gptq"})
    first = fit(checkpoint, Planner(checkpoint, before, planner), progress).read()
    partial = folder() / f"{key}.tuning"
    work = Fitter(checkpoint, planner, progress)
    with claimed(partial, "tuning", "wait until it has ended: its constants will be used again"):
        tuned = work.tuned(first, formats, compression.minutes, partial)
        made = save(tuned, key, checkpoint.content, first.harms)
        remove(partial)
    return made


def check_formats(planner: Planner) -> None:
    """Raise CetaneError if no weight has a format that the recipe's method fits."""
    if not fitted_formats(planner):
        raise CetaneError(
            f'compression.method = "{planner.recipe.compression.method}" fits palettes and int4 '
            "per channel, of 6 bits at most, and no weight has such a format",
            'name one in compression.default, or take method = "plain"',
        )


def check_size(checkpoint: Checkpoint) -> None:
    """Raise CetaneError for a model that is too large to learn: now, not after its rounding."""
    if not Reference(checkpoint, own=True).resident:
        raise CetaneError(
            f'compression.method = "tuned": the model has more than {RESIDENT >> 30} GiB of fp32 '
            "weights, too many to learn here",
            'compression.method = "gptq" takes one layer at a time',
        )


def key_of(checkpoint: Checkpoint, formats: Mapping[str, Format], compression: Selection) -> str:
    """A hash of what the constants depend on."""
    tuned = compression.method == "tuned"
    content = [
        VERSION, checkpoint.content, compression.method,
        compression.minutes if tuned else None, compression.second_order.model_dump(),
        {name: form.name for name, form in formats.items()},
        EDITION if compression.text is None else compression.text.sha256,
    ]  # fmt: skip
    return json_sha256(content)


def fitted_formats(planner: Planner) -> dict[str, Format]:
    """The formats of the matrices that can be fitted, by name. All parts of such a matrix have one
    format."""
    formats: dict[str, Format | None] = {}
    for block in planner.blocks:
        for _, weight in block.weights():
            if weight.kind is None:
                continue
            form = format_of(weight, planner.recipe.compression)
            own = form if can_be_fitted(weight, form) else None
            if formats.setdefault(weight.matrix, own) != own:
                formats[weight.matrix] = None
    return {name: form for name, form in formats.items() if form is not None}


def fitted_parts(planner: Planner, formats: Mapping[str, Format]) -> dict[str, Weight]:
    """The weights with a format that are no whole matrix of the checkpoint, by the names of their
    matrices: experts, and rows in another order. Each is a whole one, though a projection may have
    it in two parts."""
    found: dict[str, Weight] = {}
    for block in planner.blocks:
        for _, weight in block.weights():
            if weight.matrix != weight.name and weight.matrix in formats:
                inputs = weight.columns[1] if weight.columns else weight.shape[1]
                found[weight.matrix] = replace(
                    weight, shape=(weight.shape[0], inputs), columns=None
                )
    return found


class Fitter:
    """Fits constants to one model, whose weights it changes."""

    def __init__(self, checkpoint: Checkpoint, planner: Planner, progress: Progress) -> None:
        reference = Reference(checkpoint, own=True)
        self.model, self.resident, self.progress = reference.model, reference.resident, progress
        self.checkpoint = checkpoint
        untie(self.model)
        fuse_attention(self.model)
        self.names = {
            path: own["weight"] for path, own in reference.names.items() if "weight" in own
        }
        self.tensors = reference.names
        self.start, self.length = start_token(checkpoint), length_of(planner)
        self.planner = planner
        given = planner.recipe.compression.text
        self.given_hash = "" if given is None else given.sha256
        if self.resident:  # this reads all weights, so that they can be narrowed
            self.model(torch.tensor([[self.start]]), use_cache=False)

    def rounded(self, formats: Mapping[str, Format], compression: Selection) -> Rounder:
        """The rounder after all layers, with their constants and predicted harms."""
        method, parts = compression.method, fitted_parts(self.planner, formats)
        quick = method == "gptq" and compression.second_order.effort == "quick"
        if self.resident and method != "weighted" and not quick:
            text, importances = self.important({*formats, *(w.name for w in parts.values())})
        else:
            text, importances = self.text(QUICK if quick else 1), {}
        rounder = Rounder(
            formats, method, self.progress, importances, compression.second_order, parts.values()
        )
        rounder.run(self.model, self.names, text, self.tensors)
        return rounder

    def important(self, names: Iterable[str]) -> tuple[Tensor, dict[str, Importance]]:
        """The text of `text`, and the importance of the named layers there.

        Both depend on no format, so all formats share one file of them.
        """
        wanted = frozenset(names)
        layers = linear_layers(self.model, self.names, wanted)
        collectors = [Collector(name, layer) for name, layer in layers.items()]
        for module, own in modules_of_experts(self.model, self.tensors):
            if wanted & set(own.values()):
                collectors.append(ExpertCollector(own, module))
        size = [SEQUENCES, READ, self.length]
        read = sorted(one.name for one in collectors)
        content = [READING, self.checkpoint.content, *size, read, self.given_hash]
        path = folder() / f"{json_sha256(content)}.importance"
        known = load_importance(path)
        if known is not None:
            return known
        text = self.text()
        with narrowed(self.model):
            made = importance(self.model, collectors, text, self.progress)
        give_back()  # the pass's gradients
        with suppress(CetaneError), disk_errors(path):  # a cache may be full or locked
            keep_importance(path, text, made)
        return text, made

    def tuned(
        self, first: FittedConstants, formats: Mapping[str, Format], minutes: float, partial: Path
    ) -> dict[str, Encoded]:
        """Constants that were tuned for some minutes, from the `first` ones on.

        If tuning makes the model worse, all first ones stay. Else those stay whose weight moved so
        far that the gate would take it for another one. `partial` is the tuner's checkpoint.
        """
        started = time.perf_counter()
        self.model.to(device())  # here the model writes, answers and learns
        # an interrupted run has spent its time to write, and goes on with what was left of it
        answers = self.lessons(0 if partial.exists() else 60 * minutes * WRITING)
        parts = fitted_parts(self.planner, formats)
        seats = seats_in(self.model, self.names, self.tensors, formats, parts)
        constants: dict[str, Encoded] = {}
        weights: dict[str, Tunable] = {}
        for name, seat in seats.items():
            values = seat.read(seat.parameter.detach()).float()
            made = first.of(name, tuple(values.shape), formats[name], None, None)
            if made is not None:
                constants[name], weights[name] = made, tunable(made, values)
        student = Student(self.model, {name: seats[name] for name in weights}, weights)
        spent = (time.perf_counter() - started) / 60
        if Tuner(student, answers, partial, self.progress).run(max(minutes - spent, minutes / 2)):
            for number, (name, weight) in enumerate(weights.items()):
                self.progress(f"comparing {name.removesuffix('.weight')}", number, len(weights))
                learnt = weight.encoded()
                if self.near(seats[name], learnt, formats[name]):
                    constants[name] = learnt
        return constants

    def near(self, seat: Seat, made: Encoded, form: Format) -> bool:
        """Whether the gate takes constants for those of this weight.

        They are compared with the checkpoint's values, since the model's have learnt.
        """
        values = seat.stored(self.checkpoint).float().numpy()
        return too_far(arrays(made), values, form) is None

    @property
    def writer(self) -> TextWriter:
        """The model, about to write text of its own."""
        begun = openings(self.checkpoint.tokenizer)
        return TextWriter(self.model, self.start, self.length, begun, self.progress)

    def lessons(self, seconds: float) -> Answers:
        """The text to learn from, and the model's answers to it. They depend on no format."""
        content = [READING, self.checkpoint.content, self.length, self.given_hash]
        place = folder() / f"{json_sha256(content)}.lessons"
        human = human_text(self.checkpoint, self.planner)
        unread = human[READ:] if len(human) >= 2 * READ else human
        return lessons(self.writer, unread, place, seconds)

    def text(self, share: float = 1) -> Tensor:
        """The model's own text, then human text, int64 `(sequences, length)`. `share` is the part
        of all sequences."""
        count, read = (max(round(share * whole), 1) for whole in (SEQUENCES, READ))
        content = [READING, self.checkpoint.content, count, self.length, SEED]
        place = folder() / f"{json_sha256(content)}.text"
        # a model that is not resident keeps no weights that could be narrowed
        with narrowed(self.model) if self.resident else nullcontext():
            own = self.writer.write(count, SEED, place)
        return torch.cat([own, human_text(self.checkpoint, self.planner)[:read]])


def untie(model: Any) -> None:
    """Give a model's head a weight of its own: rounding it must not change the embeddings."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head.weight is embedding.weight:
        head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=False)


def device() -> str:
    """The name of the fastest torch device of this machine."""
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"
