"""The golden gate on wrong ports, by mutation, and on right ones: docs/reference/mutations.md.

python benchmarks/mutations.py [--families llama zaya] [--seeds 20] [--json FILE]
python benchmarks/mutations.py --page FILE    # the page, of what the runs have written there
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

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

PAGE = Path(__file__).parents[1] / "docs/reference/mutations.md"
START, END = "<!-- tables -->", "<!-- end of tables -->"
Row = dict[str, Any]


def verdict(
    port: AuthoredPort, reference: RememberedReference, known: dict[str, Any], name: str
) -> Row:
    """What every question says of a port; answers about structure are kept in `known`."""
    try:
        judged = judge(port, reference, known.get(name))
    except (CetaneError, AssertionError, RuntimeError, ValueError, KeyError) as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return {"passed": False, "by": ["does not run"], "error": reason}
    known[name] = judged.structure
    by = list(judged.refused_by)
    return {"passed": not by, "by": by, "structure": judged.worst}


def run(family: str, seeds: int, formats: list[str], tok: Tokenizer) -> Iterator[Row]:
    """Every wrong port of a family at every number of bits, then right ones over seeds."""
    checkpoint = TinyCheckpoint(build(family), tok)
    reference, known = RememberedReference(checkpoint), {}
    for form in formats:
        for name, place in mutations(family):
            options = {"family": {"departures": DEPARTURES[name]}} if name in DEPARTURES else {}
            port = AuthoredPort(checkpoint, recipe(form, **options))
            try:
                if name in TABLE:
                    TABLE[name].change(port)
            except Inapplicable:
                continue
            row = {"family": family, "bits": form, "name": name, "place": place, "wrong": True}
            yield row | verdict(port, reference, known, name)
    for seed in range(1, seeds + 1):
        checkpoint = TinyCheckpoint(build(family, seed), tok)
        reference, known = RememberedReference(checkpoint), {}
        for form in formats:
            right = {"name": f"seed {seed}", "place": "", "wrong": False}
            row = {"family": family, "bits": form} | right
            yield row | verdict(AuthoredPort(checkpoint, recipe(form)), reference, known, "")


def tables(rows: list[Row]) -> Iterator[str]:
    """The page's tables, as Markdown."""
    families = list(dict.fromkeys(row["family"] for row in rows))
    yield "| family | bits | wrong ports | certified | right ports | refused |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for family in families:
        for form in FORMATS:
            own = [row for row in rows if (row["family"], row["bits"]) == (family, form)]
            wrong, right = ([row for row in own if row["wrong"] is is_] for is_ in (True, False))
            certified = sum(row["passed"] for row in wrong)
            refused = sum(not row["passed"] for row in right)
            yield f"| {family} | {form} | {len(wrong)} | {certified} | {len(right)} | {refused} |"
    wrong, right = ([row for row in rows if row["wrong"] is is_] for is_ in (True, False))
    yield (
        f"| all | | {len(wrong)} | **{sum(row['passed'] for row in wrong)}** | {len(right)} "
        f"| **{sum(not row['passed'] for row in right)}** |"
    )
    yield ""
    yield "By family, the largest error of structure of a right port, the least of a wrong one that"
    yield "was refused by that error, and how many kinds each question refuses; the limit is "
    yield f"{limits().structure.relative:g}."
    yield ""
    yield "| family | right, largest | wrong, least | kinds | by structure | by weights | else |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for family in families:
        yield summary(family, [row for row in rows if row["family"] == family])


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


def write_page(rows: list[Row]) -> None:
    """Put the tables in their place on the page."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(START)
    _, _, after = rest.partition(END)
    content = "\n".join([START, "", *tables(rows), "", END])
    PAGE.write_text(f"{before}{content}{after}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--families", nargs="*", default=list(FAMILIES))
    parser.add_argument("--formats", nargs="*", default=list(FORMATS))
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--json", type=Path, help="add a family's results when it is done")
    parser.add_argument("--page", type=Path, help="write the page of such a file")
    arguments = parser.parse_args()
    if arguments.page:
        write_page(json.loads(arguments.page.read_text()))
        return
    torch.set_num_threads(1)
    tok, started = tokenizer_of(), time.perf_counter()
    for family in arguments.families:
        rows = []
        with encoded_once():
            for row in run(family, arguments.seeds, arguments.formats, tok):
                rows.append(row)
                if row["wrong"] == row["passed"]:
                    print(row, flush=True)
        print(f"{family}: {len(rows)} ports, {time.perf_counter() - started:.0f} s", flush=True)
        if arguments.json:
            known = json.loads(arguments.json.read_text()) if arguments.json.exists() else []
            arguments.json.write_text(json.dumps(known + rows, indent=1))


if __name__ == "__main__":
    main()
