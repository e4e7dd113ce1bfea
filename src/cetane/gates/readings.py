"""Readings: epsilons, activations, bounds, rotary tables, roundings and choices. No probe shows
them well: gates read them.

An epsilon has no effect beside an ordinary residual stream. The two forms of GELU differ by at most
5e-4, and not near zero. A bound has no effect on tokens that do not reach it, and a probe has few
of a model's tokens. A wrong rotary base changes the first positions only a little.
A twin rounds no keys and values, so it does not show whether the port rounds them.
A head chooses by tables of numbers, and a probe chooses few rows.
"""

import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol, get_args

import numpy as np
import torch

from cetane.engine.backend import Array
from cetane.engine.engine import Engine
from cetane.families import LEAST_SCALE, RAISED_ANSWERS, last_to_halves
from cetane.gates.bounds import Tightened
from cetane.gates.heads import Chooser
from cetane.gates.model_results import ModelResults
from cetane.gates.observe import ProbeTask, observe, whole_calls
from cetane.gates.probes import SEED
from cetane.gates.reference import Reference, decoder_of
from cetane.gates.structure import deviations
from cetane.gates.verdict import Check, at_most
from cetane.hardware import LARGEST_FP16
from cetane.lower.tracing import SMALLEST_FP16
from cetane.planner import Planner
from cetane.schema.function import Route, Step
from cetane.schema.plan import Plan
from cetane.validation import Data

Kind = Literal["epsilons", "activations", "bounds", "rotary tables", "roundings", "choices"]
Activation = Callable[[Array], Array]
GRID = np.linspace(-10, 10, 2001, dtype=np.float32)
"""The points at which activations are compared. Beyond them, all activations are 0 or x."""
NEAR = 1e-5
"""The largest distance of two forms of one activation. Two activations differ 100 times as much."""
POSITIONS = 512
"""The number of the context's positions at which rotary tables are compared, the last included."""
NEAR_ANGLE = 1e-3
"""The largest distance of cosines and sines. Both sides round the same products, so right ones
agree to some 1e-7."""
GUARD = LEAST_SCALE
"""A bound up to this magnitude, cetane's own among them, only keeps a division or a logarithm from
zero. The least step of Nemotron-H's Mamba-2, 0.001, is above it."""
MOST_CODE = 127
"""The largest code that rounding to 8 bits gives."""
OWN_BOUND = 1.0
"""The bound of cetane's choice among equal largest numbers, which changes no result."""


class Readable(Protocol):
    """A port, or its torch modules, from which the gates read."""

    planner: Planner

    def epsilons(self, shard: str) -> dict[str, float]:
        """The epsilons of a shard's norms, by name."""

    def activations(self, shard: str) -> dict[str, Activation]:
        """The activations of a shard, by name; fp32, of any shape."""

    def bounds(self, shard: str) -> dict[str, list[float]]:
        """By function of a shard, the numbers of its clamps, minima, maxima and softcaps."""

    def roundings(self, shard: str) -> dict[str, int]:
        """By function of a shard, the number of tensors of keys or values that it rounds before it
        reads them and gives them to a cache of 8 bits."""

    def choosers(self, shard: str) -> dict[str, Chooser | None]:
        """By function and slice of the head, what chooses a row; None if that is not by the logits
        alone."""

    @property
    def shipped(self) -> Engine:
        """The port with its rounding, in fp32; one shard in memory at a time."""

    def tightened(self, others: Mapping[float, float]) -> Engine:
        """The twin with other bounds, by those that they replace, in fp16."""


class Misread(Data):
    """A value in a port that the model does not have."""

    kind: Kind
    shard: str
    """The shard's name; `tables` for the host's tables."""
    problem: str


def misread(port: Readable, reference: Reference) -> Iterator[Misread]:
    """All values in a port's programs and tables that the model does not have."""
    yield from wrong_epsilons(port, reference)
    yield from wrong_activations(port, reference)
    wrong = [*wrong_bounds(port, reference)]
    yield from wrong or misplaced_bounds(port, reference)
    yield from wrong_rotary(port, reference)
    wrong = [*wrong_roundings(port)]
    yield from wrong or coarse_roundings(port)
    yield from wrong_choices(port)


def wrong_epsilons(port: Readable, reference: Reference) -> Iterator[Misread]:
    """Norms with an epsilon that the model does not have."""
    scale = port.planner.model.residual_scale or 1.0
    known = {factor * own for own in epsilons(reference) for factor in (1.0, scale**2)}
    for shard in port.planner.members:
        for name, epsilon in port.epsilons(shard).items():
            if not any(abs(epsilon - own) <= SMALLEST_FP16 + 0.01 * own for own in known):
                problem = f"{name} has epsilon {epsilon:.3g}"
                yield Misread(kind="epsilons", shard=shard, problem=problem)


def epsilons(reference: Reference) -> set[float]:
    """The epsilons of the model's norms; 0 for norms without one."""
    modules = list(reference.model.modules())
    own = {
        float(value)
        for module in modules
        for name in ("variance_epsilon", "eps")
        if isinstance(value := getattr(module, name, None), float)
    }
    if any(type(module).__name__ == "OlmoLayerNorm" for module in modules):
        own.add(1e-5)  # a number in its code
    bare = any("qk_norm" in type(module).__name__.lower() for module in modules)
    deltas = delta_rules(reference)
    # The delta rule adds 1e-6 to the square of a length (transformers' `l2norm`), not to its mean.
    own |= {1e-6 / module.head_k_dim for module in deltas}
    norms = [getattr(module, "norm", None) or module.o_norm for module in deltas]
    own |= {norm.variance_epsilon * RAISED_ANSWERS**2 for norm in norms}
    return own | ({0.0} if bare or reference.model.config.model_type == "zaya" else set())


def delta_rules(reference: Reference) -> list[Any]:
    """The model's modules of the delta rule."""
    return [module for module in reference.model.modules() if hasattr(module, "head_k_dim")]


ACTIVATION_NAMES = ("act", "act_fn", "activation_fn", "gelu_impl")
"""The names under which transformers' modules keep an activation."""


def wrong_activations(port: Readable, reference: Reference) -> Iterator[Misread]:
    """Activations that the model does not have.

    A model that calls functions in place of modules shows none, so none of the port's is wrong."""
    known = [module(torch.from_numpy(GRID)).numpy() for module in activations(reference)]
    for shard in port.planner.members:
        for name, activation in port.activations(shard).items():
            own = activation(GRID)
            if known and not any(np.abs(own - other).max() <= NEAR for other in known):
                problem = f"{name} is none of the model's activations"
                yield Misread(kind="activations", shard=shard, problem=problem)


def activations(reference: Reference) -> list[Any]:
    """The model's activations, one of each kind."""
    kept = [
        module
        for owner in reference.model.modules()
        for name in ACTIVATION_NAMES
        if (module := getattr(owner, name, None)) is not None
    ]
    if any(hasattr(module, "A_log") for module in reference.model.modules()):
        kept.append(torch.nn.SiLU())  # gates call it as a function, whatever the config says
    if any(type(module).__name__ == "ReLUSquaredActivation" for module in kept):
        kept.append(torch.nn.ReLU())  # a program squares it by a product
    if any(type(module).__name__ == "XIELUActivation" for module in kept):
        kept.append(torch.nn.ReLU())  # a program splits its input by it
    if any(getattr(owner, "activation_sparsity", 0) > 0 for owner in reference.model.modules()):
        kept.append(torch.nn.ReLU())  # sparse gates call it as a function
    return list({str(module): module for module in kept}.values())


def wrong_bounds(port: Readable, reference: Reference) -> Iterator[Misread]:
    """Bounds that the model has nowhere, and functions that lack a bound of a module which they
    compute.

    A function may state a bound more often than the model's code does: for some experts apart."""
    noted = [*bounds(reference)]
    known = {value for _, values in noted for value in values}
    for shard in port.planner.members:
        found = port.bounds(shard)
        for graph in port.planner.graphs(shard):
            name, adapter = graph.function.name, graph.function.adapter
            used = {weight.name for block in graph.blocks for _, weight in block.weights(adapter)}
            own = Counter(bounding(found.get(name, ())))
            wanted = Counter(v for names, values in noted if names & used for v in values)
            problems = [f"{name} has a bound of {v:.4g} on activations" for v in own.keys() - known]
            problems += [f"{name} lacks a bound of {v:.4g} on activations" for v in wanted - own]
            for problem in problems:
                yield Misread(kind="bounds", shard=shard, problem=problem)


def misplaced_bounds(port: Readable, reference: Reference) -> Iterator[Misread]:
    """Shards whose bounds hold other tensors than the model's.

    Both run with bounds so tight that every token reaches them. Two kinds keep their numbers:
    softcaps, which all tokens show, and `OWN_BOUND`, which modules have too."""
    others = tighter(reference)
    if not others:
        return
    engine, planner = port.tightened(others), port.planner
    tasks = random_calls(engine.plan)
    seen = observe(engine, planner, tasks)
    with Tightened(others):
        scale = planner.model.residual_scale or 1.0
        truths = ModelResults.ask(reference, tasks, seen, scale=scale)
    for one in deviations(engine.plan, planner, tasks, seen, truths):
        if one.relative > one.limit:
            problem = (
                f"with tighter bounds, {one.tensor} errs by {one.relative:.2g} ({one.mode}): "
                "they hold other tensors than the model's"
            )
            yield Misread(kind="bounds", shard=one.shard, problem=problem)


def random_calls(plan: Plan) -> list[ProbeTask]:
    """`whole_calls` on tokens of the whole vocabulary: always the same ones."""

    def drawn(count: int) -> tuple[int, ...]:
        return tuple(np.random.default_rng(SEED).integers(plan.vocab, size=count).tolist())

    return whole_calls(plan, "random", drawn)


def tighter(reference: Reference) -> dict[float, float]:
    """By the model's bounds on activations, bounds that most activations reach.

    A positive one that holds only from below rises. The others fall, all by one factor."""
    raised, falling, factor = dict[float, float](), set[float](), 1.0
    for own in reference.bounds.values():
        values = bounding(own.bounds)
        if not values or not 0 < own.magnitude < np.inf:
            continue
        power = math.log2(own.magnitude / max(map(abs, values)))
        if np.inf in own.bounds and min(values) > 0:
            risen = values[0] * 2.0 ** max(0, math.ceil(power))
            raised[values[0]] = max(risen, raised.get(values[0], 0))
        else:
            falling |= {*values}
            factor = min(factor, 2.0 ** math.floor(power))
    return raised | {value: factor * value for value in sorted(falling - {OWN_BOUND})}


def bounds(reference: Reference) -> Iterator[tuple[set[str], list[float]]]:
    """The bounds that each line of the model's code sets, behind the parameters of its module.

    The whole model's line has no parameters here: the host applies the softcap of logits."""
    for (path, _), held in reference.bounds.items():
        inside = (own for p, own in reference.names.items() if f"{p}.".startswith(f"{path}."))
        names = {name for own in inside for name in own.values()}
        yield names, bounding(held.bounds)


def bounding(values: Iterable[float]) -> list[float]:
    """The bounds that activations may meet, in fp16 as programs keep them."""
    halves = np.array([*values], np.float32).clip(-LARGEST_FP16, LARGEST_FP16).astype(np.float16)
    return [float(half) for half in halves if GUARD < abs(half) < LARGEST_FP16]


ROTARY_NAMES = ("rotary_embs", "rotary_emb", "pos_emb")
"""The names under which transformers' models keep their rotary tables. Whoever has the first, a
list of one for each base, does not use the second."""
SINES_FIRST = {"CodeGenRotaryEmbedding", "GPTJRotaryEmbedding"}
"""The modules that give sines before cosines."""


def wrong_rotary(port: Readable, reference: Reference) -> Iterator[Misread]:
    """Rotary tables that the model does not have, up to the end of the context."""
    model, context = port.planner.model, port.planner.recipe.cache.context
    at = np.unique(np.linspace(0, context - 1, min(context, POSITIONS), dtype=np.int64))
    known = list(rotary_tables(reference, torch.from_numpy(at)))
    for name, table in model.rotary.items():
        own = table.cos_sin(context).numpy()[:, at]
        if not any(o.shape == own.shape and np.abs(own - o).max() <= NEAR_ANGLE for o in known):
            problem = f"the angles of rotary-{name} are none of the model's"
            yield Misread(kind="rotary tables", shard="tables", problem=problem)


@torch.inference_mode()
def rotary_tables(reference: Reference, positions: torch.Tensor) -> Iterator[Array]:
    """The model's cosines and sines `(2, n, D)` of positions `(n,)`, for every kind of layer; none
    of a model without positions."""
    parts = dict(decoder_of(reference.model).named_children())
    found = next((parts[name] for name in ROTARY_NAMES if name in parts), torch.nn.ModuleList())
    for rotary in found if isinstance(found, torch.nn.ModuleList) else [found]:
        yield from tables_of(reference, rotary, positions)


def tables_of(
    reference: Reference, rotary: torch.nn.Module, positions: torch.Tensor
) -> Iterator[Array]:
    """Those of one of its modules."""
    kinds: list[dict[str, str]] = [{}]
    if "layer_type" in inspect.signature(rotary.forward).parameters:
        types = getattr(rotary, "layer_types", reference.model.config.layer_types)
        kinds = [{"layer_type": kind} for kind in dict.fromkeys(types)]
    for kind in kinds:
        made = rotary(torch.zeros(1), positions[None], **kind)
        cos, sin = (made.real, made.imag) if isinstance(made, torch.Tensor) else made
        if type(rotary).__name__ in SINES_FIRST:
            cos, sin = sin, cos
        halves = torch.stack([cos[0], sin[0]])
        yield halves.numpy()
        yield torch.cat([halves, halves], -1).numpy()  # some models keep one angle of each pair
        yield last_to_halves(halves).numpy()  # Cohere keeps both, beside each other


def wrong_roundings(port: Readable) -> Iterator[Misread]:
    """Functions that do not round the keys and values of every layer for their caches of 8 bits."""
    if port.planner.recipe.cache.format == "fp16":
        return
    for shard in port.planner.members:
        found = port.roundings(shard)
        for graph in port.planner.graphs(shard):
            name, inputs = graph.function.name, graph.function.inputs
            wanted = sum(item.shape[0] for item in inputs if item.dtype == "int8")
            rounded = found.get(name, 0)
            if rounded != wanted:
                problem = f"{name} rounds {rounded} of {wanted} tensors of keys and values"
                yield Misread(kind="roundings", shard=shard, problem=problem)


def coarse_roundings(port: Readable) -> Iterator[Misread]:
    """Functions that round some key or value to a few steps. A code is 127 at most: so much is the
    largest one of every token and head, unless its scale is the least of all.

    No text shows this of every function, and the twin rounds nothing."""
    if port.planner.recipe.cache.format == "fp16":
        return
    engine = port.shipped
    codes = Codes()
    observe(engine, port.planner, random_calls(engine.plan), watch=[codes.keep])
    for (shard, name), worst in codes.worst.items():
        if worst != MOST_CODE:
            problem = f"{name} rounds keys and values to {worst:.4g} steps, not to {MOST_CODE}"
            yield Misread(kind="roundings", shard=shard, problem=problem)


def wrong_choices(port: Readable) -> Iterator[Misread]:
    """Functions that do not choose a row of the head where its logit is the largest."""
    for shard in port.planner.members:
        for name, chooser in port.choosers(shard).items():
            if chooser is None:
                problem = f"{name} does not choose by its logits alone"
            elif wrong := chooser.wrong_rows():
                problem = f"{name} chooses {len(wrong)} rows wrongly, such as row {wrong[0]}"
            else:
                continue
            yield Misread(kind="choices", shard=shard, problem=problem)


class Codes:
    """Watches the codes that functions give to caches of 8 bits."""

    def __init__(self) -> None:
        self.worst: dict[tuple[str, str], float] = {}
        """By shard and function, of every token's and head's largest codes the one that is furthest
        from `MOST_CODE`."""
        self._given: dict[str, Array] = {}
        """The newest outputs, until both codes and scales are there."""

    def keep(self, step: Step | Route, name: str, value: Array, tokens: int) -> None:
        """Take an output of a call. Codes are `(..., D, T)`, scales `(..., 1, T)`."""
        self._given[name] = value[..., :tokens]
        tensor = name.removesuffix("_out").removesuffix("_scales")
        both = f"{tensor}_out", f"{tensor}_scales_out"
        if isinstance(step, Step) and self._given.keys() >= {*both}:
            codes, scales = (self._given.pop(one) for one in both)
            largest = np.abs(codes).max(-2, keepdims=True)[scales > LEAST_SCALE]
            key = step.shard, step.function
            every = [self.worst.get(key, MOST_CODE), *largest.tolist()]
            self.worst[key] = max(every, key=lambda code: abs(code - MOST_CODE))


def judge_readings(problems: Sequence[Misread]) -> Iterator[Check]:
    """The checks of all readings: none may be wrong."""
    for kind in get_args(Kind):
        count = sum(problem.kind == kind for problem in problems)
        yield at_most(f"structure: wrong {kind}", float(count), 0)
