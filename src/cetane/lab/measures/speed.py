"""Measures of bytes, and of milliseconds on this machine: both sides in turns, in one process."""

import subprocess
import sys
import time

from cetane.engine.engine import Engine
from cetane.errors import CetaneError
from cetane.lab.experiment import ARMS, ArmName
from cetane.lab.sides import (
    WARM,
    Findings,
    Side,
    Sides,
    figure,
    measure_of_both,
    measure_of_side,
    spread,
)
from cetane.perf.breakeven import DraftingTimes
from cetane.planner import Planner
from cetane.planner.weights import weight_count
from cetane.speculate.timing import measure_calls

HERE = "native backend" if sys.platform == "darwin" else "portable backend"


@measure_of_side("size")
def size(side: Side) -> Findings:
    """The sizes of the built bundle."""
    plan = side.bundle.plan
    planner = Planner(side.checkpoint, side.recipe)
    values = {
        "weight_bytes": plan.weight_bytes,
        "package_bytes": side.bundle.manifest.package_bytes,
        "bits_per_weight": 8 * plan.weight_bytes / weight_count(planner.blocks),
        "packages": len(plan.shards),
        "programs": len(plan.functions),
    }
    return Findings({name: figure(name, value) for name, value in values.items()})


@measure_of_both("decode")
def decode(sides: Sides) -> dict[ArmName, Findings]:
    """The time of a decode step after one prompt.

    Every round runs side after side, so that other load affects both. The first round is not
    counted.
    """
    times: dict[ArmName, list[float]] = {name: [] for name in ARMS}
    prompt = next(iter(sides.workload.prompts(sides.baseline.bundle).values()))
    for turn in range(1 + sides.workload.spec.rounds):
        for name in ARMS:
            side = sides.by_arm[name]
            room = side.recipe.cache.context - sides.workload.spec.new_tokens - WARM
            ms = step_ms(side.engine, prompt[:room], sides.workload.spec.new_tokens)
            if turn:
                times[name].append(ms)
    return {name: Findings({"decode_ms": spread("decode_ms", times[name], HERE)}) for name in ARMS}


def step_ms(engine: Engine, prompt: list[int], count: int) -> float:
    """Milliseconds of a step of greedy decoding, after a prompt and some warm-up steps."""
    session = engine.session(engine.plan.plain_modes)
    logits = session.feed(prompt)
    for step in range(WARM + count):
        if step == WARM:
            started = time.perf_counter()
        assert logits is not None
        logits = session.feed([int(logits.argmax())])
    return 1e3 * (time.perf_counter() - started) / count


@measure_of_side("calls")
def calls(side: Side) -> Findings:
    """The time of a verifying call and of a plain step, and the break-even of drafts."""
    engine = side.engine
    verify = engine.plan.modes.get("verify")
    if verify is None:
        note = "no verifying function"
        names = ("verify_ms", "verify_slowdown", "break_even")
        return Findings({name: figure(name, None, note=note) for name in names})
    width = verify.tokens
    times = measure_calls(engine.session(), width, side.workload.spec.rounds)
    plain, call = spread("decode_ms", in_ms(times[1])), spread("verify_ms", in_ms(times[width]))
    assert plain.value is not None and call.value is not None
    spec = DraftingTimes(plain.value, call.value, width)
    share = spec.break_even_share()
    note = f"T = {width}, {HERE}"
    pays = note if share is not None else f"{note}; no acceptance pays"
    return Findings(
        {
            "verify_ms": call.model_copy(update={"note": note}),
            "verify_slowdown": figure("verify_slowdown", spec.slowdown, n=call.n, note=note),
            "break_even": figure("break_even", share, n=call.n, note=pays),
        }
    )


def in_ms(seconds: list[float]) -> list[float]:
    return [1e3 * one for one in seconds]


PEAK = """
import sys
from pathlib import Path
from cetane.bundle import Bundle
from cetane.engine.generate import generate
from cetane.engine.open import open_engine
from cetane.engine.sampling import Sampler
from cetane.measuring.machine import peak_bytes
engine = open_engine(Bundle(Path(sys.argv[1])))
list(generate(engine.session(), [1, 2, 3], Sampler(), 8))
print(peak_bytes())
"""


@measure_of_side("memory")
def memory(side: Side) -> Findings:
    """The largest memory of a new process that opens the bundle and decodes 8 tokens."""
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(side.bundle.path)], capture_output=True, text=True
    )
    if done.returncode:
        raise CetaneError(f"the process that decodes failed: {done.stderr.strip()[-200:]}")
    return Findings({"peak_bytes": figure("peak_bytes", int(done.stdout), note=HERE)})
