"""Rounded weights that learn to answer as the model does.

The student is the model with its rounded layers. It reads text that the model wrote. Palettes,
scales and roundings follow the gradient of the KL from the model's answers. This is knowledge
distillation. Sources: LLM-QAT (arXiv 2305.17888), and AQLM for tuning the whole model after it was
rounded (arXiv 2401.06118).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from cetane.files import Progress, disk_errors, replacing
from cetane.fitting.bfloat16 import bfloat16_products, has_bfloat16
from cetane.fitting.seats import Seat, is_linear, own_copy
from cetane.fitting.teacher import Answers
from cetane.fitting.tunable import Tunable
from cetane.threads import available

log = logging.getLogger("cetane.fitting")

RATE, PULL = 0.016, 0.003
"""The first step sizes, in distances between two levels. `RATE`, divided by the number of levels,
moves a level. `PULL` moves an element's wish. Both fall to zero as time runs out. At 16 levels,
steps of 0.004 made SmolLM2 worse for 150 steps, and steps of 0.001 better from the first on. A pull
of 0.02 spoilt it within ten steps: elements that move at once no longer make up for each other."""
WARM = 10
"""Steps until the rate is whole: the means of gradients need some steps to settle."""
JUDGED, SHARE = 32, 1 / 8
"""The first sequences of the text judge the student, and are not learnt from: `JUDGED` of them, but
no more than `SHARE` of the text. The least text that is written allows for `JUDGED`. So a run that
goes on with more text judges by the same ones, and by none that it learnt."""
SAID = "minutes", "seconds", "pace"
"""What a checkpoint says of its run, beside the weights."""
EVERY = 1 / 12
"""The part of the time that lies between two judgements."""


def sizes(kind: str) -> tuple[int, int]:
    """Tokens of a step, and the most that are in memory at a time, on a kind of device.

    On a CPU, in two bits, 30 steps of 512 tokens at twice the rate did more than 35 of 2,048. On a
    GPU a step launches some 20,000 kernels, so few tokens take as long as many. On an H100, a step
    of 4,096 tokens of SmolLM2 took 0.4 s; other sizes were not tried.
    """
    return (512, 1024) if kind == "cpu" else (4096, 4096)


class Student:
    """A transformers model, some of whose weights are rounded and learn."""

    def __init__(
        self, model: Any, seats: Mapping[str, Seat], weights: Mapping[str, Tunable]
    ) -> None:
        """`seats` and `weights` have the same names, and are on the model's device. The student
        changes the model itself."""
        self.model, self.seats, self.weights = model, seats, weights
        dtype = torch.bfloat16 if has_bfloat16(model.device.type) else torch.float32
        for module in model.modules():
            if is_linear(module):
                module.weight.data = module.weight.data.to(dtype)
        self.parameters = list(
            {id(seat.parameter): seat.parameter for seat in seats.values()}.values()
        )
        """The parameters that learn; several weights may share one."""
        for parameter in self.parameters:
            own_copy(parameter, dtype).requires_grad_(True)
        self.write()

    def write(self) -> None:
        """Copy the rounded values into the model."""
        for name, weight in self.weights.items():
            self.seats[name].write(weight.values)

    def divergence(self, answers: Answers) -> Tensor:
        """The mean KL from some answers."""
        with bfloat16_products(self.model):
            logits = self.model(answers.tokens.to(self.model.device), use_cache=False).logits
        return answers.divergence(logits)

    def step(self, share: float, number: int) -> None:
        """Learn from the gradients that the parameters have gathered, at this share of the
        rates."""

        def learn(name: str) -> None:
            seat, weight = self.seats[name], self.weights[name]
            assert seat.parameter.grad is not None
            gradient = seat.read(seat.parameter.grad).float()
            weight.step(gradient, RATE * share / 2**weight.bits, number, PULL * share)
            seat.write(weight.values)

        if self.model.device.type == "cpu":
            with ThreadPoolExecutor(available()) as pool:
                list(pool.map(learn, self.weights))
        else:  # threads would only wait for each other to launch
            for name in self.weights:
                learn(name)
        for parameter in self.parameters:
            parameter.grad = None


@dataclass
class Tuner:
    """Lets a student learn a model's answers for some time.

    From time to time the student is judged on text that it does not learn from. If it is better
    than before, its weights are kept at `checkpoint`. If not, it goes back to the kept weights and
    takes half as large steps. The right size is not known before: few bits need large steps, many
    bits small ones, and a model's size and text matter too.
    """

    student: Student
    answers: Answers
    checkpoint: Path
    progress: Progress
    minutes: float = 0.0
    """The minutes to learn, those of interrupted runs among them."""
    seconds: float = 0.0
    """Seconds of learning so far, with those of interrupted runs."""
    pace: float = 1.0
    """The factor of the rates; a worse judgement halves it."""
    number: int = 0
    """Steps since the start, or since the student last went back to kept weights."""
    losses: list[float] = field(default_factory=list)
    """The KL of every step."""

    def run(self, minutes: float) -> bool:
        """Learn for some minutes, or go on from the checkpoint of an interrupted run, for its own.

        Returns whether the student is nearer to the model than it was before all runs.
        """
        every = torch.arange(len(self.answers.tokens))
        count = min(max(1, round(len(every) * SHARE)), JUDGED)
        judged = self.answers.batch(every[:count])
        # a short human text repeats in several batches, but no sequence may judge and be learnt
        aside = {tuple(row) for row in judged.tokens.tolist()}
        rows = self.answers.tokens[count:].tolist()
        learnt = every[count:][torch.tensor([tuple(row) not in aside for row in rows])]
        self.minutes = minutes
        before = best = self.judge(judged)
        if self.resume():
            best = self.judge(judged)
        else:
            self.keep()
        started, next_ = time.perf_counter(), self.done + EVERY
        random = torch.Generator().manual_seed(1)
        while self.done < 1:
            for part in learnt[torch.randperm(len(learnt), generator=random)].split(self.together):
                self.step(part, self.pace * (1 - self.done))
                now = time.perf_counter()
                self.seconds, started = self.seconds + now - started, now
                done = self.done
                self.progress(self.told, min(round(100 * done), 100), 100)
                if done >= min(next_, 1):
                    best, next_ = self.better(judged, best), done + EVERY
                if done >= 1:
                    break
        self.progress(f"tuned, KL on text kept aside {before:.4f} -> {best:.4f}", 100, 100)
        return best < before

    @property
    def done(self) -> float:
        """The part of the minutes that is over."""
        return self.seconds / (60 * self.minutes)

    def better(self, judged: Answers, best: float) -> float:
        """Keep a student with a KL below `best`, else go back; returns the KL of what is kept."""
        now = self.judge(judged)
        if not now < best:  # NaN is no better either
            self.restore()
            self.pace, self.number, now = self.pace / 2, 0, best
        self.keep()
        return now

    @property
    def told(self) -> str:
        """A message of progress, with the mean KL of the last 20 steps."""
        recent = self.losses[-20:]
        return f"tuning, KL {sum(recent) / max(1, len(recent)):.4f}"

    def step(self, rows: Tensor, share: float) -> None:
        """Learn from some sequences, at this share of the rates."""
        loss = 0.0
        for part in rows.split(self.piece):
            divergence = self.student.divergence(self.answers.batch(part)) * len(part) / len(rows)
            divergence.backward()
            loss += float(divergence.detach())
        self.losses.append(loss)
        self.number += 1
        self.student.step(share * min(1.0, self.number / WARM), self.number)

    @property
    def together(self) -> int:
        """Sequences of a step."""
        return self.sequences(sizes(self.student.model.device.type)[0])

    @property
    def piece(self) -> int:
        """Sequences that are in memory at a time."""
        return self.sequences(sizes(self.student.model.device.type)[1])

    def sequences(self, tokens: int) -> int:
        """The sequences of so many tokens, at least one."""
        return max(1, tokens // self.answers.tokens.shape[1])

    @torch.no_grad()
    def judge(self, answers: Answers) -> float:
        """The KL of the student from some answers."""
        parts = torch.arange(len(answers.tokens)).split(self.piece)
        sums = [float(self.student.divergence(answers.batch(part))) * len(part) for part in parts]
        return sum(sums) / len(answers.tokens)

    def keep(self) -> None:
        """Write the checkpoint: all weights, the minutes, the seconds and the pace."""
        tensors = {f"{name}/{part}": tensor.contiguous()
                   for name, weight in self.student.weights.items()
                   for part, tensor in weight.state().items()}  # fmt: skip
        self.checkpoint.parent.mkdir(parents=True, exist_ok=True)
        with disk_errors(self.checkpoint), replacing(self.checkpoint) as temporary:
            said = {name: str(getattr(self, name)) for name in SAID}
            save_file(tensors, temporary, said)

    def resume(self) -> bool:
        """Go on from an interrupted run's checkpoint; False if there is none of these weights."""
        try:
            with safe_open(self.checkpoint, "pt") as file:
                said = file.metadata() or {}
            figures = [float(said[name]) for name in SAID]
            self.restore()
        except (OSError, SafetensorError, KeyError, ValueError):
            return False
        self.minutes, self.seconds, self.pace = figures
        log.info("tuning goes on after %.1f of its %.1f minutes", self.seconds / 60, self.minutes)
        return True

    def restore(self) -> None:
        """Go back to the weights of the checkpoint."""
        tensors = load_file(self.checkpoint)
        states = {name: {part: tensors[f"{name}/{part}"] for part in weight.state()}
                  for name, weight in self.student.weights.items()}  # fmt: skip
        for name, weight in self.student.weights.items():
            weight.restore(states[name])
        self.student.write()
