"""The table of coremltools' own tests: modules, and classes of failure with a cause each."""

import json
import re
import tomllib
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from common import console

CLASSES = Path(__file__).with_name("conformance_classes.toml")
BEGIN, END = "<!-- begin results -->", "<!-- end results -->"
OUTCOMES = ["passed", "failed", "xpassed", "xfailed", "skipped", "not here"]
UNKNOWN = {"name": "other", "counts": True, "cause": "Not explained."}

Test = dict[str, Any]


@dataclass
class Module:
    """How many tests of a module there are, and what became of those that ran."""

    collected: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)

    def row(self, name: str) -> list[str]:
        """Its cells of the table."""
        counts = (self.outcomes[outcome] for outcome in OUTCOMES)
        return [name, *map(str, (self.collected, self.outcomes.total(), *counts))]


def write_report(folder: Path, document: Path) -> None:
    """Print the table, and write it with every failure to `report.json` and, as Markdown, between
    the markers of the document."""
    modules, failures, skips = _read(folder)
    total = Module(sum(module.collected for module in modules.values()))
    for module in modules.values():
        total.outcomes += module.outcomes
    columns = ["module", "collected", "ran", *OUTCOMES]
    rows = [module.row(name) for name, module in sorted(modules.items())] + [total.row("all")]
    table = Table(*columns)
    for name, *counts in rows:
        table.add_row("/".join(name.split("/")[-2:]), *counts)
    console.print(table)
    summary = f"`{folder.name}`: {_summary(total)}"
    console.print(summary)
    report = {
        "modules": {row[0]: dict(zip(columns[1:], map(int, row[1:]), strict=True)) for row in rows},
        "classes": {name: len(tests) for name, (_, tests) in failures.items()},
        "failures": [test for _, tests in failures.values() for test in tests],
    }
    (folder / "report.json").write_text(json.dumps(report, indent=1))
    lines = [summary, "", *_markdown(columns, rows)]
    lines += ["", "### Classes of failure", "", *_explained(failures)]
    lines += ["", "### Reasons for skipping", "", *_markdown(["reason", "tests"], skips)]
    text = document.read_text(encoding="utf-8")
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    document.write_text("\n".join([before + BEGIN, *lines, END + after]), encoding="utf-8")


def _read(
    folder: Path,
) -> tuple[dict[str, Module], dict[str, tuple[Test, list[Test]]], list[list[str]]]:
    """Modules by name, classes with their failures by name, and reasons for skipping."""
    modules: dict[str, Module] = defaultdict(Module)
    for file in folder.glob("*.collected.json"):
        for name, counts in json.loads(file.read_text()).items():
            modules[_module(name)].collected = counts["collected"]
    failures: dict[str, tuple[Test, list[Test]]] = {}
    skips: Counter[str] = Counter()
    tests = [test for file in sorted(folder.glob("*.jsonl")) for test in results_in(file)]
    for test in tests:
        outcome = test["outcome"]
        if outcome == "failed":
            found = classify(test)
            failures.setdefault(found["name"], (found, []))[1].append(test)
            outcome = "failed" if found["counts"] else "not here"
        if outcome == "skipped":
            skips[re.sub(r"^Skipped: ", "", test["reason"]).partition("\n")[0]] += 1
        modules[_module(test["test"])].outcomes[outcome] += 1
    return modules, failures, [[reason, str(count)] for reason, count in skips.most_common()]


def results_in(file: Path) -> list[Test]:
    """The last result of every test in a file of JSON lines, which may not be there yet, or may
    just be written to."""
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return list({test["test"]: test for test in map(json.loads, lines)}.values())


def _module(test: str) -> str:
    return test.partition("coremltools/")[2].partition("::")[0]


def classify(test: Test) -> dict[str, Any]:
    """The class of a failure, as the table of classes has it."""
    for entry in tomllib.loads(CLASSES.read_text(encoding="utf-8"))["class"]:
        here = re.search(entry.get("test", ""), test["test"])
        if here and re.search(entry["reason"], test["reason"]):
            return entry
    return UNKNOWN


def _summary(total: Module) -> str:
    counts = total.outcomes
    passed = counts["passed"] + counts["xpassed"]
    here, all_ = passed + counts["failed"], passed + counts["failed"] + counts["not here"]
    return (
        f"{total.outcomes.total():,} of {total.collected:,} collected tests ran. "
        f"**{_percent(passed, here)}** of those for this machine pass ({passed:,} of {here:,}); "
        f"{_percent(passed, all_)} if all failures count ({passed:,} of {all_:,})."
    )


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.2f} %" if whole else "none"


def _markdown(columns: list[str], rows: list[list[str]]) -> list[str]:
    numbers = f"|{'---:|' * (len(columns) - 1)}"
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return [
        f"| {' | '.join(columns)} |",
        f"|---{numbers}",
        *(f"| {' | '.join(row)} |" for row in cells),
    ]


def _explained(failures: dict[str, tuple[Test, list[Test]]]) -> list[str]:
    """One paragraph a class, with the tests that are in it, parameters aside."""
    lines = []
    for name, (entry, tests) in sorted(failures.items()):
        counts = "counted" if entry["counts"] else "not for this machine"
        lines.append(f"- **{name}** ({len(tests)}, {counts}). {entry['cause']}")
        functions = Counter(test["test"].partition("::")[2].partition("[")[0] for test in tests)
        named = [f"`{function}` ({count})" for function, count in sorted(functions.items())]
        lines.append(f"  {', '.join(named)}")
    return lines
