"""The service behind a server's routes: its models, and their workers."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

from fastapi import FastAPI

from cetane.errors import CetaneError
from cetane.server.errors import ApiError
from cetane.server.lane import Lane
from cetane.server.metrics import Metrics
from cetane.server.served import Served
from cetane.server.settings import Settings
from cetane.server.worker import Worker, late

Result = TypeVar("Result")

SMALL = 64 << 10
"""The largest request in bytes that counts as small: its preparation takes 0.1 s at most."""


class Service:
    """All models of a server, each with its worker."""

    def __init__(self, models: Sequence[Served], settings: Settings) -> None:
        self.settings, self.metrics = settings, Metrics()
        self.large = Lane("large requests", settings.queue)
        self.grammars = Lane("requests with grammars", settings.queue)
        self.workers = [Worker(served, settings, self.metrics) for served in models]
        self.models = {name: worker for worker in self.workers for name in worker.served.adapters}
        """The workers by the names of models: of bundles, and of bundles with an adapter."""
        if len(self.models) < sum(len(served.adapters) for served in models):
            raise CetaneError("two bundles have the same name", "rename one of the folders")

    def worker(self, name: str | None) -> Worker:
        """The worker of a model; without a name, of the first. Raises ApiError."""
        if name is None:
            return self.workers[0]
        if name not in self.models:
            known = ", ".join(self.models)
            raise ApiError(404, f"model: no {name!r}; known: {known}", "model", "model_not_found")
        return self.models[name]

    async def prepared(
        self, work: Callable[[], Result], size: int, constrained: bool = False
    ) -> Result:
        """The result of some work on a request of `size` bytes, in a thread. `constrained`: it may
        have to compile a grammar. Raises ApiError.

        Small requests wait for no other ones.
        """
        if size <= SMALL and not constrained:
            return await asyncio.to_thread(work)
        lane = self.grammars if constrained else self.large
        try:
            async with asyncio.timeout(self.settings.seconds):
                return await lane.run(work)
        except TimeoutError as error:
            raise late() from error

    def close(self) -> None:
        """Take no more requests. Running answers may end within the settings' `grace` seconds."""
        for worker in self.workers:
            worker.close(self.settings.grace)

    @asynccontextmanager
    async def lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        for worker in self.workers:
            worker.open()
        try:
            yield
        except asyncio.CancelledError:  # a second signal: nothing is waited for, and no error
            return
        self.close()
        for worker in self.workers:
            await asyncio.to_thread(worker.join)
