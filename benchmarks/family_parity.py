"""The worst error of every family on random configs: docs/reference/models.md.

python benchmarks/family_parity.py [--configs 30] [--families gpt_oss ...] [--write]

The truth is transformers, in fp32. Every config runs in all four contracts: by prefill, in steps of
one and of four tokens, in uneven pieces, and beside drafts that are evaluated and refused.
"""

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.strategies import SearchStrategy

from common import put_lines

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.conftest import build_model
from tests.families import (
    test_deepseek_v2,
    test_gpt_oss,
    test_lfm2,
    test_llama,
    test_mixtral,
    test_olmo2,
    test_qwen3_next,
)
from tests.families.parity import FEEDS, engine_of, run, run_drafts, truth
from tests.families.zaya_models import recipe

from cetane.schema.slots import CONTRACTS

PAGE = Path(__file__).parents[1] / "docs/reference/models.md"

Drawn = tuple[str, dict[str, Any]]
Make = Callable[..., Any]


def named(kind: str, configs: SearchStrategy[dict[str, Any]]) -> SearchStrategy[Drawn]:
    return configs.map(lambda config: (kind, config))


def build_oss(_: str, **config: Any) -> Any:
    return test_gpt_oss.build_oss(**config)


FAMILIES: dict[str, tuple[SearchStrategy[Drawn], Make]] = {
    "mixtral": (test_mixtral.configs(), test_mixtral.build),
    "gpt_oss": (named("gpt_oss", test_gpt_oss.configs()), build_oss),
    "qwen3_next": (test_qwen3_next.configs(), test_mixtral.build),
    "deepseek_v2": (named("deepseek_v2", test_deepseek_v2.configs()), test_mixtral.build),
    "llama": (test_llama.configs(), build_model),
    "olmo2": (test_olmo2.configs(), build_model),
    "lfm2": (named("lfm2", test_lfm2.configs()), build_model),
}


def errors(model: Any, number: int) -> dict[str, float]:
    """The largest error of logits in every contract and way to feed; layouts take turns."""
    expected = truth(model)
    kinds = ("per-block", "per-layer", "single")
    worst: dict[str, float] = {}
    for turn, contract in enumerate(CONTRACTS):
        engine = engine_of(model, recipe(contract, kinds[(number + turn) % 3], slices=2))
        rows = {name: run(engine, pieces) for name, pieces in FEEDS.items()}
        rows["refused drafts"] = run_drafts(engine)
        for name, logits in rows.items():
            worst[name] = max(worst.get(name, 0.0), float(np.abs(logits - expected).max()))
    return worst


def measure(family: str, configs: int) -> dict[str, tuple[int, dict[str, float]]]:
    """By model type: the number of configs, and the worst error of each way to feed."""
    drawn, make = FAMILIES[family]
    worst: defaultdict[str, dict[str, float]] = defaultdict(dict)
    counts: defaultdict[str, int] = defaultdict(int)

    @settings(
        max_examples=configs, deadline=None, derandomize=True, database=None,
        phases=[Phase.generate], suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(drawn)
    def every(one: Drawn) -> None:
        kind, config = one
        if "full_attention" not in config.get("layer_types", ["full_attention"]):
            config["layer_types"][-1] = "full_attention"
        made = errors(make(kind, **config), counts[kind])
        counts[kind] += 1
        for name, error in made.items():
            worst[kind][name] = max(worst[kind].get(name, 0.0), error)

    every()
    return {kind: (counts[kind], worst[kind]) for kind in sorted(counts)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--configs", type=int, default=30, help="of each family")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--write", action="store_true", help="into docs/reference/models.md")
    arguments = parser.parse_args()
    feeds = [*FEEDS, "refused drafts"]
    lines = ["| model type | configs | " + " | ".join(feeds) + " |"]
    lines.append("| --- |" + " ---: |" * (1 + len(feeds)))
    print("\n".join(lines), flush=True)
    for family in arguments.families:
        started = time.process_time()
        for kind, (count, worst) in measure(family, arguments.configs).items():
            cells = " | ".join(f"{worst[name]:.1e}" for name in feeds)
            lines.append(f"| {kind} | {count} | {cells} |")
            print(lines[-1], flush=True)
        print(f"{family}: {time.process_time() - started:.0f} s", file=sys.stderr)
    if arguments.write:
        put_lines(PAGE, "parity", lines)


if __name__ == "__main__":
    main()
