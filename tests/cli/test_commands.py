"""What the commands do, as a user sees it."""

import fnmatch
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from cetane.bundle import Bundle
from cetane.checkpoint import open_checkpoint
from cetane.cli.app import COMMANDS
from cetane.cli.demo import DEMOS, Demo
from cetane.cli.output import print_json
from cetane.cli.port import show_mend
from cetane.evaluation.figures import Evaluation, TaskFigure
from cetane.gates.explain import Explanation
from cetane.gates.limits import Limits, read
from cetane.gates.weights import READING, WrongWeight
from cetane.hardware.chips import ChipFigure, find_chip
from cetane.lab.models import zaya_tiny
from cetane.planner import Encoder

from .conftest import Cetane

QUESTION = "What ignites?"


@pytest.fixture(scope="module")
def continues(tiny_checkpoint_folder: Path) -> Callable[[list[int], int], list[int]]:
    """transformers' greedy continuation, with weights as fp16 holds them."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tiny_checkpoint_folder, dtype=torch.float32
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.half())

    def run(prompt: list[int], length: int) -> list[int]:
        tokens = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            do_sample=False,
            max_new_tokens=length,
            eos_token_id=0,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        return tokens[: tokens.index(0)] if 0 in tokens else tokens

    return run


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint_folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(tiny_checkpoint_folder)


def chat_ids(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return tokenizer.encode(text, add_special_tokens=False)


def test_inspect(cetane: Cetane, tiny_checkpoint_folder: Path) -> None:
    weights = load_file(tiny_checkpoint_folder / "model.safetensors")
    found = cetane("inspect", tiny_checkpoint_folder, "--json").json
    assert found["tensors"] == {name: list(tensor.shape) for name, tensor in weights.items()}
    assert found["parameters"] == sum(tensor.numel() for tensor in weights.values())
    assert found["dtypes"] == {"F32": len(weights)}
    assert found["model_type"] == "llama"
    assert (found["supported"], found["refusal"]) == (True, None)
    assert found["tokenizer_vocabulary"] == 288
    shown = cetane("inspect", tiny_checkpoint_folder)
    assert shown.code == 0
    assert "lm_head.weight" in shown.out and "quantised" not in shown.out


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hidden_act": "mish"}, "config.json of a llama model is not valid: hidden_act = 'mish'"),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0,
                                 "partial_rotary_factor": 0.5}},
            "config.json of a llama model: rope type 'linear' with partial_rotary_factor = 0.5",
        ),
    ],
)  # fmt: skip
def test_inspect_tells_what_plan_refuses(
    cetane: Cetane,
    change: dict[str, Any],
    reason: str,
    tiny_checkpoint_folder: Path,
    tmp_path: Path,
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_checkpoint_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    found = cetane("inspect", folder, "--json").json
    assert (found["supported"], found["nearest"]) == (False, None)
    assert found["refusal"].startswith(reason)
    assert found["refusal"] in cetane("plan", folder).err
    shown = cetane("inspect", folder)
    assert shown.code == 0
    assert f"no: {reason}" in " ".join(shown.out.split())


def test_inspect_a_file(cetane: Cetane, tiny_checkpoint_folder: Path) -> None:
    file = tiny_checkpoint_folder / "model.safetensors"
    assert cetane("inspect", file, "--json").json["source"] == str(file)


def test_plan(cetane: Cetane, tiny_checkpoint_folder: Path, recipe_file: Path) -> None:
    found = cetane("plan", tiny_checkpoint_folder, "-r", recipe_file, "--json").json
    (shard,) = found["shards"]
    assert {f["name"]: f["tokens"] for f in shard["functions"]} == {
        "decode": 1, "verify": 3, "prefill": 8,
    }  # fmt: skip
    assert found["recipe"]["name"] == "tiny"
    asked = ("-r", recipe_file, "--set", "quality = 'usable'", "--set", "tokens.verify=2")
    shown = cetane("plan", tiny_checkpoint_folder, *asked)
    assert shown.code == 0
    assert "logits_0" in shown.out
    port = ["cetane", "port", *map(str, (tiny_checkpoint_folder, *asked))]
    assert shlex.split(shown.out.splitlines()[-1].removeprefix("next: ")) == port


@pytest.mark.parametrize(("limit", "warned"), [(3, False), (2, True)])
def test_plan_counts_programs(
    cetane: Cetane,
    tiny_checkpoint_folder: Path,
    small_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    limit: int,
    warned: bool,
) -> None:
    """Every function is one, and a process holds only so many."""
    known = find_chip("m4-max")
    few = ChipFigure(value=limit, source="a test", date="2026")
    lacking = known.model_copy(update={"programs": (few,)})
    monkeypatch.setattr("cetane.cli.plan_tables.find_chip", {"m4-max": lacking}.__getitem__)
    plan = ("plan", tiny_checkpoint_folder, "-r", small_file)
    shown = cetane(*plan)
    assert shown.code == 0
    assert "3 packages, 3 functions;" in shown.out
    assert (
        f"warning: reports say that a process holds about {limit} loaded" in shown.err
    ) is warned
    assert cetane(*plan, "--json").err == ""


def test_port(
    cetane: Cetane,
    tiny_checkpoint_folder: Path,
    small_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lowered: list[str],
) -> None:
    """Plan, build and gates; a second time, what is there is used; a red gate is exit code 1."""
    monkeypatch.chdir(tmp_path)
    port = ("port", tiny_checkpoint_folder, "-r", small_file)
    first = cetane(*port, "--json")
    target = tmp_path / f"{tiny_checkpoint_folder.name}-small"
    assert first.code == 0
    assert Path(first.json["bundle"]).resolve() == target
    bundle = Bundle(target)
    bundle.verify()
    assert first.json["digest"] == bundle.digest
    gates = first.json["gates"]
    assert gates.keys() == {"ladder", "residency", "golden"}
    assert gates["residency"]["basis"] == "predicted"
    assert gates["residency"]["findings"]["tiny-program"] == "risk"
    assert gates["ladder"]["passed"] is True
    assert [check["name"] for check in gates["ladder"]["checks"]] == [
        "wrong constants", "hidden of layer-00 (decode)", "logits of head-0 (decode)",
    ]  # fmt: skip
    assert gates["golden"]["passed"] is True
    assert len(gates["golden"]["ranges"]) == 2
    assert bundle.gates()["golden"]["passed"] is True
    assert lowered == ["layer-00", "head-0", "layer-01"]

    again = cetane(*port)
    assert again.code == 0
    assert "golden gate: pass" in again.out
    assert "largest residuals" not in again.out
    assert "largest residuals" in cetane(*port, "-v").out
    assert "tokens/s on M4 Max" in again.out
    assert f"next: cetane run {target.name} --chat" in again.out
    assert f"\nkept {target.name}: " in again.out and "wrote" not in again.out
    assert Bundle(target).digest == bundle.digest
    assert len(lowered) == 3

    monkeypatch.setattr("cetane.gates.limits.read", lambda: IMPOSSIBLE)
    red = cetane(*port, "--json")
    assert red.code == 1
    assert red.json["gates"]["golden"]["passed"] is False
    shown = cetane(*port)
    assert "golden gate: FAIL" in shown.out
    assert shown.out.splitlines()[-1].startswith(f"next: cetane diff {target.name} --model ")
    monkeypatch.setattr("cetane.gates.limits.read", lambda: COSTLY)
    costly = cetane(*port)
    assert costly.code == 1 and "compression: " in costly.err
    assert "next: " not in costly.out  # no op is wrong
    assert "--fix" not in costly.out  # a smaller promise mends nothing
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    other = WrongWeight(shard=READING, label="stop tokens", parameter="", problem="[0] for [1]")
    monkeypatch.setattr("cetane.gates.files_read.other_tokens", lambda *_: ([other], []))
    misread = cetane(*port)
    assert misread.code == 1 and "weights: cetane reads the stop tokens" in misread.err
    assert "next: " not in misread.out


@pytest.mark.parametrize("fix", [False, True])
def test_a_change_that_mends_names_the_option(
    fix: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """But not to a user who gave it."""
    why = Explanation(
        cause="compression",
        where="logits",
        sentence="It costs too much.",
        changes={"compression.default": "fp16"},
    )
    show_mend(why, fix)
    shown = capsys.readouterr()
    assert 'default = "fp16"' in shown.err
    assert ("--fix makes this change" in shown.out) is not fix


def test_a_named_chip_that_decides_nothing(
    cetane: Cetane, tiny_checkpoint_folder: Path, small_file: Path, tmp_path: Path
) -> None:
    """The command for details runs as it is printed, and is about the chip that was judged."""
    port = (
        "port", tiny_checkpoint_folder, "-r", small_file, "-o", tmp_path / "my port",
        "--chip", "a19-pro",
    )  # fmt: skip
    shown = cetane(*port, "--no-require-residency")
    assert shown.code == 0
    assert "residency decides nothing: --no-require-residency" in shown.out
    assert "no chip is named" not in shown.out
    details = shown.err.partition("for details: cetane ")[2].splitlines()[0]
    audited = cetane(*shlex.split(details), "--json")
    assert audited.json["target"]["chip"] == "a19-pro"
    required = cetane(*port)
    assert required.code == 1 and "golden gate: pass" in required.out
    assert " ".join(required.err.split()).count("weights are read off the ANE") == 1
    assert required.out.splitlines()[-1] == f"next: cetane {details}"


def test_port_of_a_wrong_shard(
    cetane: Cetane,
    tiny_checkpoint_folder: Path,
    small_file: Path,
    tmp_path: Path,
    lowered: list[str],
) -> None:
    """The first of its kind stops the build, until it is made anew."""

    class Wrong(Encoder):
        """Makes other constants than the gate's own encoder."""

        def __call__(self, weight: Any, halves: Any = None) -> Any:
            encoded: Any = super().__call__(weight, halves)
            if weight.name == "model.layers.0.mlp.down_proj.weight":
                encoded.weight[3] += 1
            return encoded

    target, partial = tmp_path / "out", tmp_path / "out.partial/bundle"
    port = ("port", tiny_checkpoint_folder, "-r", small_file, "-o", target)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cetane.lower.lower.Encoder", Wrong)
        red = cetane(*port, "--json")
    assert red.code == 1
    assert red.json["bundle"] is None
    assert red.json["gates"].keys() == {"ladder", "residency"}
    checks = red.json["gates"]["ladder"]["checks"]
    assert [c["name"] for c in checks if not c["passed"]] == ["wrong constants"]
    assert lowered == ["layer-00", "head-0"]
    assert not target.exists()
    assert sorted(p.stem for p in partial.glob("shards/*")) == ["head-0", "layer-00"]

    shown = cetane(*port)  # what was made is kept, and judged again
    assert shown.code == 1
    assert "first shard of every kind" in shown.out
    assert "FAIL" in shown.out
    assert "Traceback" not in shown.err
    assert len(lowered) == 2

    green = cetane(*port, "--rebuild", "--json")
    assert green.code == 0
    assert {name: gate["passed"] for name, gate in green.json["gates"].items()} == {
        "ladder": True, "residency": False, "golden": True,  # so small a model leaves the ANE
    }  # fmt: skip
    assert lowered[2:] == ["layer-00", "head-0", "layer-01"]
    Bundle(target).verify()


def test_port_goes_on_after_the_ladder(
    cetane: Cetane,
    tiny_checkpoint_folder: Path,
    small_file: Path,
    tmp_path: Path,
    lowered: list[str],
) -> None:
    """When what was wrong was not the shards, they are not made again."""
    port = ("port", tiny_checkpoint_folder, "-r", small_file, "-o", tmp_path / "out", "--json")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cetane.gates.limits.read", lambda: STRICT)
        assert cetane(*port).code == 1
    assert cetane(*port).code == 0
    assert lowered == ["layer-00", "head-0", "layer-01"]


def test_build_only(
    cetane: Cetane,
    tiny_checkpoint_folder: Path,
    small_file: Path,
    tmp_path: Path,
    lowered: list[str],
) -> None:
    """Some shards, with the sizes of their files; what is there is kept unless told otherwise."""
    target = tmp_path / "out"
    build = ("build", tiny_checkpoint_folder, "-r", small_file, "-o", target)
    found = cetane(*build, "--only", "layer-*", "--json").json["shards"]
    assert sorted(found) == sorted(lowered) == ["layer-00", "layer-01"]
    for name, made in found.items():
        package = tmp_path / f"out.partial/bundle/shards/{name}.mlpackage"
        assert Path(made["path"]) == package
        files = [path for path in package.rglob("*") if path.is_file()]
        assert made["bytes"] == sum(len(path.read_bytes()) for path in files)
    assert not target.exists()

    shown = cetane(*build, "--only", "layer-00", "--only", "head-0", "--skip-existing")
    assert shown.code == 0
    assert "layer-00" in shown.out
    assert "MB" in shown.out
    assert "layer-01" not in shown.out
    assert lowered[2:] == ["head-0"]
    assert cetane(*build, "--only", "head-0", "--rebuild").code == 0
    assert lowered[3:] == ["head-0"]

    whole = cetane(*build, "--json").json
    assert Bundle(target).digest == whole["digest"]
    assert len(lowered) == 4
    assert not (tmp_path / "out.partial").exists()


def test_the_example_of_build_names_shards(cetane: Cetane) -> None:
    """Of the recipe that it takes, on the model that comes with cetane."""
    example = shlex.split(COMMANDS["build"].example)
    pattern = example[example.index("--only") + 1]
    names = [one["name"] for one in cetane("plan", zaya_tiny(), "--json").json["shards"]]
    assert 1 < len(fnmatch.filter(names, pattern)) < len(names)


def test_demo(
    cetane: Cetane,
    tiny_checkpoint_folder: Path,
    small_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From a checkpoint that needs no hub to text; a red gate ends it."""
    monkeypatch.setitem(DEMOS, "zaya-tiny", Demo(str(small_file), "Fuel", 8))
    monkeypatch.setattr("cetane.lab.models.zaya_tiny", lambda: tiny_checkpoint_folder)
    monkeypatch.chdir(tmp_path)
    found = cetane("demo", "--model", "zaya-tiny")
    assert found.code == 0
    assert "golden gate: pass" in found.out
    assert "Fuel\n" in found.out
    Bundle(tmp_path / "zaya-tiny-small").verify()
    assert len(found.out.splitlines()) < 25

    other = Demo(str(small_file), "Fuel", 8, "smollm2-135m-instruct")
    monkeypatch.setitem(DEMOS, "zaya-tiny", other)
    without = cetane("demo", "--model", "zaya-tiny")
    assert without.code == 0 and "Fuel\n" in without.out
    assert "no draft head: the bundle has no call wider than one token" in without.err

    monkeypatch.setattr("cetane.gates.limits.read", lambda: IMPOSSIBLE)
    red = cetane("demo", "--model", "zaya-tiny")
    assert red.code == 1
    assert "Fuel\n" not in red.out


def with_limits(table: str, **changes: Any) -> Limits:
    content = read().model_dump()
    content[table] |= changes
    return Limits.model_validate(content)


IMPOSSIBLE = with_limits("fp16", hidden_cosine=2.0)
"""No bundle passes; the first shards do."""
COSTLY = with_limits(
    "quality", good=read().quality["good"].model_dump() | {"perplexity_ratio": 0.5}
)
"""Every compression costs too much."""
STRICT = with_limits("structure", relative=1e-30)


def test_build(
    cetane: Cetane, tiny_checkpoint_folder: Path, ported: Bundle, tmp_path: Path
) -> None:
    """Of a finished bundle: nothing is made, and it is reported."""
    recipe = ported.plan.recipe
    file = tmp_path / "tiny.toml"
    file.write_text(
        f"""
        tensor_layout = "{recipe.tensor_layout}"
        layout = {{ kind = "single" }}
        cache = {{ contract = "stateful", context = {recipe.cache.context} }}
        tokens = {{ verify = 3, prefill = 8 }}
        head = {{ slices = 2 }}
        """
    )
    build = ("build", tiny_checkpoint_folder, "-r", file, "-o", ported.path)
    assert cetane(*build, "--json").json == {"bundle": str(ported.path), "digest": ported.digest}
    size = sum(record.bytes for record in ported.manifest.files.values()) / 1e6
    shown = f"kept {ported.path}: {size:.3f} MB\nnext: cetane validate {ported.path}\n"
    assert cetane(*build).out == shown
    again = shutil.copytree(ported.path, tmp_path / "again")
    remade = cetane(*build[:-1], again, "--rebuild").out
    assert remade.startswith(f"wrote {again}: {size:.3f} MB\n")


def test_validate(cetane: Cetane, gated: Bundle, tmp_path: Path) -> None:
    green = cetane("validate", gated.path, "--json")
    assert green.code == 0
    assert green.json["golden"]["passed"] is True
    assert green.json["warnings"] == []
    assert green.json["golden"]["source"] == gated.manifest.source
    assert gated.gates().keys() == {"golden", "static"}

    source = Path(gated.manifest.source)
    other = shutil.copytree(source, tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    weights["model.layers.0.self_attn.o_proj.weight"] *= -1
    save_file(weights, other / "model.safetensors")
    red = cetane("validate", gated.path, "--model", other, "--json")
    assert red.code == 1
    assert red.json["golden"]["passed"] is False
    compared = {name: red.json["golden"][name] for name in ("source", "fingerprint")}
    assert compared == {"source": str(other), "fingerprint": open_checkpoint(other).fingerprint}
    assert red.json["warnings"] == [f"{other} is not the file that {gated.path} was made from"]
    kept = gated.gates()["golden"]
    assert (kept["passed"], kept["warnings"]) == (False, red.json["warnings"])
    gated.write_gate("golden", kept | {"limits": "of last year"})
    assert "by other limits" in " ".join(cetane("info", gated.path).out.split())


def test_validate_shards_alone(cetane: Cetane, gated: Bundle) -> None:
    """Its last line is the published validator's."""
    result = cetane("validate", gated.path, "--full", "--prompt-ids", "20,30,40")
    assert result.code == 0
    model = gated.manifest
    assert f"compared with {model.source}, fingerprint {model.fingerprint[:16]}\n" in result.out
    assert re.fullmatch(r"PASS (\d)/\1, mean [01]\.\d{6}, min [01]\.\d{6}",
                        result.out.splitlines()[-1])  # fmt: skip
    one = cetane("validate", gated.path, "--layer", 0, "--n-probes", 2, "--json").json
    assert one["passed"]
    assert len(one["shards"]) == 1
    assert len(one["probes"]) == 2


def test_validate_perplexity(cetane: Cetane, gated: Bundle, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The cetane number of a fuel. " * 5)
    found = cetane("validate", gated.path, "--perplexity", text, "--tokens", 40, "--json")
    assert found.code == 0
    assert found.json["perplexity"]["tokens"] == 39
    assert found.json["perplexity"]["source"] == gated.manifest.source
    assert found.json["perplexity"]["ratio"] == pytest.approx(1, abs=1e-3)
    assert gated.gates()["perplexity"]["text"] == "text.txt"


@pytest.mark.parametrize(
    "command",
    [("validate", "--layer", 0), ("validate", "--perplexity", "text.txt"), ("diff",)],
    ids=["layer", "perplexity", "diff"],
)
def test_another_checkpoint_of_the_same_shape_is_told(
    command: tuple[Any, ...],
    cetane: Cetane,
    gated: Bundle,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its figures look like those of a bad port."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("The cetane number of a fuel. " * 5)
    shutil.copytree(gated.manifest.source, "other")
    Path("other/model.safetensors").touch()
    name, *options = command
    told = f"other is not the file that {gated.path} was made from"
    found = cetane(name, gated.path, *options, "--model", "other", "--json").json
    assert found.get("perplexity", found)["warnings"] == [told]
    shown = cetane(name, gated.path, *options, "--model", "other")
    assert f"warning: {told}" in " ".join(shown.err.split())


def test_info(cetane: Cetane, gated: Bundle) -> None:
    before = cetane("info", gated.path, "--json").json
    assert before["digest"] == gated.digest
    assert before["manifest"] == json.loads((gated.path / "manifest.json").read_text())
    assert before["gates"] == {}
    assert gated.digest[:16] in cetane("info", gated.path).out
    gated.write_gate("golden", {"passed": False})
    gated.write_gate("perplexity", {"perplexity": 7.25})
    gates = cetane("info", gated.path, "--json").json["gates"]
    assert gates.keys() == {"golden", "perplexity"}
    assert gates["golden"] == {"bundle": gated.digest, "passed": False}
    shown = cetane("info", gated.path)
    assert shown.code == 0
    assert "FAIL" in shown.out
    assert "7.25" in shown.out


def test_info_tells_what_an_evaluation_found(cetane: Cetane, gated: Bundle) -> None:
    figures = (TaskFigure(task="cloze", metric="acc", samples=7, value=2 / 7, error=0.2),
               TaskFigure(task="cloze", metric="perplexity", samples=7, value=31.25))  # fmt: skip
    plain = Evaluation(figures=figures, limit=None, fewshot=None, chat=False)
    asked = Evaluation(figures=figures[:1], limit=7, fewshot=2, chat=True)
    gated.write_gate("evaluation", plain.model_dump(mode="json"))
    gated.write_gate("evaluation-sql", asked.model_dump(mode="json"))
    shown = " ".join(cetane("info", gated.path).out.split())
    assert shown.endswith(" evaluation cloze acc 0.2857, cloze perplexity 31.25")
    asked_so = "limit 7, after 2 examples, by the chat template"
    assert f" evaluation-sql cloze acc 0.2857, {asked_so}" in shown
    assert "gate evaluation" not in shown
    gated.write_gate("evaluation", {"figures": 3})
    assert cetane("info", gated.path).error.startswith("evaluation: ")


def test_run_prompt_ids(cetane: Cetane, ported: Bundle, tokenizer: Any, continues: Any) -> None:
    prompt = [7, 250, 31, 99, 4, 180, 66, 12, 5]
    expected = continues(prompt, 10)
    text = tokenizer.decode(expected)
    run = ("run", ported.path, "--prompt-ids", ",".join(map(str, prompt)), "--max-new", 10)
    found = cetane(*run, "--json").json
    assert found["tokens"] == expected
    assert found["text"] == text
    assert found["prompt_tokens"] == len(prompt)
    assert found["seconds_to_first_token"] > 0
    assert found["finish_reason"] == "length"
    assert cetane(*run).out == text + "\n"


def test_run_a_question(cetane: Cetane, ported: Bundle, tokenizer: Any, continues: Any) -> None:
    """By the model's own chat template."""
    expected = continues(chat_ids(tokenizer, [{"role": "user", "content": QUESTION}]), 10)
    found = cetane("run", ported.path, QUESTION, "--max-new", 10, "--json").json
    assert found["tokens"] == expected


def test_run_profile(cetane: Cetane, ported: Bundle) -> None:
    run = ("run", ported.path, QUESTION, "--max-new", 3, "--profile")
    profile = cetane(*run, "--json").json["profile"]
    assert profile["seconds"].keys() == {"load", "model", "host"}
    assert all(seconds > 0 for seconds in profile["seconds"].values())
    assert profile["layers_ms"] > 0 and profile["head_ms"] is None  # a single shard has both
    assert profile["layer_ms"] == profile["layers_ms"] / 2
    shown = cetane(*run).out
    for line in ("decode throughput", "total forward throughput", "average per layer", "warm"):
        assert line in shown


def test_run_seeded(cetane: Cetane, ported: Bundle) -> None:
    run = ("run", ported.path, QUESTION, "--max-new", 20, "--temperature", 2, "--json")
    first, again, other = (cetane(*run, "--seed", seed).json["tokens"] for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize("end", ["\n", ""], ids=["an empty line", "the end of input"])
def test_run_chat(end: str, cetane: Cetane, ported: Bundle, tokenizer: Any, continues: Any) -> None:
    """Every answer is what the model says to the conversation so far."""
    messages: list[dict[str, str]] = []
    answers = []
    for question in ("Hi", "Fuel?"):
        messages.append({"role": "user", "content": question})
        answers.append(tokenizer.decode(continues(chat_ids(tokenizer, messages), 5)))
        messages.append({"role": "assistant", "content": answers[-1]})
    found = cetane("run", ported.path, "--chat", "--max-new", 5, stdin=f"Hi\nFuel?\n{end}")
    assert found.code == 0
    assert found.out.rstrip() == "".join(f"> {answer}\n" for answer in answers) + ">"


def test_run_chat_in_a_full_context(
    cetane: Cetane, ported: Bundle, tokenizer: Any, continues: Any
) -> None:
    """The conversation starts anew; a question that never fits is left out."""
    long, too_long = "x" * 40, "x" * 80
    first, alone = ([{"role": "user", "content": text}] for text in ("Hi", long))
    answers = [tokenizer.decode(continues(chat_ids(tokenizer, m), 5)) for m in (first, alone)]
    whole = [*first, {"role": "assistant", "content": answers[0]}, *alone]
    assert len(chat_ids(tokenizer, whole)) > 64
    found = cetane("run", ported.path, "--chat", "--max-new", 5, stdin=f"Hi\n{too_long}\n{long}\n")
    assert found.code == 0
    whole_characters = [answer.rstrip("\N{REPLACEMENT CHARACTER}") for answer in answers]
    assert found.out.rstrip() == "> {}\n> > {}\n>".format(*whole_characters)
    said = [line for line in found.err.splitlines() if line.startswith("the ")]
    assert "the context holds 64" in said[0]
    assert said[1] == "the context is full: the conversation starts anew"


def test_run_leaves_out_an_unfinished_character(
    cetane: Cetane, ported: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes of half a character are among the tokens, and not in the text."""
    tokens = ported.tokenizer.encode("ok 😀")[:-1]

    def generate(*_: object) -> Generator[int, None, str]:
        yield from tokens
        return "length"

    monkeypatch.setattr("cetane.pipeline.answer_session.generate", generate)
    found = cetane("run", ported.path, QUESTION, "--json").json
    assert found["tokens"] == tokens
    assert ported.tokenizer.decode(tokens).endswith("\ufffd")
    assert found["text"] == "ok "
    assert found["finish_reason"] == "length"


def test_the_command_itself(tiny_checkpoint_folder: Path, tmp_path: Path) -> None:
    """As installed: exit codes, and nothing but the answer on standard output."""
    command = [sys.executable, "-c", "from cetane.cli import main; main()"]
    good = subprocess.run(
        [*command, "inspect", str(tiny_checkpoint_folder), "--json"], capture_output=True, text=True
    )
    assert good.returncode == 0
    assert json.loads(good.stdout)["supported"] is True
    bad = subprocess.run(
        [*command, "inspect", str(tmp_path / "nothing")], capture_output=True, text=True
    )
    assert bad.returncode == 2
    assert bad.stdout == ""
    said = bad.stderr.splitlines()
    if said[0].startswith("inspect"):
        del said[0]  # a machine that needs more than two seconds says what it does
    assert len(said) == 2
    assert said[0].startswith("error: no such file or folder")


def test_json_has_no_nan(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"kl": [float("nan"), float("inf"), 1.5]})
    assert capsys.readouterr().out == '{"kl": [null, null, 1.5]}\n'
