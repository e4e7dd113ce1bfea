"""Plans of released models, from their sizes alone: docs/reference/models.md.

python benchmarks/released_models.py [--write]
"""

import argparse
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cetane.errors import CetaneError
from cetane.gates.residency.target import Target
from cetane.hardware.chips import find_chip
from cetane.lab.synthetic import SHAPES, Shapes
from cetane.pipeline.chip_layout import recipe_for_chip
from cetane.pipeline.plan import forecast
from cetane.planner import Planner
from cetane.schema.changes import override
from cetane.schema.recipe import load_recipe
from common import put_lines

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs/reference/models.md"
CHIPS = ("m4-max", "a19-pro")
CHOSEN = {
    "compression.default": "palette6-kmeans-group32",
    "embedding.format": "int8",
    "family.residual_scale": 1.0,
    "layout.kind": "auto",
}
"""What `port` would choose, or refuse, from weights."""


def row(name: str, config: dict[str, Any]) -> list[str]:
    """A line of the table: packages and speed on every chip, by a layout for it."""
    SHAPES[name] = config
    shapes, cells = Shapes(name), [name]
    millions = sum(tensor.numel() for n, tensor in shapes.tensors.items() if n in shapes) / 1e6
    cells.append(f"{millions:,.0f}")
    for number, chip in enumerate(CHIPS):
        recipe = override(load_recipe("default"), CHOSEN)
        try:
            fitted = recipe_for_chip(Planner(shapes, recipe), Target(chip))
        except CetaneError as error:
            cells += ([] if number else ["", ""]) + [error.message, ""]
            continue
        planner = Planner(shapes, fitted)
        plan = planner.plan()
        if not number:
            cells += [f"{plan.weight_bytes / 1e6:,.0f}", f"{plan.kv_bytes[2048] / 1e6:,.0f}"]
        speed = forecast(planner, chip).decode
        told = "" if speed is None else f"{speed.tok_s:.0f} ({speed.ms:.0f} ms)"
        cells += [f"{len(plan.shards)}", told]
    return cells


def table() -> Iterator[str]:
    heads = ["model", "M parameters", "weights, MB", "cache, MB"]
    for chip in CHIPS:
        heads += [f"{find_chip(chip).name}: packages", "tokens/s"]
    yield "| " + " | ".join(heads) + " |"
    yield "| --- |" + " ---: |" * (len(heads) - 1)
    content = tomllib.loads((HERE / "released_models.toml").read_text(encoding="utf-8"))
    for model in content["model"]:
        config = {k: None if v == "none" else v for k, v in model["config"].items()}
        yield "| " + " | ".join(row(model["name"], config)) + " |"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true", help="into docs/reference/models.md")
    lines = []
    for line in table():
        lines.append(line)
        print(line, flush=True)
    if parser.parse_args().write:
        put_lines(PAGE, "table", lines)


if __name__ == "__main__":
    main()
