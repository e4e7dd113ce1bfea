"""The table at the top of docs/reference/models.md, joined from the page's other tables.

python benchmarks/models_table.py
"""

import tomllib
from pathlib import Path

from cetane.families import families
from common import put_lines

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs/reference/models.md"
NONE = "not yet"
"""What a cell says where no table has a row of the model type."""


def rows(name: str) -> dict[str, list[str]]:
    """The cells of a table between `<!-- name -->` and its end, by the first cell of a row."""
    text = PAGE.read_text(encoding="utf-8")
    content = text.partition(f"<!-- {name} -->")[2].partition(f"<!-- end of {name} -->")[0]
    lines = [line for line in content.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {first: rest for first, *rest in cells[1:] if not first.startswith("---")}


def parity(cells: list[str] | None) -> str:
    """The worst error of any way to feed, and the number of configs."""
    if cells is None:
        return NONE
    configs, *errors, _largest_logit, _nudged = cells
    return f"{max(map(float, errors)):.1e} ({configs} configs)"


def largest(kind: str) -> str:
    """The largest planned size of a type that fits a phone; its packages and speed there."""
    listed = tomllib.loads((HERE / "released_models.toml").read_text())["model"]
    kinds = {model["name"]: model["config"]["model_type"] for model in listed}
    fitting = [
        (float(cells[0].replace(",", "")), name, cells)
        for name, cells in rows("table").items()
        if kinds[name] == kind and cells[5].isdigit()
    ]
    if not fitting:
        return "none of the planned fits" if kind in kinds.values() else NONE
    _, name, cells = max(fitting)
    return f"{name}: {cells[5]} packages, {cells[6].partition(' (')[0]} tokens/s"


def main() -> None:
    """Write the table. Prints it too."""
    errors, trips = rows("parity"), rows("trips")
    lines = [
        "| model type | parity in fp32 | gates, run, serve | largest size for A19 Pro |",
        "| --- | --- | --- | --- |",
    ]
    for kind in sorted(families()):
        trip = trips.get(kind)
        gates = NONE
        if trip is not None:
            _file, port, run, serve, *_layouts = trip
            gates = f"{port.split(', ')[1]}, {run}, {serve}"
        lines.append(f"| {kind} | {parity(errors.get(kind))} | {gates} | {largest(kind)} |")
    put_lines(PAGE, "summary", lines)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
