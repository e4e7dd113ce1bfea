"""What the Hugging Face model gives on the probes that a port has read.

Where its choice of experts is a near tie, it takes those of the port: mere rounding decides a tie.
"""

from collections.abc import Sequence

import numpy as np

from cetane.engine.backend import Array
from cetane.families import Truth
from cetane.gates.experts import Choices
from cetane.gates.limits import limits
from cetane.gates.observe import ProbeTask, Seen
from cetane.gates.probes import Probe
from cetane.gates.reference import Observed, Reference
from cetane.schema.recipe import Mode


class ModelResults:
    """The model's results on probes: tensors of all tokens, and logits of those that a port was
    judged on."""

    def __init__(
        self,
        observed: dict[str, Observed],
        kept: dict[str, Array],
        following: dict[tuple[Mode, str], Observed],
    ) -> None:
        """All are by the probe's name. `kept` are the numbers of the tokens with logits, ascending;
        `following` are a mode's own results, where it chose other experts near ties."""
        self.observed, self.kept, self.following = observed, kept, following

    @classmethod
    def ask(
        cls, reference: Reference, tasks: Sequence[ProbeTask], seen: Sequence[Seen],
        others: Sequence[Truth] = (), scale: float = 1.0,
    ) -> "ModelResults":  # fmt: skip
        """Ask the model for all that a port computed for some tasks, and for `others`.

        Where the model's choice of experts is a near tie, it takes those that the port shows.
        Hidden tensors are multiplied by `scale`, as the port's are."""
        judged: dict[str, list[Array]] = {}
        for task, ours in zip(tasks, seen, strict=True):
            judged.setdefault(task.probe.name, []).append(ours.at)
        kept = {name: np.unique(np.concatenate(numbers)) for name, numbers in judged.items()}
        wanted = dict.fromkeys([*others, *(truth for ours in seen for truth in ours.tensors)])

        def ask(probes: Sequence[Probe], choices: Sequence[Choices] = ()) -> list[Observed]:
            observed = reference.run(
                [probe.tokens for probe in probes],
                list(wanted),
                [probe.start for probe in probes],
                [probe.scale for probe in probes],
                [kept[probe.name].tolist() for probe in probes],
                choices=choices,
            )
            return [one.scaled(scale) for one in observed]

        probes = {task.probe.name: task.probe for task in tasks}
        observed = dict(zip(probes, ask([*probes.values()]), strict=True))
        following: dict[tuple[Mode, str], Observed] = {}
        for mode in dict.fromkeys(task.mode for task in tasks):  # each takes as much memory
            differing = [
                (task.probe, ours.choices)
                for task, ours in zip(tasks, seen, strict=True)
                if task.mode == mode and differ(observed[task.probe.name], ours.choices)
            ]
            if differing:
                mine, choices = zip(*differing, strict=True)
                own = ask(mine, choices)
                following |= {(mode, p.name): one for p, one in zip(mine, own, strict=True)}
        return cls(observed, kept, following)

    def of(self, probe: Probe, mode: Mode | None = None) -> Observed:
        """The results on a probe; with a mode, those to compare with what that mode computed."""
        if mode is not None and (mode, probe.name) in self.following:
            return self.following[mode, probe.name]
        return self.observed[probe.name]

    def logits(self, probe: Probe, at: Array, mode: Mode | None = None) -> Array:
        """Logits `(n, V)` of some tokens of a probe; the mode as in `of`."""
        rows: Array = self.of(probe, mode).logits[np.searchsorted(self.kept[probe.name], at)]
        return rows


def differ(theirs: Observed, ours: Choices) -> bool:
    """Whether a port chose other experts than the model where the model is undecided, or others
    are far."""
    tie = limits().structure.tie
    for layer, (at, experts, far) in ours.items():
        if layer in theirs.margins:
            near = theirs.margins[layer][at] < tie
            if (experts[near] != theirs.experts[layer][at][near]).any():
                return True
            if far is not None and (far[near] != theirs.far[layer][at][near]).any():
                return True
    return False
