"""The comparison of two programs on the same inputs, op by op: the first op that errs, and why.

The second program runs twice. The first run is undisturbed, and shows how the error grows: the
`total`. In the second run, the first program's results replace all results as soon as they are
compared. So each op, or each group of ops that only the second program has, gets exact inputs. Its
error is then its `own`.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import inf, nan
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cetane.mil.bind import Watch
from cetane.mil.comparison import Comparison, Difference, InputRange, OpGap
from cetane.mil.dtypes import Array
from cetane.mil.executor import Executable, TensorState
from cetane.mil.gap import Gap, gap
from cetane.mil.lineage import Lineage
from cetane.mil.match import Match, match

ROUNDS = 8
"""The rounds of a loop that are compared, counted from the first."""


class Comparer:
    """Two compiled functions, matched once, for comparisons on any number of inputs."""

    def __init__(self, first: Executable, second: Executable) -> None:
        """Raises CetaneError if the two cannot take the same inputs."""
        self.first, self.second = first, second
        self.matching = match(first.function, second.function)
        self._names = {b: a for m in self.matching.matches for a, b in m.values}
        self._results = (*first.function.outputs, *first.function.states)
        self._lineages = Lineage(first.function), Lineage(second.function)
        self._constants = [tuple(self._differences(m)) for m in self.matching.matches]
        rounds = second.precision != "fp32" and first.precision == "fp32"
        self._half = {
            name
            for name, t in self._lineages[1].index.types.items()
            if rounds and t and t.dtype == "fp16"
        }

    def __call__(self, inputs: Mapping[str, Array], state: TensorState | None = None) -> Comparison:
        """Compare on some inputs and states, by default zeros. Neither is changed.

        All matched results of the first program are in memory at once.
        """
        inputs = {name: self._fitted(name, array) for name, array in inputs.items()}
        truth = {name: [_held(array)] for name, array in inputs.items()}
        wanted = set(self._names.values())

        def keep(name: str, value: Tensor) -> None:
            kept = truth.setdefault(name, []) if name in wanted else None
            if kept is not None and len(kept) < ROUNDS:
                kept.append(value)

        def run(executable: Executable, watch: Watch) -> dict[str, Any]:
            states = executable.make_state() if state is None else state.copy()
            with _seeded(), np.errstate(over="ignore"):
                results = executable(inputs, states, watch)
            return results | {name: states.read_state(name) for name in states.tensors}

        totals: dict[str, Gap] = {}
        owns: dict[str, Gap] = {}
        expected = run(self.first, keep)
        results = run(self.second, self._against(truth, totals, replacing=False))
        own_results = run(self.second, self._against(truth, owns, replacing=True))
        outputs = dict(self._outputs(expected, results, totals))
        own_outputs = {
            name: gap(expected[name], found)
            for name, found in own_results.items()
            if name in outputs and isinstance(found, np.ndarray)
        }
        return Comparison(
            ops=tuple(
                self._op(m, differences, a, b, owns[b], totals[b], truth)
                for m, differences in zip(self.matching.matches, self._constants, strict=True)
                for a, b in m.values
                if b in owns and b in totals  # else its branch was not taken
            ),
            outputs=outputs,
            own_outputs=own_outputs,
            only_first=tuple(f"{op.name} ({op.kind})" for op in self.matching.only_first),
            only_second=tuple(f"{op.name} ({op.kind})" for op in self.matching.only_second),
            missing=tuple(name for name in self._results if name not in outputs),
        )

    def _outputs(
        self, expected: Mapping[str, Any], results: Mapping[str, Any], totals: dict[str, Gap]
    ) -> Iterator[tuple[str, Gap]]:
        """The gaps of the first program's outputs and states, matched by name, else by op."""
        counterparts = {a: b for b, a in self._names.items()}
        for name in self._results:
            value, same = expected[name], results.get(name)
            if not isinstance(value, np.ndarray):  # a classifier's class
                yield name, Gap(float(value != same), nan, nan, (), (nan, nan))
            elif isinstance(same, np.ndarray):
                yield name, gap(value, same)
            elif counterparts.get(name) in totals:
                yield name, totals[counterparts[name]]

    def _against(
        self, truth: dict[str, list[Tensor]], gaps: dict[str, Gap], replacing: bool
    ) -> Watch:
        """A watch that compares each result of the second program. Of a loop it keeps the worst
        round."""
        seen: Counter[str] = Counter()

        def watch(name: str, value: Tensor) -> Tensor | None:
            wanted = truth.get(self._names.get(name, ""), [])
            number = seen[name]
            seen[name] += 1
            if number >= len(wanted):
                return None
            difference = gap(wanted[number].numpy(), value.numpy())
            gaps[name] = max(gaps.get(name, difference), difference, key=lambda g: g.relative)
            fits = wanted[number].shape == value.shape
            return wanted[number].to(value.dtype) if replacing and fits else None

        return watch

    def _op(
        self,
        m: Match,
        constants: tuple[Difference, ...],
        a: str,
        b: str,
        own: Gap,
        total: Gap,
        truth: dict[str, list[Tensor]],
    ) -> OpGap:
        """The gap of the value `b` of the second program from the value `a` of the first."""
        return OpGap(
            name=m.second.name,
            counterpart=a,
            kind=m.second.kind,
            scope=self._lineages[1].scopes.get(b, ""),
            own=own,
            total=total,
            rewired=m.rewired,
            constants=constants,
            inputs=tuple(
                InputRange(parameter, name, tuple(values[0].shape), *_range(values[0]))
                for parameter, name in self._lineages[1].inputs(m.second)
                if (values := truth.get(self._names.get(name, name)))
            ),
            largest=max(max(map(abs, _range(value))) for value in truth[a]),
            half=b in self._half,
        )

    def _differences(self, m: Match) -> Iterator[Difference]:
        """The constants that differ. Decodes one pair at a time."""
        if m.first is None or self.first.function is self.second.function:
            return
        for parameter in sorted(m.first.inputs.keys() & m.second.inputs.keys()):
            arguments = m.first.inputs[parameter], m.second.inputs[parameter]
            for ours, theirs in zip(*arguments, strict=False):
                a, b = self._lineages[0].constant(ours), self._lineages[1].constant(theirs)
                if a is None or b is None:
                    continue
                name = theirs if isinstance(theirs, str) else ""
                short = f"{_short(b)}, was {_short(a)}" if max(a.size, b.size) <= 8 else ""
                if a.dtype.kind in "US":
                    relative = 0.0 if np.array_equal(a, b) else inf
                else:
                    relative = gap(a, b).relative
                if relative:
                    yield Difference(parameter, name, relative, a.ndim > 0 and a.dtype.kind == "f",
                                     short)  # fmt: skip

    def _fitted(self, name: str, array: Array) -> Array:
        """An input, converted so that both programs take it unchanged."""
        functions = self.first.function, self.second.function
        half = any(f.inputs[name].dtype == "fp16" for f in functions if name in f.inputs)
        array = np.asarray(array)
        return array.astype(np.float16) if half and array.dtype.kind == "f" else array


@contextmanager
def _seeded() -> Iterator[None]:
    """A context in which random ops draw the same numbers in every run."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        yield


def _held(array: Array) -> Tensor:
    """An input in the form that a program holds."""
    return torch.from_numpy(np.array(array, np.float32 if array.dtype.kind == "f" else None))


def _range(value: Tensor) -> tuple[float, float]:
    """The least and the largest finite value; zeros if there is none."""
    finite = value.double()
    finite = finite[finite.isfinite()]
    return (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 0.0)


def _short(array: Array) -> str:
    return str(array.item() if array.size == 1 else array.tolist())
