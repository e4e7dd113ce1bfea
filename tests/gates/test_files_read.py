"""The golden gate compares what cetane reads of a model's files with what transformers reads."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType
from tests.conftest import build_model, build_tokenizer, tiny_recipe
from tests.gemma_gguf import TOKENS, add_tokenizer, write_gemma3
from tests.gguf_files import write_gguf
from tokenizers import normalizers, processors

from cetane.bundle import Bundle
from cetane.checkpoint import Checkpoint, Tokenizer, open_checkpoint
from cetane.checkpoint.gguf import model_types
from cetane.gates import transformers_files
from cetane.gates.explain import explain
from cetane.gates.files_read import FilesRead, as_chance, only_ours, other_config, other_tokens
from cetane.gates.golden import golden
from cetane.gates.golden_result import GoldenResult
from cetane.gates.reference import Reference
from cetane.gates.transformers_files import TransformersFiles, read_by_transformers
from cetane.pipeline.build import build
from cetane.planner import Planner


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A llama whose texts begin with BOS, and whose answers end at two tokens."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", bos)]
    )
    tokenizer.chat_template = "{{ bos_token }}" + str(tokenizer.chat_template)
    tokenizer.save_pretrained(folder)
    build_model("llama", vocab_size=bos + 1).save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 7]}))
    return open_checkpoint(folder)


@pytest.fixture(scope="module")
def theirs(model: Checkpoint) -> TransformersFiles:
    return read_by_transformers(model)


def labels(given: Tokenizer, theirs: TransformersFiles) -> list[str]:
    wrong, told = other_tokens(given, theirs)
    assert not told
    return [one.label for one in wrong]


def test_a_right_tokenizer(model: Checkpoint, theirs: TransformersFiles, tmp_path: Path) -> None:
    assert theirs.error is None and len(theirs.samples) == 2 and theirs.stops == (0, 7)
    model.tokenizer.save(tmp_path)
    for given in (model.tokenizer, Tokenizer.load(tmp_path)):
        assert given.encode("a")[0] == given.bos_id and given.eos_ids == (0, 7)
        assert not labels(given, theirs)


def test_wrong_special_tokens(model: Checkpoint, theirs: TransformersFiles) -> None:
    right = model.tokenizer
    assert labels(replace(right, eos_ids=(0,)), theirs) == ["stop tokens"]
    assert labels(replace(right, eos_ids=(0, 7, 9)), theirs) == ["stop tokens"]
    no_bos = {role: text for role, text in right.special_tokens.items() if role != "bos_token"}
    assert labels(replace(right, special_tokens=no_bos), theirs) == ["BOS token", "chat template"]
    assert labels(replace(right, chat_template="{{ bos_token }}"), theirs) == ["chat template"]


def test_other_signs_than_english(model: Checkpoint, theirs: TransformersFiles) -> None:
    """Two tokenizers that agree on all ASCII."""
    backend = type(model.tokenizer.backend).from_str(model.tokenizer.backend.to_str())
    backend.normalizer = normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])
    assert labels(replace(model.tokenizer, backend=backend), theirs) == ["text", "plain text"]


def test_a_template_that_refuses_a_question_alone(model: Checkpoint) -> None:
    right, why = model.tokenizer, "a system message comes first"
    strict = replace(right, chat_template=f"{{{{ raise_exception('{why}') }}}}")
    read = Planner(model, tiny_recipe()).model, Reference(model)

    def told(given: Tokenizer) -> list[str]:
        warnings = FilesRead(model, *read, given).warnings(1.0)
        return [warning for warning in warnings if "So greedy decoding" in warning]

    assert told(right) == told(replace(right, chat_template=None)) == []
    (warning,) = told(strict)
    assert f"{why}. So greedy decoding" in warning


@pytest.mark.parametrize(
    ("method", "other", "label"),
    [
        ("encode", lambda own, text: own.encode_plain(text), "text"),
        ("encode_plain", lambda own, text: own.encode(text), "plain text"),
        ("chat", lambda own, messages: own.encode(own.render_chat(messages)), "conversation"),
    ],
)  # fmt: skip
def test_wrong_methods(
    method: str, other: Any, label: str, model: Checkpoint, theirs: TransformersFiles,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(Tokenizer, method, other)
    assert labels(model.tokenizer, theirs) == [label]


def test_no_generation_prompt(
    model: Checkpoint, theirs: TransformersFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    render = Tokenizer.render_chat
    monkeypatch.setattr(Tokenizer, "render_chat", lambda own, m, *_: render(own, m, False))
    assert labels(model.tokenizer, theirs) == ["chat template"]


def test_a_class_that_reads_otherwise(model: Checkpoint, theirs: TransformersFiles) -> None:
    """What tokenizer.json says is right too."""
    of_class, as_stored = theirs.samples
    other = of_class.model_copy(update={"reader": "OwnTokenizer", "bos": 5})
    wrong, told = other_tokens(
        model.tokenizer, theirs.model_copy(update={"samples": (other, as_stored)})
    )
    assert not wrong
    assert len(told) == 1 and "OwnTokenizer" in told[0] and "BOS token" in told[0]


@pytest.mark.parametrize("broken", ["foreign code", "no such class", "hostile template"])
def test_what_transformers_cannot_read(broken: str, model: Checkpoint, tmp_path: Path) -> None:
    """It never makes a port red, and no foreign code runs."""
    assert model.folder is not None
    for name in ("tokenizer.json", "config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((model.folder / name).read_bytes())
    config: dict[str, Any] = {"eos_token": "<eos>", "bos_token": "<s>"}
    ran = tmp_path / "ran"
    (tmp_path / "own.py").write_text(f"open({str(ran)!r}, 'w')")
    if broken == "foreign code":
        config |= {"auto_map": {"AutoTokenizer": ["own.Own", None]}}
    elif broken == "no such class":
        config |= {"tokenizer_class": "NoSuchTokenizer"}
    else:
        config |= {"chat_template": "{{ raise_exception('no') }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    checkpoint = open_checkpoint(tmp_path)
    assert not other_tokens(checkpoint.tokenizer, read_by_transformers(checkpoint))[0]
    assert not ran.exists()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """The places about which a child was asked, with an empty cache folder."""
    monkeypatch.setenv("CETANE_CACHE", str(tmp_path))
    places, ask = list[Path](), transformers_files.asked

    def noted(place: Path) -> str:
        places.append(place)
        return ask(place)

    monkeypatch.setattr(transformers_files, "asked", noted)
    return places


def child(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    sandbox = replace(transformers_files.SANDBOX, code=code)
    monkeypatch.setattr(transformers_files, "SANDBOX", sandbox)


def test_no_answer(model: Checkpoint, asked: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that dies is asked again: something else may have killed it."""
    child(monkeypatch, "sys.exit(3)")
    for _ in range(2):
        theirs = read_by_transformers(model)
        assert other_tokens(model.tokenizer, theirs) == ([], [])
        told = only_ours(theirs, gguf=False, loader="transformers")
        assert told is not None and "tokenizer" in told and "status 3" in told
    assert asked == [model.folder] * 2


def test_an_answer_is_kept(
    model: Checkpoint, asked: list[Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    child(monkeypatch, """print('{"error": "no such class"}')""")
    theirs = read_by_transformers(model)
    assert read_by_transformers(model) == theirs == TransformersFiles(error="no such class")
    assert asked == [model.folder]
    (kept,) = tmp_path.glob("tokenizers/read-*.json")
    for damaged in ("", "{}"):  # the latter would say that nothing is known
        kept.write_text(damaged)
        assert read_by_transformers(model) == theirs
    assert asked == [model.folder] * 3


def test_a_gguf_file(tmp_path: Path) -> None:
    """What the file states must agree; how texts are split only warns."""
    ids = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
    small = build_model("gemma3_text", vocab_size=len(TOKENS), **ids)
    path = write_gemma3(tmp_path / "gemma.gguf", small, GGMLQuantizationType.F32)
    checkpoint = open_checkpoint(path)
    right, theirs = checkpoint.tokenizer, read_by_transformers(checkpoint)
    assert theirs.error is None and theirs.samples[0].from_gguf
    assert other_tokens(right, theirs) == ([], [])
    assert labels(replace(right, eos_ids=(5,)), theirs) == ["stop tokens"]
    assert labels(replace(right, chat_template="{{ bos_token }}"), theirs) == ["chat template"]
    backend = type(right.backend).from_str(right.backend.to_str())
    backend.normalizer = None
    wrong, told = other_tokens(replace(right, backend=backend), theirs)
    assert not wrong and len(told) == 1  # of texts, conversations and plain texts together
    assert "; plain text: of " in told[0]


def test_the_gate_names_it(
    tiny_bundle: Callable[..., Bundle], checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same fault in the port and in cetane's reading of the model."""
    render = Tokenizer.render_chat
    monkeypatch.setattr(Tokenizer, "render_chat", lambda own, m, *_: render(own, m, False))
    bundle = tiny_bundle(verify=None, prefill=None)
    verdict = golden(bundle, checkpoint, lambda *_: None, prompts=0)
    assert [wrong.label for wrong in verdict.wrong_weights] == ["chat template"]
    why = explain(bundle, checkpoint, verdict)
    assert why is not None and why.cause == "weights" and "chat template" in why.sentence


def test_the_config_of_a_gguf_file(tmp_path: Path) -> None:
    ids = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
    small = build_model("gemma3_text", vocab_size=len(TOKENS), rms_norm_eps=1e-3, **ids)
    path = write_gemma3(tmp_path / "gemma.gguf", small, GGMLQuantizationType.F32)
    checkpoint = open_checkpoint(path)
    theirs = read_by_transformers(checkpoint)
    right = checkpoint.config
    assert theirs.config is not None and theirs.config["rms_norm_eps"] == pytest.approx(1e-3)
    assert list(other_config(checkpoint, theirs)) == []
    assert only_ours(theirs, gguf=True, loader="transformers") is None
    rope = right["rope_parameters"]
    theta = {"rope_theta": 500.0}
    for field, value in {
        "rms_norm_eps": 1e-6,
        "num_key_value_heads": 1,
        "sliding_window": 77,
        "rope_parameters": rope | {"full_attention": rope["full_attention"] | theta},
    }.items():
        checkpoint.config = right | {field: value}
        (wrong,) = other_config(checkpoint, theirs)
        assert wrong.label == ("rope_theta" if field == "rope_parameters" else field)
        assert "in transformers" in wrong.problem


def test_a_gguf_file_that_transformers_does_not_know(tmp_path: Path) -> None:
    """Only a warning says so."""
    small = build_model("granite", pad_token_id=0, bos_token_id=2, vocab_size=len(TOKENS))
    path = write_gguf(tmp_path / "granite.gguf", "granite", small, extra=add_tokenizer)
    theirs = read_by_transformers(open_checkpoint(path))
    told = only_ours(theirs, gguf=True, loader="cetane")
    assert told is not None and "config, tokenizer, weights" in told and "granite" in told
    assert list(other_config(open_checkpoint(path), theirs)) == []


def without_biases(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """cetane overlooks the biases of a GGUF file."""
    own = model_types.OWN[kind]
    lost = {"attention_bias": False}
    monkeypatch.setitem(model_types.OWN, kind, lambda facts: own(facts) | lost)


def test_parameters_that_neither_side_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
    small = build_model("llama", vocab_size=len(TOKENS), attention_bias=True, **ids)
    path = write_gguf(tmp_path / "llama.gguf", "llama", small, extra=add_tokenizer)
    recipe = tiny_recipe(verify=None, prefill=None)

    def judged(name: str) -> tuple[Bundle, Checkpoint, GoldenResult]:
        checkpoint = open_checkpoint(path)
        bundle = build(checkpoint, recipe, tmp_path / name, lambda *_: None)
        return bundle, checkpoint, golden(bundle, checkpoint, lambda *_: None, prompts=0)

    assert judged("right")[2].passed
    without_biases("llama", monkeypatch)
    bundle, checkpoint, verdict = judged("wrong")
    assert len(verdict.unused) == 2 * 4
    assert [check.name for check in verdict.checks if not check.passed] == [
        "weights: unused parameters"
    ]
    why = explain(bundle, checkpoint, verdict)
    assert why is not None and ".bias: neither" in why.sentence


def test_parameters_that_transformers_ignores(tmp_path: Path) -> None:
    """The truth is what transformers makes of config.json. A warning names the rest."""
    small = build_model("llama", attention_bias=True)
    small.config.attention_bias = False
    small.save_pretrained(tmp_path / "model")
    build_tokenizer().save_pretrained(tmp_path / "model")
    checkpoint = open_checkpoint(tmp_path / "model")
    bundle = build(
        checkpoint, tiny_recipe(verify=None, prefill=None), tmp_path / "bundle", lambda *_: None
    )
    verdict = golden(bundle, checkpoint, lambda *_: None, prompts=0)
    assert verdict.passed
    (told,) = verdict.warnings
    assert "reads nothing from model.layers.0.self_attn.k_proj.bias" in told


def test_a_model_that_knows_nothing() -> None:
    """Equal chances have the vocabulary as perplexity. Half of it is 94 % of that loss."""
    assert as_chance(25.0, 50_000) is None and as_chance(5_000.0, 50_000) is None
    for perplexity in (25_000.0, 50_000.0, 1e308, float("nan")):
        told = as_chance(perplexity, 50_000)
        assert told is not None and "50000 tokens" in told
