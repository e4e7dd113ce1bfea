"""The folder for ANEMLL: played by its hosts' own rules, it gives transformers' tokens."""

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from tests.conftest import InMemoryCheckpoint, build_model, build_tokenizer, tiny_recipe
from tests.families.alibi_models import build_alibi
from tests.families.gemma_models import build_gemma3, build_gemma4
from tests.families.zaya_models import build_zaya
from transformers import AutoTokenizer

import cetane.bridge
from cetane.checkpoint import open_checkpoint
from cetane.errors import CetaneError
from cetane.export.anemll import check, export, packages
from cetane.export.anemll.check import PackageCheck, check_window
from cetane.export.anemll.contract import STATE, FolderSizes, parts_for
from cetane.export.anemll.folder import write_tokenizer
from cetane.export.anemll.host import ChatHost, Folder
from cetane.export.anemll.planner import AnemllPlanner
from cetane.mil.package import Package
from cetane.mil.program import Body, MilFunction, Program, TensorType
from cetane.pipeline.export import export_runtime

CONTEXT, BATCH, WINDOW = 64, 8, 32
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: build_model("llama"),
    "qwen2": lambda: build_model("qwen2", vocab_size=289, tie_word_embeddings=True),
    "gemma3": lambda: build_gemma3(),
}
RECIPES: dict[str, dict[str, Any]] = {
    "llama": {"layout": {"kind": "chunks", "chunks": 2}},
    "qwen2": {
        "layout": {"kind": "single"},
        "tensor_layout": "ct1",
        "head": {"choose": True},
        "prefill": 16,
    },
    "gemma3": {"layout": {"kind": "chunks", "chunks": 2}},
}
"""Vocabularies that their parts divide, and that is padded; logits, and choices."""


class Exported:
    """A model, and its folder."""

    def __init__(self, family: str, root: Path) -> None:
        self.model = MODELS[family]()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(parameter.half().float())
        self.model.save_pretrained(root / "checkpoint")
        build_tokenizer().save_pretrained(root / "checkpoint")
        self.folder = root / "folder"
        recipe = tiny_recipe(context=CONTEXT, **RECIPES[family])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("cetane.export.anemll.contract.MOST_ROWS", 128)
            export(recipe, open_checkpoint(root / "checkpoint"), self.folder, lambda *_: None)

    @torch.inference_mode()
    def gap(self, seen: list[int], token: int) -> float:
        """How far the logit of a token is below transformers' largest."""
        logits = self.model(torch.tensor([seen]), use_cache=False).logits[0, -1]
        return float(logits.max() - logits[token])


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Exported]:
    made: dict[str, Exported] = {}

    def folder(family: str) -> Exported:
        if family not in made:
            made[family] = Exported(family, tmp_path_factory.mktemp(family))
        return made[family]

    return folder


@pytest.fixture
def load() -> Iterator[Callable[[Path, str | None], Any]]:
    """Opens a function of a package through coremltools, on the bridge."""
    cetane.bridge.install()
    import coremltools as ct

    yield lambda path, function: ct.models.MLModel(str(path), function_name=function)
    cetane.bridge.uninstall()


@pytest.mark.parametrize("family", MODELS)
def test_the_played_host_gives_transformers_tokens(exported, load, family: str) -> None:
    """A prompt past the window and no multiple of a batch; then past the end of the context."""
    made = exported(family)
    assert check(made.folder) == []
    host = ChatHost(Folder(made.folder, load))
    prompt = [int(t) for t in np.random.default_rng(0).integers(1, 288, 37)]
    steps = host.generate(prompt, 40)
    assert host.shifts[:1] == [(CONTEXT // host.folder.batch - 2) * host.folder.batch]
    assert host.folder.window == (WINDOW if family == "gemma3" else None)
    assert max(made.gap(seen, token) for seen, token in steps) < 2e-3


def test_single_steps_equal_a_batch(exported, load) -> None:
    """`chat.py` without batches feeds every token alone: the same state, so the same tokens."""
    made = exported("gemma3")
    whole, single = (ChatHost(Folder(made.folder, load)) for _ in range(2))
    single.folder.batches = False
    prompt = list(range(40, 85))
    assert whole.generate(prompt, 8) == single.generate(prompt, 8)


@pytest.mark.parametrize(
    "embedding", [{"format": "int8"}, {"format": "fp16", "inside": True}], ids=["host", "inside"]
)
def test_rows_of_the_embedding_stay_fp16(load, tmp_path: Path, embedding: dict[str, Any]) -> None:
    """Whatever the weights' formats: those would round rows that no gate judged."""
    model = build_model("llama", tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    compression = {"default": "palette4-kmeans-group32"}
    if embedding.get("inside"):
        compression["types"] = {"embedding": "int8-per-channel"}
    recipe = tiny_recipe(context=CONTEXT, embedding=embedding, compression=compression)
    package = tmp_path / "embeddings.mlpackage"
    packages(recipe, open_checkpoint(tmp_path))["llama_embeddings"](package)
    ids = np.arange(BATCH, dtype=np.int32)[None]
    rows = load(package, None).predict({"input_ids": ids})["hidden_states"]
    table = model.model.embed_tokens.weight.detach().numpy()
    assert np.array_equal(rows[0], table[:BATCH].astype(np.float16))


def test_a_window_in_an_older_config(tmp_path: Path) -> None:
    """Gemma's older configs say every how many layers one sees all, and no `layer_types`."""
    build_gemma3().save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    with config(tmp_path) as content:
        kinds = content.pop("layer_types")
        content["sliding_window_pattern"] = 1 + kinds.index("full_attention")
    checkpoint = open_checkpoint(tmp_path)
    sizes = AnemllPlanner(checkpoint, tiny_recipe(context=CONTEXT)).sizes
    (tmp_path / "folder").mkdir()
    write_tokenizer(checkpoint.tokenizer, checkpoint.config, tmp_path / "folder")
    written = json.loads((tmp_path / "folder/config.json").read_text())
    assert sizes.window == WINDOW and written["layer_types"] == kinds
    assert list(check_window(written, sizes)) == []


def test_a_window_as_long_as_the_context(tmp_path: Path) -> None:
    """As of Gemma 3 4B: for the prefix gemma3 the app assumes 512, if no window is named."""
    build_gemma3(sliding_window=1024, max_position_embeddings=1024).save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    recipe = tiny_recipe(context=544, **RECIPES["gemma3"])
    export(recipe, open_checkpoint(tmp_path), tmp_path / "folder", lambda *_: None)
    assert check(tmp_path / "folder") == []
    assert Folder(tmp_path / "folder", lambda *_: None).window == 544, "no position is so late"


@pytest.mark.parametrize("tool_template", [None, "with {{ tools[0].name }}"])
def test_templates_in_the_config_alone(
    tool_template: str | None, tiny_checkpoint_folder: Path, tmp_path: Path
) -> None:
    """The app reads them there, as transformers does of a folder without files of templates."""
    checkpoint = open_checkpoint(tiny_checkpoint_folder)
    own = replace(checkpoint.tokenizer, tool_template=tool_template)
    write_tokenizer(own, checkpoint.config, tmp_path / "folder")
    (tmp_path / "app").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tmp_path / "folder" / name, tmp_path / "app")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "app")
    messages = [{"role": "user", "content": "Hello"}]
    for tools in ([], [{"name": "weather"}]):
        written = theirs.apply_chat_template(messages, tools=tools or None, tokenize=False)
        assert written == own.render_chat(messages, add_generation_prompt=False, tools=tools)


def test_metadata(exported) -> None:
    """What chat.py and swift-transformers read of a package."""
    folder = exported("llama").folder
    described = Package(folder / "llama_FFN_PF_chunk_02of02.mlpackage").spec.description.metadata
    assert described.userDefined["co.huggingface.exporters.name"] == "checkpoint"
    assert described.userDefined["com.anemll.chunk_no"] == "2"
    assert described.userDefined["com.anemll.context_length"] == str(CONTEXT)
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    assert "add_generation_prompt" in tokenizer["chat_template"]
    assert (folder / "compile.sh").read_text().startswith("#!/bin/sh\n")


@contextmanager
def meta(folder: Path) -> Iterator[dict[str, Any]]:
    """The content of meta.yaml, to be changed."""
    content = yaml.safe_load((folder / "meta.yaml").read_text())
    yield content["model_info"]
    (folder / "meta.yaml").write_text(yaml.safe_dump(content))


@contextmanager
def spec(folder: Path, name: str) -> Iterator[Any]:
    """A package's specification, to be changed."""
    package = Package(folder / f"gemma3_{name}.mlpackage")
    yield package.spec
    package.spec_path.write_bytes(package.spec.SerializeToString())


@contextmanager
def config(folder: Path, name: str = "config.json") -> Iterator[dict[str, Any]]:
    content = json.loads((folder / name).read_text())
    yield content
    (folder / name).write_text(json.dumps(content))


def setting(key: str, value: Any) -> Callable[[Path], None]:
    """Another value of a parameter; None removes it."""

    def change(folder: Path) -> None:
        with meta(folder) as info:
            info["parameters"][key] = value
            if value is None:
                del info["parameters"][key]

    return change


def renamed(name: str, kind: str) -> Callable[[Path], None]:
    """The first input, output or state of a package's first function has another name."""

    def change(folder: Path) -> None:
        with spec(folder, name) as content:
            described = next(iter(content.description.functions), content.description)
            port = getattr(described, kind)[0]
            text = content.SerializeToString().replace(
                tagged(port.name), tagged(port.name[:-1] + "x")
            )
            content.ParseFromString(text)

    return change


def tagged(name: str) -> bytes:
    """A name as protobuf stores it."""
    return bytes([len(name)]) + name.encode()


def shape(kind: str, axis: int, size: int) -> Callable[[Path], None]:
    """Another shape in the description of chunk 2."""

    def change(folder: Path) -> None:
        with spec(folder, CHUNK.format(2)) as content:
            for function in content.description.functions:
                array = getattr(function, kind)[0].type
                array = array.stateType.arrayType if kind == "state" else array.multiArrayType
                array.shape[axis] = size

    return change


def unbounded(folder: Path) -> None:
    """No op makes the mask finite."""
    with spec(folder, CHUNK.format(2)) as content:
        for function in content.mlProgram.functions.values():
            for op in function.block_specializations[function.opset].operations:
                if op.type == "clip":
                    op.type = "relu"
                    del op.inputs["alpha"]
                    del op.inputs["beta"]


def one_shape(folder: Path) -> None:
    with spec(folder, "embeddings") as content:
        content.description.input[0].type.multiArrayType.enumeratedShapes.shapes.pop()


def without(function: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        with spec(folder, CHUNK.format(1)) as content:
            del content.mlProgram.functions[function]
            kept = [f for f in content.description.functions if f.name != function]
            del content.description.functions[:]
            content.description.functions.extend(kept)

    return change


def information(key: str, value: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        with meta(folder) as info:
            info[key] = value

    return change


def of_config(key: str, value: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        with config(folder) as content:
            content[key] = value

    return change


def package(folder: Path, name: str) -> Path:
    return folder / f"gemma3_{name}.mlpackage"


def swapped(folder: Path) -> None:
    one, two = (package(folder, CHUNK.format(number)) for number in (1, 2))
    one.rename(folder / "other")
    two.rename(one)
    (folder / "other").rename(two)


CHUNK = "FFN_PF_chunk_{:02}of02"
DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no meta.yaml": (lambda f: (f / "meta.yaml").unlink(), "meta.yaml"),
    "meta.yaml is a list": (lambda f: (f / "meta.yaml").write_text("- a"), "meta.yaml"),
    "no parameters": (lambda f: (f / "meta.yaml").write_text("model_info: {}"), "parameters"),
    "a context in words": (setting("context_length", "512"), "context_length = '512'"),
    "another context": (setting("context_length", 128), "not fp16 (1, 1, 1, 128)"),
    "another batch": (setting("batch_size", 16), "not ((1, 1), (1, 16))"),
    "a batch that cuts the window": (setting("batch_size", 20), "does not divide the window"),
    "no dynamic slice": (setting("prefill_dynamic_slice", None), "token by token"),
    "a lut": (setting("lut_ffn", 4), "lut_ffn = 4"),
    "more chunks": (setting("num_chunks", 3), "is not chunk 01 of 3"),
    "a path outside": (setting("lm_head", "../x.mlmodelc"), "lm_head = '../x.mlmodelc'"),
    "fewer parts": (setting("split_lm_head", 8), "logits9"),
    "sizes of parts": (setting("lm_head_chunk_sizes", [288]), "lm_head_chunk_sizes"),
    "another vocabulary": (setting("vocab_size", 320), "not fp16 (1, 1, 20)"),
    "choices": (setting("argmax_in_model", True), "no output argmax_idx"),
    "no window": (setting("sliding_window", None), "without a sliding_window"),
    "another window": (setting("sliding_window", 16), "the model's is 32"),
    "an old version": (information("version", "0.1.1"), "version 0.1.1"),
    "one model": (information("model_type", "monolithic"), "'monolithic'"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json"),
    "a tokenizer without tokens": (
        lambda f: (f / "tokenizer.json").write_text("{}"),
        "tokenizer.json is not a valid tokenizer",
    ),
    "a list of settings": (
        lambda f: (f / "tokenizer_config.json").write_text("[]"),
        "tokenizer_config.json holds a JSON list",
    ),
    "no stop token": (of_config("eos_token_id", None), "eos_token_id = None"),
    "another width": (of_config("hidden_size", 96), "not fp16 (1, 1, 96)"),
    "no embeddings": (lambda f: shutil.rmtree(package(f, "embeddings")), "is missing"),
    "no chunk 2": (lambda f: shutil.rmtree(package(f, CHUNK.format(2))), "02of02.mlpackage is"),
    "chunks swapped": (swapped, "holds chunk 2"),
    "a chunk of another export": (
        lambda f: shutil.copytree(package(f, CHUNK.format(2)), f / "gemma3_chunk_03of03.mlpackage"),
        "gemma3_chunk_03of03.mlpackage: chat.py",
    ),
    "a renamed output": (renamed("lm_head", "output"), "no output logits"),
    "a renamed state": (renamed(CHUNK.format(2), "state"), "not model_model_kv_cache_0"),
    "one function less": (without("prefill_rotate"), "no function prefill_rotate"),
    "an unbounded mask": (unbounded, "minus infinity"),
    "one shape of tokens": (one_shape, "input_ids takes"),
    "a broken package": (
        lambda f: Package(package(f, CHUNK.format(1))).spec_path.write_bytes(b"?"),
        "01of02",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_checker_names_a_damage(exported, tmp_path: Path, damage: str) -> None:
    change, words = DAMAGES[damage]
    folder = tmp_path / "folder"
    shutil.copytree(exported("gemma3").folder, folder)
    change(folder)
    assert any(words in problem for problem in check(folder)), check(folder)


BOMB = "\n".join(
    ["model_info:", "  a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    + [f"  a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 7)]
    + ["  parameters:", "    num_chunks: *a6"]
)
"""9^7 items, if aliases are followed."""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: (f / "meta.yaml").write_text(BOMB), "aliases"),
        (setting("split_lm_head", 2**24), "split_lm_head = 16777216"),
        (setting("num_chunks", 100), "num_chunks = 100"),
        (lambda f: (f / "meta.yaml").write_text("- a\n" * 20_000), "larger than the 65,536 bytes"),
        (lambda f: (f / "meta.yaml").write_text(f"a: {'9' * 5000}"), "a number of more than"),
        (setting("lut_ffn", "x" * 10_000), "lut_ffn"),
    ],
    ids=["aliases", "parts", "chunks", "a long list", "a long number", "a long text"],
)
def test_a_hostile_meta_yaml(tmp_path: Path, change: Callable[[Path], None], words: str) -> None:
    """Its problems are few and short."""
    parameters = {"context_length": 64, "batch_size": 8, "num_chunks": 2, "vocab_size": 288}
    content = {"model_info": {"parameters": parameters | {"split_lm_head": 8}}}
    (tmp_path / "meta.yaml").write_text(yaml.safe_dump(content))
    (tmp_path / "config.json").write_text('{"hidden_size": 64}')
    change(tmp_path)
    problems = check(tmp_path)
    assert any(words in problem for problem in problems)
    assert len(problems) < 20 and max(map(len, problems)) <= 300


def test_a_state_without_axes() -> None:
    """No package that cetane writes has one, but a stranger's may."""
    state = {STATE: TensorType((), "fp16")}
    function = MilFunction("infer", {}, {}, state, Body((), (), ()))
    sizes = FolderSizes(
        hidden=64, vocab=288, context=64, batch=8, parts=1, window=None, choose=False
    )
    checked = PackageCheck("chunk", sizes, Program(Path(), {"infer": function}))
    assert "chunk: its state holds 0 tokens, not 64" in list(checked.memory("chunk", function))


def test_compiled_packages_are_there(exported, tmp_path: Path) -> None:
    """What compile.sh leaves on a Mac."""
    folder = tmp_path / "folder"
    shutil.copytree(exported("llama").folder, folder)
    for made in folder.glob("*.mlpackage"):
        made.rename(made.with_suffix(".mlmodelc"))
    assert check(folder) == []
    head = folder / "llama_lm_head.mlpackage"
    shutil.copytree(exported("llama").folder / "llama_embeddings.mlpackage", head)
    assert any("llama_lm_head" in problem for problem in check(folder))  # made anew, wrongly
    shutil.rmtree(head)
    shutil.rmtree(head.with_suffix(".mlmodelc"))
    head.with_suffix(".mlmodelc").mkdir()
    assert check(folder) == ["llama_lm_head.mlpackage is missing"]


def test_the_script_compiles_what_is_not_compiled(
    exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a stand-in for Xcode's compiler. A folder that was pushed compiled has nothing left."""
    folder, tools = tmp_path / "folder", tmp_path / "tools"
    shutil.copytree(exported("llama").folder, folder)
    tools.mkdir()
    (tools / "xcrun").write_text('#!/bin/sh\ntest -d "$3" && mkdir "${3%.mlpackage}.mlmodelc"\n')
    (tools / "xcrun").chmod(0o755)
    monkeypatch.setenv("PATH", str(tools), prepend=":")
    names = {path.stem for path in folder.glob("*.mlpackage")}
    assert names
    for _ in range(2):
        subprocess.run(["sh", "compile.sh"], cwd=folder, check=True)
        assert {path.stem for path in folder.glob("*.mlmodelc")} == names
        assert not list(folder.glob("*.mlpackage"))


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        (lambda: build_gemma4(), {}, "no gemma4_text"),
        (lambda: build_zaya(), {"context": 32}, "no zaya"),
        (lambda: build_alibi("bloom"), {}, "makes masks without distances"),
        (lambda: build_model("mistral", sliding_window=16), {}, "only 16 tokens"),
        (lambda: build_gemma3(), {"prefill": 12}, "does not divide the window"),
        (lambda: build_gemma3(), {"family": {"full_window": 48}}, "layers see 32 and 48"),
        (
            lambda: build_gemma3(sliding_window=64),
            {"family": {"full_window": 32}},
            "own of 64 tokens, but layers see 32",
        ),
        (lambda: build_model("llama"), {"prefill": 32}, "whole batches"),
        (
            lambda: build_model("llama"),
            {"cache": {"context": 64, "capacities": [32]}},
            "has caches of one length, but recipe tiny has the capacities 32 and 64",
        ),
        (
            lambda: build_model("llama"),
            {"embedding": {"format": "int4"}},
            "keeps rows of the embedding in fp16, but those of recipe tiny are int4",
        ),
    ],
)
def test_refused(model, options: dict[str, Any], words: str) -> None:
    with pytest.raises(CetaneError, match=words) as caught:
        AnemllPlanner(InMemoryCheckpoint(model()), tiny_recipe(**options))
    assert caught.value.hint


@pytest.mark.parametrize(
    ("config", "context", "advice"),
    [
        ({"sliding_window": 512}, 128, "--set tokens.prefill=32"),
        ({"sliding_window": 48}, 256, "--set tokens.prefill=16"),
        ({"sliding_window": 33}, 256, "--context"),
    ],
    ids=["three batches", "a divisor of the window", "an odd window"],
)
def test_the_advised_batch_fits(config: dict[str, Any], context: int, advice: str) -> None:
    """Of a default port, whose batch is theirs: 64."""
    checkpoint = InMemoryCheckpoint(build_gemma3(**config, max_position_embeddings=256))
    with pytest.raises(CetaneError) as caught:
        AnemllPlanner(checkpoint, tiny_recipe(context=context, prefill=None))
    assert caught.value.hint is not None and caught.value.hint.endswith(advice)
    if "=" in advice:
        AnemllPlanner(checkpoint, tiny_recipe(context=context, prefill=int(advice.split("=")[1])))


@pytest.mark.parametrize(
    ("architecture", "vocab", "group", "parts"),
    [
        ("llama", 128256, 1, 8),
        ("gemma3_text", 262144, 1, 16),
        ("qwen3", 151936, 1, 16),
        ("qwen3", 151936, 32, 4),  # 9,496 rows are no groups of 32
        ("llama", 50257, 1, 1),  # a prime
        ("llama", 128257, 1, 8),  # too many rows for one part: the last is padded
        ("llama", 3, 1, 1),
    ],
)
def test_parts(architecture: str, vocab: int, group: int, parts: int) -> None:
    assert parts_for(architecture, vocab, group) == parts


def test_what_is_there_stays(tiny_bundle, tmp_path: Path) -> None:
    bundle = tiny_bundle(contract="stateful", layout={"kind": "single"}, head={"slices": 2},
                         tensor_layout="ct1")  # fmt: skip
    (tmp_path / "mine").mkdir()
    with pytest.raises(CetaneError, match="exists"):
        export_runtime(bundle.path, tmp_path / "mine", "anemll")
