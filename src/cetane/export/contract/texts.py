"""The texts that are written from a contract: the host's code, and the contract in words."""

import re
from typing import Any

from cetane.templates import environment

HOST, DOCUMENT = "host.py", "CONTRACT.md"


def rendered(contract: dict[str, Any]) -> dict[str, str]:
    """The texts that are written from the contract, by their files' names."""
    return {HOST: host(contract), DOCUMENT: document(contract)}


def host(contract: dict[str, Any]) -> str:
    """The host's code, with only what this contract needs."""
    functions, steps, groups = functions_of(contract), steps_of(contract), contract["groups"]
    sources = [item["source"] for function in functions for item in function["inputs"]]
    return templates().get_template("host.py.j2").render(
        name=plain(contract["source"]),
        order=contract["order"],
        time=3 if contract["order"] == "c1t" else 2,
        sources={source["host"] for source in sources},
        sinks={item["sink"]["host"] for function in functions for item in function["outputs"]},
        groups=groups,
        capacities=contract["capacities"],
        buffers=contract["buffers"],
        int8=bool(contract["int8"]),
        contracts={each["contract"].removeprefix("stateful-") for each in groups.values()},
        forms={form for each in groups.values() for form in each["forms"].values()},
        ends=any(each["ends"] for each in groups.values()),
        windows=any(source.get("window") for source in sources),
        distances=any(source.get("distances") for source in sources),
        states=any(function["states"] for function in functions),
        adapters=sorted(contract["adapters"]),
        routed=any("experts" in step for step in steps),
        adds=any("adds" in step for step in steps),
        skips=any(mode["skips"] for mode in contract["modes"]),
        row_format=contract["row_format"],
        subset=contract["rows"] is not None,
        softcap=contract["softcap"],
    )  # fmt: skip


def document(contract: dict[str, Any]) -> str:
    """The contract in words."""
    functions = functions_of(contract)
    sinks = (item["sink"]["host"] for f in functions for item in f["outputs"])
    sources = (item["source"] for f in functions for item in f["inputs"])
    return templates().get_template("contract.md.j2").render(
        **contract, adds=any("adds" in step for step in steps_of(contract)),
        matrices="matrix" in sinks,
        by_position={each["table"] for each in sources if each["host"] == "position_rows"},
    )  # fmt: skip


def functions_of(contract: dict[str, Any]) -> list[dict[str, Any]]:
    return [function for shard in contract["shards"] for function in shard["functions"]]


def steps_of(contract: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for mode in contract["modes"] for step in mode["steps"]]


def templates() -> Any:
    """The templates, with their filters."""
    return environment("cetane.export.contract", {"shape": shape, "mb": megabytes, "plain": plain})


def plain(text: str) -> str:
    """A name for code and tables: a model's source may hold any characters."""
    return re.sub(r"[^\w./@ -]", "_", text)[:100]


def shape(sizes: tuple[int, ...]) -> str:
    return " x ".join(map(str, sizes))


def megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f} MB"
