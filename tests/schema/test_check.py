"""Manifests with plans that no engine can run."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
from pydantic import ValidationError
from tests.planner.plans import plan, zaya_planner

from cetane.errors import CetaneError
from cetane.schema.plan import Plan
from cetane.validation import validated


def grown(content: dict[str, Any], rows: int) -> None:
    """A vocabulary that the table of tokens has, and the head has not."""
    content["vocab"] = content["tables"]["tokens"]["rows"] = rows


def uncalled(content: dict[str, Any], host: str) -> None:
    """A function that no mode calls, which takes rows of a table that is not there."""
    for shard in content["shards"]:
        for function in shard["functions"]:
            if any(item["source"]["host"] == host for item in function["inputs"]):
                extra = deepcopy(function) | {"name": "uncalled"}
                for item in extra["inputs"]:
                    if item["source"]["host"] == host:
                        item["source"]["table"] = "unknown"
                shard["functions"].append(extra)
                return
    raise AssertionError(host)


def first(content: dict[str, Any], part: str) -> dict[str, Any]:
    return content["shards"][0]["functions"][0][part][0]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda c: c["modes"].pop("decode"), "no decode mode"),
        (lambda c: c["modes"]["decode"].update(tokens=2), "no decode mode of one token"),
        (lambda c: c["modes"]["prefill"].update(tokens=0), "greater than or equal to 1"),
        (lambda c: first(c, "inputs").update(shape=[10**7, 10**7]), "elements"),
        (lambda c: first(c, "inputs").update(shape=[-1, 2]), "greater than or equal to 1"),
        (
            lambda c: first(c, "inputs").update(source={"host": "tensor", "name": "x"}),
            "nothing writes hidden",
        ),
        (lambda c: c.update(rotary=[]), "no rotary table default"),
        (lambda c: uncalled(c, "rotary"), "/uncalled: no rotary table unknown"),
        (lambda c: uncalled(c, "embedding"), "/uncalled: no table unknown"),
        (lambda c: c.update(vocab=289), "the table of tokens is not 289 by 64"),
        (lambda c: grown(c, 289), "288 logits for 289 tokens"),
        (
            lambda c: first(c, "outputs").update(
                sink={"host": "cache", "name": "x", "group": "kv", "write": "append"}
            ),
            "writes a cache that it does not read",
        ),
        (
            lambda c: first(c, "outputs").update(sink={"host": "history", "name": "x"}),
            "writes a history that it does not read",
        ),
        (lambda c: c["modes"]["verify"]["steps"][0].update(function="x"), "no such function"),
        (lambda c: c["modes"]["verify"]["steps"][0].update(shard="x"), "no such function"),
        (lambda c: c["modes"]["verify"]["steps"].reverse(), "not in the order of the shards"),
        (lambda c: c["shards"][0].update(kind="head"), "a head, writes more than logits"),
    ],
)
def test_a_plan_that_an_engine_cannot_run(damage: Callable[[Any], Any], message: str) -> None:
    content = plan(layout={"kind": "chunks"}).model_dump(mode="json")
    damage(content)
    with pytest.raises(CetaneError, match=f"manifest.json: .*{message}"):
        validated(Plan, content, "manifest.json")


def expert(content: dict[str, Any], index: int, name: str = "decode") -> dict[str, Any]:
    (found,) = (
        f for f in content["shards"][1]["functions"] if f["name"] == f"expert-{index:02}-{name}"
    )
    return found


def route(content: dict[str, Any]) -> dict[str, Any]:
    (found,) = (
        step
        for step in content["modes"]["decode"]["steps"]
        if "experts" in step and step["shard"] == "moe-00"
    )
    return found


HOST = {"host": "position", "group": "kv"}
CACHE = {"host": "cache", "name": "attn-00.kv_k", "group": "kv"}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda c: route(c)["experts"][1].append("x"), "calls moe-00/x: no such function"),
        (lambda c: c["shards"].append(c["shards"][1]), "two shards have one name"),
        (
            lambda c: c["shards"][1]["functions"].append(c["shards"][1]["functions"][0]),
            "two functions of a shard have one name",
        ),
        (lambda c: route(c).update(shard="attn-01"), "calls attn-01/expert-00-decode: no such"),
        (lambda c: route(c)["experts"].pop(), "no scores for 2 experts"),
        (lambda c: route(c)["experts"].append(route(c)["experts"][0]), "no scores for 4 experts"),
        (lambda c: route(c).update(experts=[]), "at least 1 item"),
        (lambda c: route(c)["experts"][2].clear(), "do not ascend in width"),
        (lambda c: route(c)["experts"][0].reverse(), "do not ascend in width"),
        (lambda c: route(c).update(scores="x"), "no x for 3 experts"),
        (lambda c: route(c).update(scores="hidden"), "no hidden for 3 experts"),
        (lambda c: expert(c, 1)["inputs"][0].update(source=HOST), "needs the host"),
        (lambda c: expert(c, 1)["inputs"][0].update(source=CACHE), "needs the host"),
        (
            lambda c: expert(c, 0)["outputs"][0].update(sink=CACHE | {"write": "replace"}),
            "needs the host",
        ),
        (
            lambda c: expert(c, 0)["outputs"][0].update(
                sink={"host": "logits", "start": 0, "stop": 288}
            ),
            "needs the host",
        ),
        (
            lambda c: expert(c, 2)["inputs"][0].update(source={"host": "tensor", "name": "x"}),
            "nothing writes hidden of moe-00",
        ),
        (
            lambda c: expert(c, 2)["outputs"][0].update(sink={"host": "tensor", "name": "router"}),
            "write different tensors",
        ),
        (lambda c: expert(c, 2)["outputs"][0].update(name="other"), "write different tensors"),
        (
            lambda c: expert(c, 0, "verify")["outputs"][0].update(shape=[1, 63, 1, 4]),
            "write different tensors",
        ),
        (
            lambda c: expert(c, 0)["outputs"][0].update(shape=[1, 65, 1, 1]),
            "write different tensors",
        ),
        (lambda c: c["modes"]["decode"]["steps"].pop(1), "no scores for 3 experts"),
    ],
)
def test_a_route_that_an_engine_cannot_run(damage: Callable[[Any], Any], message: str) -> None:
    made = zaya_planner(layout={"kind": "per-block", "routed": ["decode", "verify"]}).plan()
    content = made.model_dump(mode="json")
    damage(content)
    with pytest.raises(ValidationError, match=message):
        Plan.model_validate(content)
