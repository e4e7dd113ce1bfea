"""Adapters on the command line."""

from pathlib import Path
from typing import Any

import pytest


def test_inspect(cetane: Any, adapted: Any) -> None:
    options = [f"{name}={folder}" for name, folder in adapted.folders.items()]
    arguments = [part for option in options for part in ("--adapter", option)]
    shown = cetane("inspect", str(adapted.base), *arguments, "--json")
    content = shown.json["adapters"]
    assert content["dora"] == {
        "folder": str(adapted.folders["dora"]), "stated_base": None, "rank": 2, "dora": True,
        "changes": 1, "replaces": [],
    }  # fmt: skip
    assert content["plain"]["changes"] == 14
    shown = cetane("inspect", str(adapted.base), "--lora", str(adapted.folders["dora"]))
    assert "adapter lora" in shown.out


def test_plan_and_info_say_what_they_cost(cetane: Any, adapted: Any) -> None:
    shown = cetane("info", str(adapted.bundle.path)).out
    assert "adapter dora: rank 2, DoRA, 0.001 MB more, 2 functions" in shown, shown
    assert "adapters share the weights, which each package stores once" in shown
    folder = adapted.folders["plain"]
    shown = cetane("plan", str(adapted.base), "--context", "64", "--adapter", f"sql={folder}").out
    assert "adapter sql: rank 3," in shown
    assert "18 functions" in shown


def test_run(cetane: Any, adapted: Any) -> None:
    answers = set()
    for adapter in ([], ["--adapter", "plain"], ["--adapter", "dora"]):
        shown = cetane(
            "run", str(adapted.bundle.path), "--prompt-ids", "9,40,77,5", "--max-new", "6",
            "--json", *adapter,
        )  # fmt: skip
        answers.add(tuple(shown.json["tokens"]))
    assert len(answers) > 1


@pytest.mark.parametrize("adapter", ["plain", "dora"])
def test_profile(adapter: str, cetane: Any, adapted: Any) -> None:
    """Also of an adapter that changes one shard of two."""
    found = cetane(
        "run", str(adapted.bundle.path), "--prompt-ids", "9,40,77,5", "--max-new", "3",
        "--adapter", adapter, "--profile", "--json",
    ).json["profile"]  # fmt: skip
    assert found["layers_ms"] > 0 and found["head_ms"] > 0 and found["forward_tok_s"] > 0


def test_bench_and_report(cetane: Any, adapted: Any, tmp_path: Path) -> None:
    bundle = str(adapted.bundle.path)
    error = cetane("bench", bundle, "--adapter", "other").error
    assert error == "no adapter 'other'; known: dora, plain"
    assert "--adapter is for drafts" in cetane("bench", bundle, bundle, "--adapter", "dora").error
    card = cetane("push", bundle, "me/model", "--dry-run").out
    assert 'cetane run model "Hello" --adapter dora\n' in card
    cetane("report", bundle, "-o", str(tmp_path / "page.html"))
    page = (tmp_path / "page.html").read_text()
    for name in ("plain", "dora"):
        assert f"adapter {name}" in page and str(adapted.folders[name]) in page


def test_chat_switches(cetane: Any, adapted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter(["/adapter plain", "/adapter other", "/adapter", ""])
    monkeypatch.setattr("builtins.input", lambda *_: next(lines))
    shown = cetane("run", str(adapted.bundle.path), "--chat")
    assert "from now on: plain" in shown.err
    assert "no adapter 'other'; known: dora, plain" in shown.err
    assert "from now on: the model alone" in shown.err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--adapter", "sql"], "not NAME=FOLDER"),
        (["--adapter", "a=x", "--adapter", "a=y"], "named twice"),
        (["--adapter", "a=nowhere"], "no adapter_config.json"),
        (["--lora", "nowhere"], "no adapter_config.json"),
    ],
)
def test_wrong_options(
    arguments: list[str], reason: str, cetane: Any, tiny_checkpoint_folder: Path
) -> None:
    assert reason in cetane("plan", str(tiny_checkpoint_folder), *arguments).error
