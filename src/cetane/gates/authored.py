"""The families' torch modules before conversion, judged as the gates judge a port."""

from collections.abc import Callable, Mapping
from functools import cached_property

import torch

from cetane.checkpoint import Checkpoint, Tokenizer
from cetane.engine.authored import AuthoredBackend, AuthoredProgram, host_tables
from cetane.engine.backend import Array, Arrays
from cetane.engine.engine import Engine
from cetane.families import Shard, Weights
from cetane.gates.bounds import Tightened
from cetane.gates.experts import show
from cetane.gates.heads import Chooser
from cetane.gates.model_results import ModelResults
from cetane.gates.observe import observe, structure_tasks
from cetane.gates.probe_sizes import filled, tokens_for_experts
from cetane.gates.probes import structure_probes
from cetane.gates.reference import Reference
from cetane.gates.structure import Deviation, deviations
from cetane.lower.recorder import Recorder
from cetane.lower.structure import records
from cetane.mil.executor import TensorState
from cetane.planner import Planner
from cetane.schema.changes import override


class ModuleReadings:
    """What is read from a run of a plan's modules: the ops that lowering sees."""

    planner: Planner
    weights: Checkpoint

    @cached_property
    def seen_by_lowering(self) -> dict[str, dict[str, Recorder]]:
        """The records by shard and function. Each reading asks for another part of them."""
        return {shard: records(self.planner, shard) for shard in self.planner.members}

    def epsilons(self, shard: str) -> dict[str, float]:
        """The epsilons of a shard's norms, by function and number."""
        return {
            f"{function}/norm-{number}": epsilon
            for function, record in self.seen_by_lowering[shard].items()
            for number, epsilon in enumerate(record.epsilons)
        }

    def activations(self, shard: str) -> dict[str, Callable[[Array], Array]]:
        """The activations of a shard's functions, by function and number."""
        return {
            f"{function}/activation-{number}": Activation(activation)
            for function, record in self.seen_by_lowering[shard].items()
            for number, activation in enumerate(record.activations)
        }

    def bounds(self, shard: str) -> dict[str, list[float]]:
        """The bounds of activations in each function of a shard."""
        return {name: one.bounds for name, one in self.seen_by_lowering[shard].items()}

    def roundings(self, shard: str) -> dict[str, int]:
        """The number of tensors that each function of a shard rounds."""
        return {name: one.roundings for name, one in self.seen_by_lowering[shard].items()}

    def choosers(self, shard: str) -> dict[str, Chooser | None]:
        """None: modules choose by no tables."""
        return {}

    @property
    def unrounded(self) -> Planner:
        """The same plan with unrounded caches: the model rounds no keys and values."""
        planner = self.planner
        if planner.recipe.cache.format == "fp16":
            return planner
        recipe = override(planner.recipe, {"cache.format": "fp16"})
        return Planner(self.weights, recipe, planner).on(planner.adapter)

    def tightened(self, others: Mapping[float, float]) -> Engine:
        """An engine on the modules, with unrounded caches and other bounds."""
        planner = self.unrounded
        backend = TightenedBackend(planner, self.weights, others)
        return Engine(planner.plan(), backend, host_tables(planner, self.weights), resident=False)


class ShowingBackend(AuthoredBackend):
    """A plan's modules, which also show the experts that they choose."""

    def open(self, shard: str) -> AuthoredProgram:
        program = super().open(shard)
        for module in program.modules.values():
            show(module)
        return program


class TightenedBackend(ShowingBackend):
    """The same, with other bounds."""

    def __init__(self, planner: Planner, weights: Weights, others: Mapping[float, float]) -> None:
        """`others` are by the bounds that they replace, in fp16."""
        super().__init__(planner, weights)
        self.others = others

    def open(self, shard: str) -> "TightenedProgram":
        return TightenedProgram(super().open(shard).modules, self.others)


class TightenedProgram(AuthoredProgram):
    """A shard as torch modules, with other bounds."""

    def __init__(self, modules: dict[str, Shard], others: Mapping[float, float]) -> None:
        super().__init__(modules)
        self.others = others

    def call(self, function: str, inputs: Arrays, state: TensorState) -> Arrays:
        with Tightened(self.others):
            return super().call(function, inputs, state)


class Authored(ModuleReadings):
    """A plan's modules with the checkpoint's own values, compared with the model."""

    def __init__(self, planner: Planner, weights: Checkpoint, reference: Reference) -> None:
        self.planner, self.weights, self.reference = planner, weights, reference

    def engine(self, planner: Planner) -> Engine:
        """An engine on a plan's modules."""
        backend = ShowingBackend(planner, self.weights)
        return Engine(planner.plan(), backend, host_tables(planner, self.weights), resident=False)

    @property
    def shipped(self) -> Engine:
        """An engine on the modules, with the caches of the plan."""
        return self.engine(self.planner)

    def deviations(self, tokenizer: Tokenizer) -> list[Deviation]:
        """The modules' deviations from the model, on the probes by which a twin is judged."""
        planner = self.unrounded
        engine = self.engine(planner)
        plan = engine.plan
        tokens = filled(planner, plan, self.reference), tokens_for_experts(planner, plan)
        probes = structure_probes(engine.tables.embedding, tokenizer, plan, *tokens)
        tasks = structure_tasks(plan, probes)
        seen = observe(engine, planner, tasks)
        scale = planner.model.residual_scale or 1.0
        truths = ModelResults.ask(self.reference, tasks, seen, scale=scale)
        return list(deviations(plan, planner, tasks, seen, truths))


class Activation:
    """A torch function that takes and gives fp32 arrays of any shape."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.function = function

    def __call__(self, x: Array) -> Array:
        result: Array = self.function(torch.from_numpy(x)).numpy()
        return result
