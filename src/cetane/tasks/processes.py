"""Workers on this machine: processes, each with one task at a time, as memory allows."""

import os
import signal
import threading
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context, parent_process
from typing import Self

from cetane.errors import CetaneError
from cetane.tasks.task import Order, Task
from cetane.tasks.workers import MOST_LOST, Ended

SHARE = 0.8
"""The share of this machine's memory that running tasks may declare together."""


def installed_memory() -> int:
    """Bytes of memory that this machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class Processes:
    """Processes of this machine.

    Each has a pool of its own, because a pool whose process dies gives up all its tasks. So a lost
    worker costs only its own task, which the next free worker takes. Tasks that measure time have
    one more process: its libraries start with the threads of all cores, those of a worker with one.
    """

    dashboard: str | None = None

    def __init__(self, count: int, memory: int | None = None) -> None:
        """`memory` is what tasks may declare together; by default most of the machine's."""
        if count < 1:
            raise CetaneError(f"--workers {count}: give 1 at least")
        self.count = count
        self.memory = int(SHARE * installed_memory()) if memory is None else memory
        self.pools: list[ProcessPoolExecutor | None] = [None] * (count + 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for pool in self.pools:
            if pool is not None:
                stop(pool, at_once=kind is not None)

    def run(self, tasks: Sequence[Task], order: Order) -> Iterator[Ended]:
        """Perform tasks. Gives each as it ends, with its error if it has one."""
        waiting, lost = deque(tasks), Counter[str]()
        running: dict[Future[None], tuple[int, Task]] = {}
        while waiting or running:
            busy = [task for _, task in running.values()]
            free = set(range(self.count)) - {slot for slot, _ in running.values()}
            chosen = next((task for task in waiting if free and self.fits(task, busy)), None)
            if chosen is not None:
                waiting.remove(chosen)
                slot = self.count if chosen.alone else min(free)
                running[self.submit(slot, chosen, order)] = slot, chosen
                continue
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                slot, task = running.pop(future)
                try:
                    future.result()
                except BrokenProcessPool:
                    self.pools[slot] = None
                    lost[task.key] += 1
                    if lost[task.key] <= MOST_LOST:
                        waiting.appendleft(task)
                    else:
                        yield task, died(task)
                except CetaneError as error:
                    yield task, error
                else:
                    yield task, None

    def fits(self, task: Task, busy: Sequence[Task]) -> bool:
        """Whether a task may start beside the `busy` ones. It always may if there is none."""
        if not busy:
            return True
        memory = task.memory + sum(other.memory for other in busy)
        return memory <= self.memory and not task.alone and not any(t.alone for t in busy)

    def submit(self, slot: int, task: Task, order: Order) -> Future[None]:
        """Give a task to a worker, which is started if there is none or it died since."""
        for _ in range(2):
            pool = self.pools[slot]
            if pool is None:
                # A forked process would share the threads' locks of torch and onnxruntime.
                pool = ProcessPoolExecutor(1, get_context("spawn"), initializer=start)
                self.pools[slot] = pool
            try:
                return pool.submit(order.perform, task)
            except BrokenProcessPool:
                self.pools[slot] = None
        raise CetaneError("a worker died as soon as it was started", "try fewer --workers")


def start() -> None:
    """Let the first process alone hear Ctrl-C, and end with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True).start()


def end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def stop(pool: ProcessPoolExecutor, at_once: bool) -> None:
    """End a worker; `at_once` if nobody waits for its task."""
    processes = list((pool._processes or {}).values()) if at_once else []
    pool.shutdown(wait=not at_once, cancel_futures=True)
    for process in processes:
        process.kill()


def died(task: Task) -> CetaneError:
    """The error of a task that workers do not survive."""
    return CetaneError(
        f"{task.name}: {MOST_LOST + 1} workers died of this task",
        "there may be too little memory: try fewer --workers",
    )
