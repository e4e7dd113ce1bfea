"""Workers and stores: what a kill costs, how much faster two are, what a second build takes.

python benchmarks/workers.py kill [--layers 8 --experts 16 --every 20]
python benchmarks/workers.py speed MODEL [--what build sweep lab] [--experiments ID ...]
python benchmarks/workers.py store MODEL [-r RECIPE]
python benchmarks/workers.py replay TIMES.json

`speed` writes the CPU seconds of every task to build/bench/workers/times.json. `replay` gives these
to Dask's own scheduler: waves of tasks one after the other, and tasks that measure time alone. CPU
seconds do not depend on what else runs; wall-clock seconds do.
"""

import argparse
import asyncio
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import psutil

from cetane.files import records, silent
from cetane.lab.journal import Journal
from cetane.lab.library import Lab
from cetane.lab.run import run_together
from cetane.lab.workload import Setting
from cetane.mil.fast import share_threads
from cetane.pipeline.build import build
from cetane.pipeline.request import make_request
from cetane.sweeps.run import sweep
from cetane.tasks.processes import Processes
from cetane.tasks.task import Order, Task
from cetane.tasks.workers import Ended
from common import WORK, report

PLACE = WORK / "workers"
MAIN = "from cetane.cli import main\nif __name__ == '__main__':\n    main()\n"


def command(*arguments: str | Path) -> list[str]:
    """A cetane command as a script, which workers can import."""
    script = PLACE / "command.py"
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text(MAIN)
    return [sys.executable, str(script.absolute()), *map(str, arguments)]


def environment(cache: Path, tree: Path | None = None) -> dict[str, str]:
    """This process's, with a cache folder of its own, and maybe another checkout's code."""
    changed = {"CETANE_CACHE": str(cache.absolute())}
    if tree is not None:
        changed["PYTHONPATH"] = str(tree.absolute())
    return os.environ | changed


def fresh(name: str) -> Path:
    """A folder that is not there."""
    path = PLACE / name
    for folder in (path, path.with_name(path.name + ".partial")):
        shutil.rmtree(folder, ignore_errors=True)
    return path


def workers_of(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """The workers of a command."""
    try:
        children = psutil.Process(process.pid).children()
        return [child for child in children if "spawn_main" in " ".join(child.cmdline())]
    except psutil.Error:
        return []


def killing(process: subprocess.Popen[bytes], every: float) -> int:
    """Kill one of a command's two workers whenever both have computed for so many seconds, until it
    ends. Returns the number of kills. On an idle machine these are seconds of the clock."""
    random.seed(1)
    kills, spent = 0, dict[int, float]()
    while process.poll() is None:
        time.sleep(0.2)
        there = workers_of(process)
        for worker in there:
            with suppress(psutil.Error):
                spent[worker.pid] = sum(worker.cpu_times()[:2])
        if sum(spent.values()) >= 2 * every * (kills + 1) and there:
            random.choice(there).kill()
            kills += 1
    return kills


def kill(options: argparse.Namespace) -> None:
    """A build whose workers are killed, beside one that nobody disturbs."""
    from zaya_full_build import CONFIG, write_checkpoint

    CONFIG["num_experts"] = options.experts
    CONFIG["vocab_size"] = options.vocab
    checkpoint = PLACE / f"zaya-{options.layers}-{options.experts}-{options.vocab}"
    write_checkpoint(checkpoint, options.layers)
    build = ["build", checkpoint, "-r", options.recipe, "-o"]
    plain, killed = fresh("plain"), fresh("killed")
    started = time.perf_counter()
    subprocess.run(
        command(*build, plain), check=True, env=environment(fresh("cache-plain")),
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    undisturbed = time.perf_counter() - started
    started = time.perf_counter()
    process = subprocess.Popen(
        command(*build, killed, "--workers", "2"), env=environment(fresh("cache-killed")),
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    kills = killing(process, options.every)
    seconds = time.perf_counter() - started
    if process.returncode:
        raise SystemExit(f"the build with workers ended with {process.returncode}")
    equal = records(plain, plain) == records(killed, killed)
    size = sum(record.bytes for record in records(plain, plain).values())
    rows = [["plain", f"{undisturbed:.0f}", 0], ["2 workers", f"{seconds:.0f}", kills]]
    result = {"equal": equal, "files": len(records(plain, plain)), "bytes": size, "kills": kills}
    report(
        f"{size / 1e9:.2f} GB, {'EVERY FILE EQUAL' if equal else 'FILES DIFFER'}",
        ["build", "s", "killed workers"], rows, result, options.json,
    )  # fmt: skip
    sys.exit(0 if equal else 1)


class Watched:
    """Workers, with the CPU seconds of every task and of every wave of tasks."""

    dashboard = None

    def __init__(self, workers: Processes) -> None:
        self.workers = workers
        self.waves: list[list[tuple[str, float, bool]]] = []
        """The name and the seconds of every task, and whether nothing may run beside it."""
        self.longest = 0.0
        """CPU seconds of the busiest worker, summed over the waves: what wall-clock seconds are on
        a machine with nothing else to do."""

    def cpu(self) -> list[float]:
        """CPU seconds of every worker, with those of its children."""
        seconds = []
        for pool in self.workers.pools:
            for pid in list((pool._processes or {}) if pool is not None else {}):
                spent = psutil.Process(pid).cpu_times()
                seconds.append(
                    spent.user + spent.system + spent.children_user + spent.children_system
                )
        return seconds + [0.0] * (len(self.workers.pools) - len(seconds))

    def run(self, tasks: Sequence[Task], order: Order) -> Iterator[Ended]:
        first = before = self.cpu()
        self.waves.append([])
        for task, error in self.workers.run(tasks, order):
            now = self.cpu()
            self.waves[-1].append((task.name, sum(now) - sum(before), task.alone))
            before = now
            yield task, error
        if tasks:
            self.longest += max(b - a for a, b in zip(first, self.cpu(), strict=True))


def measured(work: Callable[[Watched], object], count: int) -> dict[str, Any]:
    """A piece of work with so many workers: seconds, and the CPU seconds that bound them."""
    started, own = time.perf_counter(), time.process_time()
    with Processes(count) as workers:
        watched = Watched(workers)
        work(watched)
    own = time.process_time() - own
    return {"wall": time.perf_counter() - started, "cpu": own + watched.longest, "own": own,
            "waves": watched.waves}  # fmt: skip


def speed(options: argparse.Namespace) -> None:
    """A sweep and the lab, with one worker and with two."""
    share_threads()
    lab = Lab(Path("experiments"))
    experiments = [lab.find(name) for name in options.experiments]

    def sweeping(workers: Watched) -> object:
        return sweep(options.model, formats=options.formats, output=fresh("sweep"), workers=workers)

    def experimenting(workers: Watched) -> object:
        journal, setting = Journal(fresh("lab") / "journal.jsonl"), Setting(PLACE / "lab", {})
        outcomes = list(run_together(experiments, setting, journal, workers, silent))
        for outcome in outcomes:
            if outcome.error:
                raise SystemExit(f"{outcome.experiment}: {outcome.error}")
        return outcomes

    def building(workers: Watched) -> object:
        request = make_request(options.model, options.recipe)
        return build(request.checkpoint, request.recipe, fresh("bundle"), silent, workers=workers)

    rows: list[list[Any]] = []
    times: dict[str, Any] = {}
    for name, work in {"build": building, "sweep": sweeping, "lab": experimenting}.items():
        if name in options.what:
            two, one = measured(work, 2), measured(work, 1)
            times[name] = one["waves"]
            (PLACE / "times.json").write_text(json.dumps(times, indent=1))
            rows.append([
                name, sum(map(len, one["waves"])), one["wall"], two["wall"],
                one["wall"] / two["wall"],
                one["cpu"], two["cpu"], one["cpu"] / two["cpu"],
            ])  # fmt: skip
    columns = ["work", "tasks", "one, s", "two, s", "ratio", "one, CPU s", "two, CPU s", "ratio"]
    result = {row[0]: dict(zip(columns[1:], row[1:], strict=True)) for row in rows}
    report("two workers beside one", columns, rows, result, options.json)


def store(options: argparse.Namespace) -> None:
    """A build by one checkout, and the same build by another one that shares only the store."""
    shared, trees = fresh("shared"), [Path(__file__).parents[1] / "src", fresh("checkout") / "src"]
    for part in ("src", "recipes", "experiments"):
        shutil.copytree(trees[0].parent / part, trees[1].parent / part)
    rows: list[list[Any]] = []
    bundles = []
    for number, tree in enumerate(trees):
        bundle, cache = fresh(f"bundle-{number}"), fresh(f"cache-{number}")
        arguments = ["build", options.model, "-r", options.recipe, "-o", str(bundle)]
        before, started = os.times(), time.perf_counter()
        subprocess.run(
            command(*arguments, "--store", str(shared.absolute())), check=True,
            env=environment(cache, tree), stdout=subprocess.DEVNULL,
        )  # fmt: skip
        spent = [b - a for a, b in zip(before, os.times(), strict=True)]
        rows.append([f"checkout {number + 1}", time.perf_counter() - started, sum(spent[2:4])])
        bundles.append(bundle)
    equal = records(bundles[0], bundles[0]) == records(bundles[1], bundles[1])
    ratios = [rows[1][1] / rows[0][1], rows[1][2] / rows[0][2]]
    rows.append(["second / first", *ratios])
    report(
        f"one store, two checkouts: {'every file equal' if equal else 'FILES DIFFER'}",
        ["build", "s", "CPU s"], rows, {"equal": equal, "wall": ratios[0], "cpu": ratios[1]},
        options.json,
    )  # fmt: skip


def replay(options: argparse.Namespace) -> None:
    """Measured tasks, given to Dask's own scheduler with 1 to 64 workers that only sleep."""
    times = json.loads(options.times.read_text())
    rows, result = [], {}
    for name, waves in times.items():
        waves = [[(max(0.0, spent), alone) for _, spent, alone in wave] * options.repeat
                 for wave in waves]  # fmt: skip
        count_of_tasks, alone = sum(map(len, waves)), 0.0
        for count in options.workers:
            wall = asyncio.run(slept(waves, count, options.scale)) / options.scale
            alone = alone or (wall if count == 1 else bound(waves, 1))
            rows.append([name, count_of_tasks, count, wall, alone / wall,
                         bound(waves, 1) / bound(waves, count)])  # fmt: skip
            result[f"{name} {count}"] = alone / wall
    columns = ["work", "tasks", "workers", "s", "speedup", "bound"]
    report("measured tasks, replayed", columns, rows, result, options.json)


Waves = list[list[tuple[float, bool]]]
"""Seconds of tasks, and whether nothing may run beside them."""


def bound(waves: Waves, count: int) -> float:
    """Seconds that no scheduler can go below: a wave's longest task, or its sum shared evenly."""
    together = [[spent for spent, alone in wave if not alone] for wave in waves]
    single = sum(spent for wave in waves for spent, alone in wave if alone)
    return single + sum(max(sum(wave) / count, max(wave, default=0.0)) for wave in together)


async def slept(waves: Waves, count: int, scale: float) -> float:
    """Seconds that Dask's scheduler takes for tasks of some seconds, in their order."""
    import dask

    dask.config.set({"logging.distributed": "error"})  # read when distributed is imported
    from distributed import Client, Scheduler, Worker

    async with Scheduler(port=0, dashboard=False) as scheduler, AsyncExitStack() as stack:
        for _ in range(count):
            await stack.enter_async_context(
                Worker(scheduler.address, nthreads=1, dashboard=False, silence_logs=50)
            )
        client = await stack.enter_async_context(Client(scheduler.address, asynchronous=True))
        started = time.perf_counter()
        for wave in waves:
            together = [spent for spent, alone in wave if not alone]
            await client.gather([
                client.submit(time.sleep, spent * scale, pure=False, priority=-number)
                for number, spent in enumerate(together)
            ])  # fmt: skip
            for spent, alone in wave:
                if alone:
                    await client.submit(time.sleep, spent * scale, pure=False)
        return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object on the last line")
    which = parser.add_subparsers(required=True)
    one = which.add_parser("kill")
    one.add_argument("--layers", type=int, default=8)
    one.add_argument("--experts", type=int, default=16)
    one.add_argument("--vocab", type=int, default=262272)
    one.add_argument(
        "--every",
        type=float,
        default=20,
        help="seconds of both between two kills",
    )
    one.add_argument("--recipe", default="zaya-int8")
    one.set_defaults(run=kill)
    one = which.add_parser("speed")
    one.add_argument("model")
    one.add_argument("--what", nargs="*", default=["sweep", "lab"])
    one.add_argument("-r", "--recipe", default="zaya-int8", help="of the build")
    one.add_argument("--formats", nargs="*", default=[])
    one.add_argument("--experiments", nargs="*", default=["zaya-int8", "zaya-int4-palette"])
    one.set_defaults(run=speed)
    one = which.add_parser("store")
    one.add_argument("model")
    one.add_argument("-r", "--recipe", default="default")
    one.set_defaults(run=store)
    one = which.add_parser("replay")
    one.add_argument("times", type=Path)
    one.add_argument("--scale", type=float, default=1, help="of the measured seconds; Dask's own"
                     " delays stay as they are")  # fmt: skip
    one.add_argument("--workers", type=int, nargs="*", default=[1, 2, 4, 8, 16, 32, 64])
    one.add_argument("--repeat", type=int, default=1, help="as many tasks of each kind")
    one.set_defaults(run=replay)
    options = parser.parse_args()
    PLACE.mkdir(parents=True, exist_ok=True)
    options.run(options)


if __name__ == "__main__":
    main()
