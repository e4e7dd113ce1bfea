"""The engine: opens a plan's shards and runs sessions on them. It knows no family."""

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

    Shards open on first use. If they are not `resident`, only one is in memory at a time.
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
        adapter: str | None = None,
    ) -> Session:
        """A new sequence with empty caches, whose first token has the position `start`.

        - `modes`: the only modes that it may use.
        - `watch`: called with every output of a shard, for gates and draft heads.
        - `whole`: run all layers for every token, as draft heads need. By default, silent calls
          leave out layers that no later token depends on.
        - `adapter`: the adapter of its first calls; `Session.adapter` changes it.

        Raises CetaneError for an adapter that the plan lacks.
        """
        plan = self.plan
        functions, order = plan.functions, plan.recipe.tensor_layout
        smallest = plan.capacities[0].caches
        memory = Memory(smallest, functions.values(), order, self.backend.dtype, start)
        execution = Execution(functions, self.shards, self.tables, memory, watch)
        session = Session(Schedule(plan, modes, whole), memory, execution, self.head)
        session.adapter = adapter
        return session

    def run(
        self,
        work: Sequence[tuple[Session, Sequence[Running]]],
        shards: Collection[str] | None = None,
        last: bool = False,
    ) -> None:
        """Run prepared calls of sessions through all shards, or only `shards`.

        Each shard opens once. With `last`, the sessions take no calls after these.
        """
        run([(session.execution, calls) for session, calls in work], self.shards, shards, last)

    def open(self, shard: str) -> OpenShard:
        """A shard, loaded on first use."""
        return self.shards.open(shard)

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds spent in each shard, in opening shards (`load`), and by the host (`host`)."""
        return self.shards.seconds
