"""Functions of experts that no probe ran, compared with the authored modules on random inputs.

The model cannot judge them: its routers send no token of a probe there. But it judges the functions
of other experts, which the same authored modules make.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from cetane.engine.authored import AuthoredProgram
from cetane.engine.backend import Arrays
from cetane.engine.call import columns
from cetane.engine.engine import Engine
from cetane.families import Weights
from cetane.gates import metrics
from cetane.gates.observe import ProbeTask
from cetane.gates.probes import SEED, Probe
from cetane.gates.structure import Deviation, deviation
from cetane.planner import Planner
from cetane.planner.graphs import FunctionGraph
from cetane.schema.function import Route
from cetane.schema.plan import Plan
from cetane.schema.recipe import Mode

RANDOM = "random inputs"
"""The name of the probe that runs these functions."""


def idle_functions(engine: Engine, adapter: str | None) -> list[tuple[str, str]]:
    """The functions of the base, or of an adapter, that no call of an engine has run: shards and
    names."""
    return [
        key
        for key, function in engine.plan.functions.items()
        if function.adapter == adapter and key not in engine.shards.times
    ]


def idle_deviations(
    engine: Engine, planner: Planner, weights: Weights, idle: Sequence[tuple[str, str]]
) -> Iterator[Deviation]:
    """The deviation of every output of idle functions from its authored module, in the order of
    shards.

    `engine` is a twin, and `planner` shares no block with it.
    """
    modes = expert_modes(engine.plan)
    wanted = modes.keys() & set(idle)
    for shard in dict.fromkeys(shard for shard, _ in idle):
        for graph in planner.graphs(shard):
            name = graph.function.name
            key = shard, name
            if key not in wanted:
                continue
            inputs = random_inputs(graph, engine.backend.dtype)
            ours = engine.shards.call(shard, engine.plan.functions[key], inputs, None)
            task = ProbeTask(modes[key], Probe(RANDOM, ()), ())
            for output, truth in authored(planner, graph, weights, inputs).items():
                errors = metrics.relative(columns(ours[output]).T, columns(truth).T)
                made, model = output.removesuffix("_out"), (f"the authored {name}", 0)
                yield deviation(shard, made, model, task, np.arange(len(errors)), errors)
        engine.shards.leave(shard)


def expert_modes(plan: Plan) -> dict[tuple[str, str], Mode]:
    """By shard and name, the functions of experts, and a mode that routes tokens to each."""
    return {
        (step.shard, name): mode
        for mode, own in plan.modes.items()
        for step in (*own.steps, *own.silent)
        if isinstance(step, Route)
        for names in step.experts
        for name in names
    }


def random_inputs(graph: FunctionGraph, dtype: type[np.floating]) -> Arrays:
    """Inputs of a function, normally distributed: always the same for one function."""
    drawn = np.random.default_rng(SEED)
    return {
        item.name: drawn.standard_normal(item.shape).astype(dtype) for item in graph.function.inputs
    }


def authored(planner: Planner, graph: FunctionGraph, weights: Weights, inputs: Arrays) -> Arrays:
    """What the authored module of an expert's function makes of its inputs.

    Only this expert's weights are read, and then dropped: a layer of experts may take gigabytes."""
    (expert,) = graph.blocks
    expert.load(weights)
    name = graph.function.name
    program = AuthoredProgram({name: planner.module(graph)})
    made = program.call(name, inputs, program.make_state(name))
    expert.root.to("meta")
    return made
