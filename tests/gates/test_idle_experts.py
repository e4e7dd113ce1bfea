"""Functions of experts that no probe ran: the authored modules judge them."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.families.mixture_models import build_oss

from cetane.engine.authored import authored_engine
from cetane.gates.explain import explain
from cetane.gates.golden import Proof
from cetane.gates.golden_result import GoldenResult
from cetane.gates.idle_experts import RANDOM, idle_functions
from cetane.gates.limits import limits
from cetane.gates.observe import ProbeTask, observe
from cetane.gates.probes import Probe, ProbePart
from cetane.gates.structure import Deviation, judge_structure
from cetane.gates.text_tasks import start_tasks
from cetane.planner import Planner

from .conftest import zaya_recipe
from .mutations.families import recipe, tokenizer_of
from .mutations.ports import AuthoredPort, RememberedReference, TinyCheckpoint

IDLE = "expert-03-decode"


def test_experts_that_no_token_chose_are_named(
    zaya_model: Any, in_memory: Callable[..., Any]
) -> None:
    """Here the first expert takes all tokens."""
    checkpoint = in_memory(zaya_model)
    for name, tensor in checkpoint.tensors.items():
        if name.endswith("balancing_biases"):
            checkpoint.tensors[name] = tensor - 9 * torch.arange(len(tensor)).clamp(max=1)
    recipe = zaya_recipe(layout={"kind": "per-layer", "routed": ["decode"]})
    planner = Planner(checkpoint, recipe)
    engine = authored_engine(planner, checkpoint)
    assert ("layer-00", "expert-00-decode") in idle_functions(engine, None), "nothing ran yet"
    probe = Probe("x", tuple(range(20, 34)))
    observe(engine, planner, [ProbeTask("decode", probe, (ProbePart("decode", 14),))])
    assert idle_functions(engine, None) == [
        (f"layer-{layer:02}", f"expert-{expert:02}-decode") for layer in (0, 1) for expert in (1, 2)
    ]
    assert idle_functions(engine, "an adapter") == []


@pytest.fixture(scope="module")
def checkpoint() -> TinyCheckpoint:
    """No token takes the last expert of the second layer."""
    model = build_oss(limit=0.3, num_hidden_layers=2, num_local_experts=4)
    model.model.layers[1].mlp.router.bias.data[3] = -100
    return TinyCheckpoint(model, tokenizer_of())


def port_of(checkpoint: TinyCheckpoint) -> AuthoredPort:
    layout = {"kind": "chunks", "chunks": 2, "routed": ["decode"]}
    return AuthoredPort(checkpoint, recipe("fp16", layout=layout))


def of_idle(port: AuthoredPort, checkpoint: TinyCheckpoint) -> list[Deviation]:
    reference = RememberedReference(checkpoint)
    proof = Proof(port, checkpoint, reference, port.tables, lambda *_: None)  # type: ignore[arg-type]
    return [one for one in proof.structure()[0] if one.probe == RANDOM]


def test_a_right_one(checkpoint: TinyCheckpoint) -> None:
    (one,) = of_idle(port_of(checkpoint), checkpoint)
    assert (one.shard, one.truth, one.mode) == ("chunk-01", f"the authored {IDLE}", "decode")
    assert one.relative < limits().structure.relative


def test_fp16_says_what_it_did_not_run(checkpoint: TinyCheckpoint) -> None:
    port = port_of(checkpoint)
    reference = RememberedReference(checkpoint)
    proof = Proof(port, checkpoint, reference, port.tables, lambda *_: None)  # type: ignore[arg-type]
    _, text, _ = proof.structure()
    _, read = proof.compression(text, start_tasks(proof.plan, proof.port.tokenizer, text.peak))
    (told,) = proof.rounding(read)[-1]
    assert told.endswith(f"in fp16, 1 in all, so their range was not judged: chunk-01/{IDLE}")


def test_a_wrong_one(checkpoint: TinyCheckpoint) -> None:
    """Its outputs are as large as they should be, with two channels exchanged."""
    port = port_of(checkpoint)

    def exchange(_: str, function: str, outputs: dict[str, Any]) -> None:
        if function == IDLE:
            for name, value in outputs.items():
                outputs[name] = np.roll(value, 1, axis=1)

    port.after.append(exchange)
    wrong = of_idle(port, checkpoint)
    assert [check.passed for check in judge_structure(wrong)] == [False]
    verdict = GoldenResult.model_construct(
        passed=False, checks=tuple(judge_structure(wrong)), structure=tuple(wrong)
    )
    why = explain(port, checkpoint, verdict)
    assert why is not None and why.cause == "conversion"
    assert f"errs by 1.3 after the authored {IDLE} (decode, random inputs" in why.sentence
