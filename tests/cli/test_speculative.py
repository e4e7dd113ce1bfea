"""run --speculative and bench: the same tokens, and what they cost."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file
from tests.speculate.draft_head_models import random_draft_head, with_draft_head

from cetane.bundle import Bundle
from cetane.cli.bench import show
from cetane.files import sha256
from cetane.pipeline.bench import DraftingBenchmark
from cetane.prompts import suite
from cetane.speculate.bench import Speed
from cetane.speculate.draft_heads.modules import load_draft_head

from .conftest import Cetane

pytestmark = pytest.mark.usefixtures("own_cache")
PROMPT = ("--prompt-ids", "7,250,31,99,7,250,31", "--max-new", 30)


@pytest.fixture
def drafting(tiny_bundle: Callable[..., Bundle]) -> Path:
    """A bundle with the same tokenizer, of another recipe."""
    return tiny_bundle(layout={"kind": "single"}, verify=None, prefill=None).path


def test_every_drafter_says_what_the_model_says(
    cetane: Cetane, ported: Bundle, drafting: Path, own_cache: Path
) -> None:
    expected = cetane("run", ported.path, *PROMPT, "--speculative", "none", "--json").json
    assert "speculation" not in expected
    for drafter in ("auto", "ngram", "suffix", "union", drafting):
        run = ("run", ported.path, *PROMPT, "--speculative", drafter, "--json", "--profile")
        found = cetane(*run).json
        assert found["tokens"] == expected["tokens"]
        assert found["profile"]["seconds"].keys() == {"load", "model", "host"}
        counted = found["speculation"]
        # the first token comes with the prompt
        assert counted["tokens"] == len(expected["tokens"]) - 1
        steps = counted["verifier_calls"] + counted["fallbacks"]
        assert counted["tokens"] == steps + counted["accepted"]
        assert counted["break_even_acceptance"] is not None
    assert [path.suffix for path in (own_cache / "suffixes").iterdir()] == [".trie"]
    assert len([*(own_cache / "call-times").glob("*.json")]) == 1  # measured by the first run only


def test_drafts_are_the_default_and_stay_in_the_process(
    cetane: Cetane, ported: Bundle, drafting: Path, own_cache: Path
) -> None:
    assert cetane("run", ported.path, *PROMPT, "--json").json["speculation"]["tokens"] > 0
    assert not (own_cache / "suffixes").exists()
    (times,) = (own_cache / "call-times").glob("*.json")
    for wrong in ('{"1": []}', '{"1": [0.0], "4": [0.0]}', '{"1": [NaN]}'):
        times.write_text(f'{{"seconds": {wrong}}}')
        assert cetane("run", ported.path, *PROMPT).code == 0  # measured again
        assert len(times.read_text()) > 60
    seeded = cetane("run", ported.path, *PROMPT, "--seed", 3, "--temperature", 1, "--json").json
    assert seeded["speculation"]["drafted"] == 0  # the same text again, to the last token
    assert "speculation" not in cetane("run", drafting, *PROMPT, "--json").json  # cannot verify


def test_the_counters_are_shown(cetane: Cetane, ported: Bundle) -> None:
    run = ("run", ported.path, *PROMPT, "--speculative", "ngram", "--profile", "--ngram-min", 1)
    shown = cetane(*run).out
    for name in ("verifier_calls", "drafted", "accepted", "fallbacks", "break_even_acceptance"):
        assert name in shown
    assert "speculation" not in cetane("run", ported.path, *PROMPT, "--speculative", "ngram").out


def test_a_conversation_with_drafts(cetane: Cetane, ported: Bundle) -> None:
    chat = ("run", ported.path, "--chat", "--max-new", 5)
    expected = cetane(*chat, "--speculative", "none", stdin="Hi\nHi\n\n").out
    assert cetane(*chat, stdin="Hi\nHi\n\n").out == expected
    assert cetane(*chat, "--speculative", "union", stdin="Hi\nHi\n\n").out == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--speculative", "oracle"),
            "no drafter 'oracle', and no such folder: oracle",
        ),
        (("--speculative", "ngram", "--ngram-min", 0), "n-grams of 0 to 8 tokens"),
        (("--speculative", "ngram", "--ngram-max", 0), "n-grams of 1 to 0 tokens"),
        (("--speculative", "ngram", "--draft-tokens", 0), "--draft-tokens 0: must be 1 to 7"),
        (("--speculative", "union", "--draft-tokens", 8), "--draft-tokens 8: must be 1 to 7"),
        (("--speculative", "triforce"), "but kv has the contract stateful"),
        (("--speculative", "."), "no manifest.json, so not a complete bundle"),
    ],
    ids=str,
)
def test_bad_wishes(cetane: Cetane, ported: Bundle, options, message: str) -> None:
    found = cetane("run", ported.path, *PROMPT, *options)
    assert message in found.error
    assert found.out == ""


def test_a_bundle_that_cannot_verify(cetane: Cetane, drafting: Path) -> None:
    found = cetane("run", drafting, *PROMPT, "--speculative", "ngram")
    assert "no call wider than one token" in found.error


def test_a_draft_model_with_other_tokens(
    cetane: Cetane, ported: Bundle, drafting: Path, tmp_path: Path
) -> None:
    other = shutil.copytree(drafting, tmp_path / "other")
    manifest = (other / "manifest.json").read_text()
    record = Bundle(other).manifest.files["tokenizer/tokenizer.json"]
    file = other / "tokenizer" / "tokenizer.json"
    file.write_text(file.read_text().replace("<eos>", "<end>"))
    assert file.stat().st_size == record.bytes
    (other / "manifest.json").write_text(manifest.replace(record.sha256, sha256(file)))
    found = cetane("run", ported.path, *PROMPT, "--speculative", other)
    assert "its tokenizer differs from that of" in found.error


def test_a_damaged_suffix_trie(cetane: Cetane, ported: Bundle, own_cache: Path) -> None:
    run = ("run", ported.path, *PROMPT, "--speculative", "suffix")
    assert cetane(*run).code == 0
    (path,) = (own_cache / "suffixes").iterdir()
    path.write_bytes(path.read_bytes()[:-1])
    assert "damaged" in cetane(*run).error


def damage(head: Path) -> None:
    """Give a head other weights than its package has, and a manifest that says so."""
    source, manifest = head / "source.safetensors", head / "head.json"
    before = sha256(source)
    trained = load_draft_head(source)
    trained.output *= -1
    trained.save(source)
    manifest.write_text(manifest.read_text().replace(before, sha256(source)))


@pytest.mark.parametrize("kind", ["medusa", "eagle3"])
def test_a_head_is_trained_and_used(
    cetane: Cetane, tiny_bundle: Callable[..., Bundle], tmp_path: Path, kind: str
) -> None:
    built = tiny_bundle(contract="shift", layout={"kind": "chunks", "chunks": 2})
    bundle = shutil.copytree(built.path, tmp_path / "tiny")
    expected = cetane("run", bundle, *PROMPT, "--json").json["tokens"]
    text = tmp_path / "text.txt"
    text.write_text("The rating of how readily a fuel ignites is its cetane number. " * 40)
    small = ("--tokens", 400, "--window", 32, "--vocabulary", 60, "--epochs", 20, "--steps", 2)
    training = ("train-head", bundle, kind, "--text", text, *small)
    found = cetane(*training, "--json")
    assert found.code == 0
    assert Path(found.json["head"]) == bundle / "heads" / kind
    assert found.json["golden"]["passed"]
    assert not found.json["residency"]  # so small a program is better off on the CPU
    stored = load_file(bundle / "heads" / kind / "source.safetensors")
    assert len(stored["vocabulary"].unique()) == 60  # more than the text has
    for when in ("untrained", "trained"):
        # A random model never chooses what the text has, so no draft can be judged by it.
        assert found.json[when] == {"top1": [], "accepted": [], "positions": 0}

    run = cetane("run", bundle, *PROMPT, "--speculative", kind, "--json").json
    assert run["tokens"] == expected
    assert run["speculation"]["tokens"] == len(expected) - 1
    about = cetane("info", bundle, "--json").json
    assert about["digest"] == built.digest  # a head does not change what the bundle is
    head = about["heads"][kind]
    assert head["digest"] == found.json["digest"]
    assert head["training"]["top1"] == found.json["trained"]["top1"]
    assert head["training"]["data"] == {"text.txt": sha256(text)}
    assert about["gates"].keys() == {f"golden-{kind}", f"residency-{kind}"}
    assert kind in cetane("info", bundle).out
    audited = cetane("audit", bundle, "--json").json
    assert kind in {function["package"] for function in audited["functions"]}

    validated = cetane("validate", bundle, "--json")
    assert validated.code == 0
    assert validated.json["heads"][kind]["passed"]

    missing = cetane("run", built.path, *PROMPT, "--speculative", kind)
    assert f"has no {kind} draft head" in missing.error
    assert f"cetane train-head {built.path} {kind} makes one" in " ".join(missing.err.split())
    shown = cetane(*training)  # again: it takes the place of the first
    assert "no 2 tokens in a row that the model would choose" in " ".join(shown.out.split())
    assert f"golden gate of the {kind} head: pass" in shown.out
    left = {path.name for path in tmp_path.iterdir()} - {"cache"}
    assert left == {"text.txt", "tiny"}
    damage(bundle / "heads" / kind)
    assert cetane("validate", bundle).code == 1
    none = cetane("train-head", bundle, kind, "--text", tmp_path / "none")
    assert "cannot read" in none.error


def test_a_draft_head_moves_to_another_bundle(
    cetane: Cetane, tiny_bundle: Callable[..., Bundle], tmp_path: Path
) -> None:
    first, second = (
        Bundle(shutil.copytree(tiny_bundle(**options).path, tmp_path / name))
        for name, options in (("first", {}), ("second", {"contract": "shift"}))
    )
    with_draft_head(first, random_draft_head("eagle3", first))
    added = cetane("add-head", second.path, first.path, "--json")
    assert added.code == 0 and added.json["passed"]
    (one,) = added.json["heads"]
    assert one["head"] == str(second.path / "heads/eagle3") and one["untrained"] is None
    about = cetane("info", second.path, "--json").json
    assert about["digest"] == second.digest
    assert about["heads"]["eagle3"]["digest"] == one["digest"]
    shown = cetane("add-head", second.path, first.path)
    assert "golden gate of the eagle3 head: pass" in shown.out
    assert "right, untrained" not in shown.out
    assert "stays on the CPU, by the rule tiny-program" in " ".join(shown.out.split())
    assert shown.out.splitlines()[-1].split() == ["next:", "cetane", "bench", str(second.path)]
    nothing = cetane("add-head", first.path, second.path.parent)
    assert nothing.code == 2 and "comes with cetane: smollm2-135m-instruct" in nothing.err


@pytest.fixture
def small_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = {"chat": ["Hi", "Hello"], "edit": ["fuel fuel fuel"]}
    monkeypatch.setattr("cetane.pipeline.bench.suite", lambda: prompts)


def test_bench_of_single_tokens(cetane: Cetane, ported: Bundle) -> None:
    refused = cetane("bench", ported.path, "--max-new", 1)
    assert refused.code == 2
    assert "an answer of one token has no speed" in refused.error


@pytest.mark.usefixtures("small_suite")
def test_bench(cetane: Cetane, ported: Bundle) -> None:
    bench = ("bench", ported.path, "--max-new", 12, "--rounds", 2)
    found = cetane(*bench, "--drafters", "ngram,suffix,auto", "--json").json
    assert found["draft_tokens"] == 2
    assert found["seconds"].keys() == {"1", "2", "3"}  # a call costs by its tokens
    rows = found["speeds"]
    assert [(row["category"], row["drafter"]) for row in rows] == [
        (category, drafter)
        for category in ("chat", "edit")
        for drafter in ("ngram", "suffix", "auto")
    ]
    for row in rows:
        assert row["same"]
        assert row["prompts"] == (2 if row["category"] == "chat" else 1)
        assert row["ratio"] == pytest.approx(row["speculative"] / row["plain"])
        assert 0 < row["slowest"] <= row["ratio"]
        assert row["by_calls"] > 0
        assert 0 < row["reading"] < row["first_speculative"] and row["first_plain"] > 0
    by = {"clock": "ratio", "calls": "by_calls"}[found["judged_by"]]
    assert found["passed"] == all(round(row[by], 2) >= 0.97 for row in rows)
    shown = cetane(*bench, "--categories", "edit")
    assert shown.code == (1 if "NO" in shown.out else 0)
    assert "chat" not in shown.out
    assert "auto" in shown.out and "drafter reads" in shown.out


@pytest.mark.parametrize("idle", [True, False])
@pytest.mark.parametrize("slow", [True, False])
@pytest.mark.parametrize("same", [True, False])
def test_a_bench_fails_for_one_slow_category_or_token(idle: bool, slow: bool, same: bool) -> None:
    """An idle machine is judged by the clock, a busy one by its calls."""
    good = Speed(
        category="chat", drafter="auto", prompts=1, tokens=9, plain=1, speculative=1, ratio=0.97,
        slowest=0.5, by_calls=0.97, acceptance=None, tokens_per_call=None, verifier_calls=0,
        fallbacks=8, same=True, first_plain=1, first_speculative=1, reading=0,
    )  # fmt: skip
    bad = {"ratio": 0.96} if idle else {"by_calls": 0.96}
    other = {"ratio": 0.5} if not idle else {"by_calls": 0.5}  # says nothing
    row = good.model_copy(update=other | (bad if slow else {}) | {"same": same})
    result = DraftingBenchmark(Path("x"), 3, {1: 1.0}, [good.model_copy(update=other), row], idle)
    assert result.passed == (same and not slow)


@pytest.mark.parametrize("same", [True, False])
def test_a_category_without_a_speed_fails_only_for_a_token(
    same: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    none = Speed(
        category="edit", drafter="auto", prompts=0, tokens=0, acceptance=None, tokens_per_call=None,
        verifier_calls=0, fallbacks=0, same=same, first_plain=1, first_speculative=1, reading=0,
    )  # fmt: skip
    some = none.model_copy(update={"category": "chat", "same": True, "plain": 1.0, "ratio": 1.0})
    some = some.model_copy(update={"speculative": 1.0, "slowest": 1.0, "by_calls": 1.0})
    result = DraftingBenchmark(Path("x"), 3, {1: 1.0}, [some, none], True)
    assert result.passed == same
    show(result)
    assert "no speed, since every answer ends with its first token: edit" in capsys.readouterr().out


@pytest.mark.usefixtures("small_suite")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--categories", "chat,poems"), "no category 'poems'; known: chat, edit"),
        (("--drafters", "ngram,oracle"), "no drafter 'oracle'"),
        (("--energy", 3), "--energy needs OTHER"),
        (("--prompt-tokens", 9), "--prompt-tokens needs OTHER"),
        (("other", "--categories", "chat"), "--categories is for drafts"),
        (("other", "--drafters", "ngram"), "--drafters is for drafts"),
    ],
    ids=str,
)
def test_bad_benches(cetane: Cetane, ported: Bundle, options, message: str) -> None:
    assert message in cetane("bench", ported.path, *options).error


@pytest.mark.parametrize(
    ("module", "command"),
    [
        ("bench", ("bench", "--drafters", "oracle")),
        ("language_model", ("run", "Hi", "--speculative", "eagle3")),
    ],
    ids=["bench", "run"],
)
def test_a_drafter_is_looked_for_before_the_bundle_opens(
    cetane: Cetane, ported: Bundle, module: str, command: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    name = f"cetane.pipeline.{module}.open_engine"
    monkeypatch.setattr(name, lambda *_: pytest.fail("it opened"))
    found = cetane(command[0], ported.path, *command[1:])
    assert "no drafter 'oracle'" in found.error or "no eagle3 draft head" in found.error


def test_a_prompt_that_is_longer_than_the_context(
    cetane: Cetane, ported: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused before the first category runs. Those that fit are named."""
    prompts = {"chat": ["Hi"], "edit": ["Hi", "fuel " * 1000]}
    monkeypatch.setattr("cetane.pipeline.bench.suite", lambda: prompts)
    monkeypatch.setattr("cetane.pipeline.bench.call_times", lambda *_: pytest.fail("it ran"))
    refused = cetane("bench", ported.path)
    assert "edit: a prompt of" in refused.error
    assert "port with a larger --context, or ask for --categories chat\n" in refused.err
    alone = cetane("bench", ported.path, "--categories", "edit")
    assert alone.err.endswith("port with a larger --context\n")


def test_the_suite_has_enough_of_everything() -> None:
    prompts = suite()
    assert prompts.keys() == {"chat", "code", "qa", "summarise", "edit", "structured"}
    for category, texts in prompts.items():
        assert len(texts) >= 8, category
        assert len(set(texts)) == len(texts)
