"""The worst error of every family on random configs: docs/reference/models.md.

python benchmarks/family_parity.py [--configs 30] [--families gpt_oss ...] [--write]

The truth is transformers, in fp32. Every config runs in all four contracts: by prefill, in steps of
one and of four tokens, in uneven pieces, and beside drafts that are evaluated and refused. Beside
the errors stands the size of logits, and how far transformers' own logits move if the last bit of
every weight does. No port can be nearer to a model than that.
"""

import argparse
import copy
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis.strategies import SearchStrategy

from common import put_lines

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.conftest import build_model
from tests.families import (
    gemma_models,
    test_afmoe,
    test_alibi,
    test_bamba,
    test_deepseek,
    test_falcon_h1,
    test_flex_olmo,
    test_glm4,
    test_gpt2,
    test_gpt_oss,
    test_gptj,
    test_granite_hybrid,
    test_granite_swa,
    test_jamba,
    test_layer_normed,
    test_lfm2,
    test_llama,
    test_llama4,
    test_mamba,
    test_mixtral,
    test_nemotron_h,
    test_olmo2,
    test_olmo_hybrid,
    test_phimoe,
    test_pure_mamba2,
    test_qwen3_next,
    test_zaya,
)
from tests.families.alibi_models import build_alibi
from tests.families.layer_normed_models import LAYER_NORMED, build_layer_normed
from tests.families.matrix_models import SCANS, build_jamba, build_mamba2, build_scan
from tests.families.mixture_models import (
    MIXTURES,
    build_afmoe,
    build_lfm2_moe,
    build_llama4,
    build_mixture,
    build_oss,
)
from tests.families.parity import FEEDS, engine_of, run, run_drafts, truth
from tests.families.recipes import recipe
from tests.families.zaya_models import build_zaya, margin

from cetane.schema.slots import CONTRACTS

PAGE = Path(__file__).parents[1] / "docs/reference/models.md"

Drawn = tuple[str, dict[str, Any]]
Make = Callable[..., Any]


def named(kind: str, configs: SearchStrategy[dict[str, Any]]) -> SearchStrategy[Drawn]:
    return configs.map(lambda config: (kind, config))


def of_one_kind(build: Make) -> Make:
    """A builder whose model type is always the same, as one that gets it."""
    return lambda _, **config: build(**config)


def build_decided_zaya(_: str, **config: Any) -> Any:
    """A ZAYA no token of which is near a tie: there, rounding would choose the expert."""
    model = build_zaya(**config)
    assume(margin(model) > test_zaya.TIE)
    return model


@dataclass(frozen=True)
class Family:
    """Random configs of a family's model types, and the function that makes a model of one."""

    configs: SearchStrategy[Drawn]
    build: Make
    types: int = 1
    """The number of model types that the configs have."""


FAMILIES = {
    "llama": Family(test_llama.configs(), build_model, len(test_llama.DRAWN)),
    "llama4": Family(named("llama4_text", test_llama4.configs()), of_one_kind(build_llama4)),
    "olmo2": Family(test_olmo2.configs(), build_model, 3),
    "glm4": Family(test_glm4.configs(), build_model, 2),
    "layer_normed": Family(test_layer_normed.configs(), build_layer_normed, len(LAYER_NORMED)),
    "gpt2": Family(test_gpt2.configs(), build_model, len(test_gpt2.BOOLEANS)),
    "alibi": Family(test_alibi.configs(), build_alibi, 2),
    "gptj": Family(test_gptj.configs(), test_gptj.build, 2),
    "lfm2": Family(named("lfm2", test_lfm2.configs()), build_model),
    "lfm2_moe": Family(named("lfm2_moe", test_lfm2.mixture_configs()), of_one_kind(build_lfm2_moe)),
    "lfm3": Family(named("lfm3", test_lfm2.later_configs()), build_model),
    "mixtral": Family(test_mixtral.configs(), build_mixture, len(MIXTURES)),
    "phimoe": Family(named("phimoe", test_phimoe.configs()), build_mixture),
    "flex_olmo": Family(named("flex_olmo", test_flex_olmo.configs()), build_mixture),
    "afmoe": Family(named("afmoe", test_afmoe.configs()), of_one_kind(build_afmoe)),
    "gpt_oss": Family(named("gpt_oss", test_gpt_oss.configs()), of_one_kind(build_oss)),
    "deepseek": Family(test_deepseek.configs(), build_mixture, 5),
    "qwen3_next": Family(test_qwen3_next.configs(), build_mixture, 3),
    "granite_hybrid": Family(test_granite_hybrid.configs(), build_mixture),
    "granite_swa": Family(test_granite_swa.configs(), build_mixture, 2),
    "falcon_h1": Family(named("falcon_h1", test_falcon_h1.configs()), build_mixture),
    "mamba": Family(test_mamba.configs(), build_scan, len(SCANS)),
    "jamba": Family(named("jamba", test_jamba.configs()), of_one_kind(build_jamba)),
    "mamba2": Family(named("mamba2", test_pure_mamba2.configs()), of_one_kind(build_mamba2)),
    "bamba": Family(named("bamba", test_bamba.configs()), build_mixture),
    "nemotron_h": Family(named("nemotron_h", test_nemotron_h.configs()), build_mixture),
    "olmo_hybrid": Family(named("olmo_hybrid", test_olmo_hybrid.configs()), build_mixture),
    "gemma2": Family(
        named("gemma2", gemma_models.gemma2_configs()), of_one_kind(gemma_models.build_gemma2)
    ),
    "vaultgemma": Family(
        named("vaultgemma", gemma_models.gemma2_configs()),
        of_one_kind(gemma_models.build_vaultgemma),
    ),
    "gemma3": Family(
        named("gemma3_text", gemma_models.gemma3_configs()), of_one_kind(gemma_models.build_gemma3)
    ),
    "gemma3n": Family(
        named("gemma3n_text", gemma_models.gemma3n_configs()),
        of_one_kind(gemma_models.build_gemma3n),
    ),
    "gemma4": Family(
        named("gemma4_text", gemma_models.gemma4_configs()), of_one_kind(gemma_models.build_gemma4)
    ),
    "gemma4_unified": Family(
        named("gemma4_unified_text", gemma_models.gemma4_configs()),
        of_one_kind(gemma_models.build_gemma4_unified),
    ),
    "zaya": Family(named("zaya", test_zaya.configs()), build_decided_zaya),
}
NO_CACHE = {"conv", "linear_attention"}
"""Types of layers without keys and values. A model of only these is none that anybody has."""
SIZE, NUDGED = "largest logit", "transformers, nudged"


def nudged(model: Any) -> Any:
    """The model with the last bit of every weight moved, up or down at random."""
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in other.parameters():
            upwards = torch.rand(parameter.shape, generator=generator) < 0.5
            towards = torch.where(upwards, torch.inf, -torch.inf)
            parameter.copy_(torch.nextafter(parameter, towards))
    return other


def errors(model: Any, number: int) -> dict[str, float]:
    """The largest error of logits in every contract and way to feed; layouts take turns. And how
    large logits are, and what they change in transformers by themselves."""
    expected = truth(model)
    kinds = ("per-block", "per-layer", "single")
    worst = {
        SIZE: float(np.abs(expected).max()),
        NUDGED: float(np.abs(truth(nudged(model)) - expected).max()),
    }
    for turn, contract in enumerate(CONTRACTS):
        engine = engine_of(model, recipe(contract, kinds[(number + turn) % 3], slices=2))
        rows = {name: run(engine, pieces) for name, pieces in FEEDS.items()}
        rows["refused drafts"] = run_drafts(engine)
        for name, logits in rows.items():
            worst[name] = max(worst.get(name, 0.0), float(np.abs(logits - expected).max()))
    return worst


def measure(family: str, configs: int) -> dict[str, tuple[int, dict[str, float]]]:
    """By model type: the number of configs, and the worst of each column."""
    of = FAMILIES[family]
    worst: defaultdict[str, dict[str, float]] = defaultdict(dict)
    counts: defaultdict[str, int] = defaultdict(int)

    @settings(
        max_examples=configs * of.types, deadline=None, derandomize=True, database=None,
        phases=[Phase.generate], suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(of.configs)
    def every(one: Drawn) -> None:
        kind, config = one
        if set(config.get("layer_types", ["full_attention"])) <= NO_CACHE:
            config["layer_types"][-1] = "full_attention"
        made = errors(of.build(kind, **config), counts[kind])
        counts[kind] += 1
        for name, error in made.items():
            worst[kind][name] = max(worst[kind].get(name, 0.0), error)

    every()
    return {kind: (counts[kind], worst[kind]) for kind in sorted(counts)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--configs", type=int, default=30, help="of a model type, on average")
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--write", action="store_true", help="into docs/reference/models.md")
    arguments = parser.parse_args()
    columns = [*FEEDS, "refused drafts", SIZE, NUDGED]
    lines = ["| model type | configs | " + " | ".join(columns) + " |"]
    lines.append("| --- |" + " ---: |" * (1 + len(columns)))
    print("\n".join(lines), flush=True)
    for family in arguments.families:
        started = time.process_time()
        for kind, (count, worst) in measure(family, arguments.configs).items():
            cells = " | ".join(
                f"{worst[name]:.1f}" if name == SIZE else f"{worst[name]:.1e}" for name in columns
            )
            lines.append(f"| {kind} | {count} | {cells} |")
            print(lines[-1], flush=True)
        print(f"{family}: {time.process_time() - started:.0f} s", file=sys.stderr)
    if arguments.write:
        put_lines(PAGE, "parity", lines)


if __name__ == "__main__":
    main()
