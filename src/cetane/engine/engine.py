"""Runs a plan. It knows names and contracts, and never a family."""

from collections.abc import Collection, Mapping, Sequence

from cetane.bundle.tables import Tables
from cetane.engine.backend import Backend, OpenShard
from cetane.engine.call import Running
from cetane.engine.execution import Execution, Watch, run
from cetane.engine.logits import PORT_AGAIN, HeadRows
from cetane.engine.memory import Memory
from cetane.engine.schedule import Schedule
from cetane.engine.session import Session
from cetane.engine.shards import OpenShards
from cetane.schema.plan import Plan
from cetane.schema.recipe import Mode


class Engine:
    """A plan, a backend that runs its shards, and the host's tables.

    OpenShards open on first use; where they are not `resident`, one at a time is in memory.
    """

    def __init__(self, plan: Plan, backend: Backend, tables: Tables, resident: bool = True) -> None:
        self.plan, self.backend, self.tables = plan, backend, tables
        self.shards = OpenShards(
            backend,
            [shard.name for shard in plan.shards],
            PORT_AGAIN,
            resident,
            flexible=plan.recipe.tokens.shapes == "range",
        )
        self.head = HeadRows(plan)

    def session(
        self,
        modes: Collection[Mode] | None = None,
        watch: Sequence[Watch] = (),
        whole: bool = False,
        start: int = 0,
    ) -> Session:
        """A new sequence with empty caches, whose first token has the position `start`.

        `modes`: use only these. `watch`: called with every output of a shard, for gates and draft
        heads. `whole`: run all layers for every token. Without it, calls that need no logits leave
        out layers that no later token depends on; draft heads read the outputs of all.
        """
        plan = self.plan
        functions, order = plan.functions, plan.recipe.tensor_layout
        memory = Memory(plan.caches, functions.values(), order, self.backend.dtype, start)
        execution = Execution(functions, self.shards, self.tables, memory, watch)
        return Session(Schedule(plan, modes, whole), memory, execution, self.head)

    def run(
        self,
        work: Sequence[tuple[Session, Sequence[Running]]],
        shards: Collection[str] | None = None,
    ) -> None:
        """Take calls that sessions have prepared through all shards, or some, each opened once."""
        run([(session.execution, calls) for session, calls in work], self.shards, shards)

    def open(self, shard: str) -> OpenShard:
        """A shard, loaded if it is not yet."""
        return self.shards.open(shard)

    @property
    def seconds(self) -> Mapping[str, float]:
        """Time spent by shard, in opening shards (`load`), and by the host (`host`)."""
        return self.shards.seconds
