"""The golden gate on wrong ports, by mutation, and on right ones: docs/reference/mutations.md.

python benchmarks/mutations.py [--families llama zaya] [--seeds 20] [--json FILE] [-o PAGE]
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


def verdict(
    port: AuthoredPort, reference: RememberedReference, known: dict[str, Any], name: str
) -> dict[str, Any]:
    """What every question says of a port; answers about structure are kept in `known`."""
    try:
        judged = judge(port, reference, known.get(name))
    except (CetaneError, AssertionError, RuntimeError, ValueError, KeyError) as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return {"passed": False, "by": ["does not run"], "error": reason}
    known[name] = judged.structure
    by = list(judged.refused_by)
    return {"passed": not by, "by": by, "structure": judged.worst}


def run(family: str, seeds: int, formats: list[str], tok: Tokenizer) -> Iterator[dict[str, Any]]:
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
            row = {
                "family": family,
                "bits": form,
                "name": f"seed {seed}",
                "place": "",
                "wrong": False,
            }
            yield row | verdict(AuthoredPort(checkpoint, recipe(form)), reference, known, "")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--families", nargs="*", default=list(FAMILIES))
    parser.add_argument("--formats", nargs="*", default=list(FORMATS))
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tok, rows, started = tokenizer_of(), [], time.perf_counter()
    for family in arguments.families:
        with encoded_once():
            for row in run(family, arguments.seeds, arguments.formats, tok):
                rows.append(row)
                if row["wrong"] == row["passed"]:
                    print(row, flush=True)
        print(f"{family}: {len(rows)} ports, {time.perf_counter() - started:.0f} s", flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
