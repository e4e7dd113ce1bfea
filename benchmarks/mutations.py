"""The golden gate on wrong ports, by mutation, and on right ones: docs/reference/mutations.md.

python benchmarks/mutations.py [--families llama zaya] [--seeds 5] [--workers 2]
python benchmarks/mutations.py --page FILE...    # the page, of what the runs have written there
"""

import argparse
import json
import secrets
import sys
import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from common import WORK, put_lines

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.gates.mutations.families import FAMILIES, FORMATS, build, recipe, tokenizer_of
from tests.gates.mutations.ports import (
    AuthoredPort,
    RememberedReference,
    TinyCheckpoint,
    encoded_once,
    judge,
)
from tests.gates.mutations.table import DEPARTURES, TABLE, Inapplicable, mutations

from cetane.checkpoint import Tokenizer
from cetane.errors import CetaneError
from cetane.gates.limits import limits
from cetane.store.settings import shared_store
from cetane.store.store import Store, made_beside
from cetane.tasks.task import Task, task_key
from cetane.tasks.workers import open_workers, performed

PAGE = Path(__file__).parents[1] / "docs/reference/mutations.md"
Row = dict[str, Any]
ROWS = "rows.json"


def verdict(port: AuthoredPort, reference: RememberedReference, structure: Any = None) -> Row:
    """What every question says of a port; `structure` where its answer is known."""
    try:
        judged = judge(port, reference, structure)
    except (CetaneError, AssertionError, RuntimeError, ValueError, LookupError) as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return {"passed": False, "by": ["does not run"], "error": reason}
    by = list(judged.refused_by)
    return {"passed": not by, "by": by, "structure": judged.worst, "answer": judged.structure}


def wrong_ports(family: str, formats: list[str], tok: Tokenizer) -> Iterator[Row]:
    """Every wrong port of a family at every number of bits. What the structure refuses, it refuses
    at any: the twin is the same."""
    checkpoint = TinyCheckpoint(build(family), tok)
    reference = RememberedReference(checkpoint)
    for name, place in mutations(family):
        departed = {"family": {"departures": DEPARTURES.get(name)}}
        options = TABLE[name].tables if name in TABLE else departed
        first: Row | None = None
        for form in formats:
            row = {"family": family, "bits": form, "name": name, "place": place, "wrong": True}
            if first is None or "structure" not in first["by"]:
                port = AuthoredPort(checkpoint, recipe(form, **options))
                try:
                    if name in TABLE:
                        TABLE[name].change(port)
                except Inapplicable:
                    break
                first = verdict(port, reference, first and first.get("answer"))
            yield row | {key: value for key, value in first.items() if key != "answer"}


def right_ports(family: str, formats: list[str], seeds: int, tok: Tokenizer) -> Iterator[Row]:
    """Ports of as many random models at every number of bits, all of them others."""
    for seed in range(1, seeds * len(formats) + 1):
        checkpoint, form = TinyCheckpoint(build(family, seed), tok), formats[seed % len(formats)]
        row = {"family": family, "bits": form, "name": f"seed {seed}", "place": "", "wrong": False}
        said = verdict(AuthoredPort(checkpoint, recipe(form)), RememberedReference(checkpoint))
        yield row | {key: value for key, value in said.items() if key != "answer"}


def tables(rows: list[Row]) -> Iterator[str]:
    """The page's tables, as Markdown."""
    families = list(dict.fromkeys(row["family"] for row in rows))
    formats = {row["bits"] for row in rows}
    yield f"Every port at {', '.join(bits for bits in FORMATS if bits in formats)}:"
    yield ""
    yield "| family | wrong ports | certified | right ports | refused as wrong | not good enough |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: |"
    for family in families:
        own = [row for row in rows if row["family"] == family]
        wrong, right = ([row for row in own if row["wrong"] is is_] for is_ in (True, False))
        refused = [row for row in right if not row["passed"] and not short(row)]
        yield (
            f"| {family} | {len(wrong)} | {named_bits(row for row in wrong if row['passed'])} "
            f"| {len(right)} | {named_bits(refused)} | {named_bits(filter(short, right))} |"
        )
    wrong, right = ([row for row in rows if row["wrong"] is is_] for is_ in (True, False))
    yield (
        f"| all | {len(wrong)} | **{sum(row['passed'] for row in wrong)}** | {len(right)} "
        f"| **{sum(not row['passed'] and not short(row) for row in right)}** "
        f"| {sum(map(short, right))} |"
    )
    yield ""
    yield "*Not good enough*: only the third question says no. The port is right, and its"
    yield "compression does not keep the promise `usable`: random weights suit no palette."
    yield ""
    limit = limits().structure.relative
    yield f"Structure by family, whose limit is {limit:g}: the largest error of a right port, the"
    yield "least of a wrong one that nothing read refuses, and how many kinds a question refuses."
    yield ""
    yield "| family | right, largest | wrong, least | kinds | by structure | by weights | else |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for family in families:
        yield summary(family, [row for row in rows if row["family"] == family])


def short(row: Row) -> bool:
    """Whether a right port is refused only for what its compression costs."""
    return row["by"] == ["compression"]


def named_bits(rows: Iterable[Row]) -> str:
    """How many there are, and at which numbers of bits."""
    some = [row["bits"] for row in rows]
    return f"{len(some)} ({', '.join(dict.fromkeys(some))})" if some else "0"


def summary(family: str, rows: list[Row]) -> str:
    """A family's line of the second table."""
    limit = limits().structure.relative
    right = max((row["structure"] for row in rows if not row["wrong"] and row["passed"]), default=0)
    kinds = {row["name"]: row for row in rows if row["wrong"]}
    beyond = [row for row in kinds.values() if row.get("structure", 0) > limit]
    least = min(beyond, key=lambda row: row["structure"], default={"structure": 0, "name": ""})
    by = {name: sum(name in row["by"] for row in kinds.values()) for name in
          ("structure", "weights")}  # fmt: skip
    others = sum(not {"structure", "weights"} & set(row["by"]) for row in kinds.values())
    return (
        f"| {family} | {right:.1e} | {least['structure']:.1e} ({least['name']}) | {len(kinds)} "
        f"| {by['structure']} | {by['weights']} | {others} |"
    )


def judge_family(family: str, formats: list[str], seeds: int, folder: Path) -> None:
    """Judge all ports of a family, and write the rows."""
    torch.set_num_threads(1)
    tok = tokenizer_of()
    with encoded_once():
        right = right_ports(family, formats, seeds, tok)
        rows = [*right, *wrong_ports(family, formats, tok)]
    (folder / ROWS).write_text(json.dumps(rows))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--families", nargs="*", default=list(FAMILIES))
    parser.add_argument("--formats", nargs="*", default=list(FORMATS))
    parser.add_argument("--seeds", type=int, default=5, help="right ports at every number of bits")
    parser.add_argument("--workers", type=int, default=1, help="families judged side by side")
    parser.add_argument("--scheduler", help="Dask's, as for cetane's commands")
    parser.add_argument("--json", type=Path, help="add a family's results when it is done")
    parser.add_argument("--page", type=Path, nargs="+", help="write the page of such files")
    arguments = parser.parse_args()
    if arguments.page:
        rows = [row for path in arguments.page for row in json.loads(path.read_text())]
        put_lines(PAGE, "tables", tables(rows))
        return
    started = time.perf_counter()
    tasks = [
        Task(
            family,
            task_key("mutants", family, arguments.formats, arguments.seeds, secrets.token_hex(8)),
            partial(judge_family, family, arguments.formats, arguments.seeds),
        )
        for family in arguments.families
    ]

    def take(task: Task, store: Store) -> bool:
        with made_beside(WORK / "mutants" / "fetched") as scratch:
            if not store.fetch(task.key, scratch / "result"):
                return False
            rows = json.loads((scratch / "result" / ROWS).read_bytes())
        for row in rows:
            if row["wrong"] == row["passed"]:
                print(row, flush=True)
        seconds = time.perf_counter() - started
        print(f"{task.name}: {len(rows)} ports, {seconds:.0f} s", flush=True)
        if arguments.json:
            known = json.loads(arguments.json.read_text()) if arguments.json.exists() else []
            arguments.json.write_text(json.dumps(known + rows, indent=1))
        return True

    with open_workers(arguments.workers, arguments.scheduler) as workers:
        store = shared_store() or Store(WORK / "mutants", private=True)
        assert workers is not None
        for _, error in performed(workers, tasks, store, take):
            if error is not None:
                raise error


if __name__ == "__main__":
    main()
