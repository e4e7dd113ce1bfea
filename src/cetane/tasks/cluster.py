"""Workers of Dask: a cluster of its own on this machine, or any that has a scheduler's address."""

from collections.abc import Iterator, Sequence
from typing import Any, Self

from cetane.errors import CetaneError, installing
from cetane.store.settings import shared_url
from cetane.tasks.task import Order, Task
from cetane.tasks.workers import MOST_LOST, Ended

LOCAL = "local"
SCHEDULER = {
    "distributed.scheduler.allowed-failures": MOST_LOST,
    "distributed.scheduler.worker-ttl": None,
}
"""Settings of a local scheduler. A conversion may keep a worker's threads from answering for
minutes, so a silent worker is not dead."""
PATIENCE = 60
"""Seconds until a scheduler must have a worker."""
MEMORY = "memory"
"""The resource in bytes that workers may declare (`dask worker --resources "memory=64e9"`)."""


class Cluster:
    """The workers of a scheduler of Dask's. They take one task at a time for each of their threads,
    so give them one thread each (`--nthreads 1`)."""

    def __init__(self, scheduler: str, count: int | None) -> None:
        """Raises CetaneError if Dask is missing, and for a scheduler that does not answer."""
        if scheduler != LOCAL and shared_url() is None:
            raise CetaneError(
                f"--scheduler {scheduler}: its workers need a store that all machines reach",
                "give one with --store URL",
            )
        try:
            import dask
            from distributed import Client, LocalCluster
        except ImportError as error:
            raise CetaneError("--scheduler needs Dask", installing("cluster")) from error
        self.cluster: Any = None
        address: Any = scheduler
        try:
            if scheduler == LOCAL:
                with dask.config.set(SCHEDULER):
                    self.cluster = LocalCluster(
                        n_workers=count or 1, threads_per_worker=1, dashboard_address=":0",
                        silence_logs=50,
                    )  # fmt: skip
                address = self.cluster
            self.client: Client = Client(address, timeout=PATIENCE)
            self.client.wait_for_workers(1, timeout=PATIENCE)
        except (OSError, ValueError, TimeoutError) as error:
            self.__exit__()
            raise CetaneError(
                f"--scheduler {scheduler}: no scheduler with a worker answers: {error}",
                "start one with `dask scheduler` and `dask worker ADDRESS`",
            ) from error
        self.dashboard: str | None = self.client.dashboard_link

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for part in (getattr(self, "client", None), self.cluster):
            if part is not None:
                part.close()

    def run(self, tasks: Sequence[Task], order: Order) -> Iterator[Ended]:
        """Perform tasks. Gives each as it ends. Those that want no neighbours come last."""
        yield from self._together([task for task in tasks if not task.alone], order)
        for task in tasks:
            if task.alone:
                yield from self._together([task], order)

    def _together(self, tasks: Sequence[Task], order: Order) -> Iterator[Ended]:
        from distributed import as_completed
        from distributed.scheduler import KilledWorker

        declared = self._declared()
        futures = {
            self.client.submit(
                order.perform, task, key=f"{task.name}-{task.key[:16]}", priority=-number,
                resources={MEMORY: min(task.memory, declared)} if declared else None,
            ): task
            for number, task in enumerate(tasks)
        }  # fmt: skip
        for future in as_completed(futures):
            task, error = futures[future], future.exception()
            future.release()  # else Dask would give this result again if the task is run again
            if error is None or isinstance(error, CetaneError):
                yield task, error
            elif isinstance(error, KilledWorker):
                yield task, CetaneError(f"{task.name}: workers died of this task", str(error))
            else:
                raise error

    def _declared(self) -> float:
        """The least memory that the workers declare; 0 unless all do."""
        workers = self.client.scheduler_info(n_workers=-1)["workers"].values()
        return min((worker["resources"].get(MEMORY, 0) for worker in workers), default=0)
