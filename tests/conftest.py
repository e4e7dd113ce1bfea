"""Tiny random models, in memory and on disk, for every test that needs a checkpoint."""

import gc
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import hypothesis
import pytest
import torch
import transformers
from filelock import FileLock
from tests.converting import converted_once
from tests.server.chromium import Chromium, program
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from cetane.bundle import Bundle
from cetane.checkpoint import Checkpoint, open_checkpoint
from cetane.gates.limits import Limits, read
from cetane.lower.lower import Lowering
from cetane.pipeline.build import build
from cetane.schema.recipe import Recipe, parse_recipe

TINY = {
    "vocab_size": 288,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}
COMPUTED = {"falcon": ("head_dim",)}
"""Keys that configs of a model type compute."""
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)

gc.set_threshold(20_000, 20, 20)  # imports and conversions make many objects, and few die
torch.set_num_threads(1)  # faster for models this small
hypothesis.settings.register_profile("unhurried", deadline=None)  # a busy machine fails no test
hypothesis.settings.load_profile("unhurried")


def pytest_collection_finish() -> None:
    """Collections of garbage leave out what was imported: it stays. coremltools and the tests
    collect often, and each collection visits all other objects of the process."""
    gc.collect()
    gc.freeze()


def build_model(model_type: str = "llama", **config: Any) -> transformers.PreTrainedModel:
    """A random fp32 model in which norms and biases are not at their defaults either."""
    torch.manual_seed(0)
    tiny = {key: size for key, size in TINY.items() if key not in COMPUTED.get(model_type, ())}
    settings = transformers.AutoConfig.for_model(model_type, **(tiny | config))
    model = transformers.AutoModelForCausalLM.from_config(
        settings, attn_implementation="eager", dtype=torch.float32
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn_like(parameter) * 0.1
    return model


class InMemoryCheckpoint:
    """A transformers model as the checkpoint that its files would be."""

    quantization = revision = folder = part_of = None
    merged, adapters = (), MappingProxyType[str, Any]({})

    def __init__(self, model: transformers.PreTrainedModel) -> None:
        self.source = f"a tiny {model.config.model_type}"
        self.config: dict[str, Any] = model.config.to_dict()
        self.tensors = dict(model.state_dict())
        if model.config.tie_word_embeddings:
            del self.tensors["lm_head.weight"]

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    def names(self) -> list[str]:
        return sorted(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def read(self, name: str) -> torch.Tensor:
        return self.tensors[name].clone()

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        return self.tensors[name][start:stop].clone()


class UnreadCheckpoint(InMemoryCheckpoint):
    """A checkpoint from which nothing may be read: plans and predictions need no weight."""

    def read(self, name: str) -> torch.Tensor:
        raise AssertionError(f"read {name}")

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        raise AssertionError(f"read {name}")


def without_weights(config: Mapping[str, Any]) -> UnreadCheckpoint:
    """A large model as transformers knows it, without a single weight."""
    settings = transformers.AutoConfig.for_model(**config)
    with torch.device("meta"):
        return UnreadCheckpoint(transformers.AutoModelForCausalLM.from_config(settings))


def build_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """A byte-level BPE with exactly the tiny model's vocabulary; token 0 ends a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TINY["vocab_size"],
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = "The rating of how readily a fuel ignites is its cetane number. user: assistant: "
    tokenizer.train_from_iterator([text] * 4, trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", chat_template=CHAT_TEMPLATE
    )


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that all workers share."""
    run = tmp_path_factory.getbasetemp()
    return run.parent if "PYTEST_XDIST_WORKER" in os.environ else run


@pytest.fixture(scope="session", autouse=True)
def cache_folder(run_folder: Path) -> None:
    """A cache that is not the user's. All workers share it, so each structure is converted once."""
    os.environ["CETANE_CACHE"] = str(run_folder / "cache")


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of one test, empty."""
    monkeypatch.setenv("CETANE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def made_once(folder: Path, make: Callable[[Path], object]) -> Path:
    """`folder`, which `make` fills for the first worker that asks; others wait for it.

    It fills another folder, whose name changes at the end: what a killed worker leaves is not used.
    """
    folder.parent.mkdir(exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        if not folder.exists():
            half = folder.with_suffix(".half")
            shutil.rmtree(half, ignore_errors=True)
            make(half)
            half.rename(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., transformers.PreTrainedModel]:
    """`tiny_model(model_type, **config)`: a random model; `config` changes `TINY`."""
    return build_model


@pytest.fixture(scope="session")
def in_memory() -> type[InMemoryCheckpoint]:
    """`in_memory(model)`: its checkpoint, without files."""
    return InMemoryCheckpoint


@pytest.fixture(scope="session")
def tiny_checkpoint_folder(run_folder: Path) -> Path:
    """A Hugging Face folder of a 2-layer llama: config, safetensors, tokenizer, chat template."""

    def save(folder: Path) -> None:
        tokenizer = build_tokenizer()
        assert len(tokenizer) == TINY["vocab_size"]
        build_model("llama").save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    return made_once(run_folder / "tiny-llama", save)


@pytest.fixture(scope="session")
def tiny_checkpoint(tiny_checkpoint_folder: Path) -> Checkpoint:
    """The tiny llama, opened once."""
    return open_checkpoint(tiny_checkpoint_folder)


VARIANTS: dict[str, dict[str, Any]] = {
    "readonly": {"layout": {"kind": "chunks", "chunks": 1}, "head": {"slices": 2}, "verify": None},
    "blend": {"layout": {"kind": "per-block"}, "tensor_layout": "ct1", "verify": None},
    "shift": {"layout": {"kind": "single"}, "prefill": None},
    "stateful": {"layout": {"kind": "single"}, "tensor_layout": "ct1", "head": {"slices": 2}},
    "readonly-range": {"layout": {"kind": "single"}, "tensor_layout": "ct1"},
    "blend-range": {"layout": {"kind": "chunks", "chunks": 1}},
    "shift-range": {"layout": {"kind": "single"}, "tensor_layout": "ct1"},
    "stateful-range": {"layout": {"kind": "chunks", "chunks": 2}},
    "stateful-blend": {"layout": {"kind": "per-block"}, "tensor_layout": "ct1", "prefill": None},
    "stateful-blend-range": {"layout": {"kind": "chunks", "chunks": 1}},
}
"""Cache contracts, static and flexible, each with another layout."""


def tiny_recipe(
    contract: str = "readonly",
    shapes: str = "static",
    verify: int | None = 3,
    prefill: int | None = 8,
    context: int = 64,
    **others: Any,
) -> Recipe:
    """A recipe for the tiny model, small in every way that is not said."""
    return parse_recipe(
        {
            "name": "tiny",
            "cache": {"contract": contract, "context": context},
            "tokens": {"verify": verify, "prefill": prefill, "shapes": shapes},
        }
        | others,
        "tiny",
    )


@pytest.fixture(scope="session")
def recipe() -> Callable[..., Recipe]:
    """`recipe(contract, ...)`: a recipe for the tiny model."""
    return tiny_recipe


@pytest.fixture(scope="session")
def tiny_bundle(tiny_checkpoint: Checkpoint, run_folder: Path) -> Iterator[Callable[..., Bundle]]:
    """`tiny_bundle(contract, ...)`: a bundle of the tiny folder, built once for all workers: copy
    it to change it.

    Takes what `recipe` takes.
    """
    made: dict[str, Bundle] = {}

    def bundle(**options: Any) -> Bundle:
        wanted = tiny_recipe(**options)
        key = hashlib.sha256(wanted.model_dump_json().encode()).hexdigest()[:16]
        if key not in made:
            folder = made_once(
                run_folder / "bundles" / key,
                lambda half: build(tiny_checkpoint, wanted, half / "tiny", lambda *_: None),
            )
            made[key] = Bundle(folder / "tiny")
        return made[key]

    yield bundle
    for one in made.values():  # all tests copied what they changed
        one.verify()
        assert not (one.path / "gates").exists()


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    path = program()
    if path is None:
        pytest.skip("there is no Chromium, and it cannot be installed here")
    with Chromium(path, tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@dataclass(frozen=True)
class Adapted:
    """A bundle of the tiny llama with two adapters, and the models that peft merges."""

    bundle: Bundle
    base: Path
    folders: dict[str, Path]
    merged: dict[str | None, transformers.PreTrainedModel]
    """By adapter; the base's own model under None."""


@pytest.fixture(scope="session")
def adapted(
    tiny_checkpoint_folder: Path, run_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Adapted:
    """`plain` is a LoRA of every linear layer, `dora` one of the first layer's queries.

    All workers share the files; each merges the models for itself.
    """
    from tests.peft_folders import save_adapter  # peft takes a second to import

    own, model = tmp_path_factory.mktemp("adapters"), build_model("llama")
    merged: dict[str | None, transformers.PreTrainedModel] = {
        None: model,
        "plain": save_adapter(own / "plain", model, target_modules="all-linear", r=3),
        "dora": save_adapter(
            own / "dora", model, seed=2, r=2, use_dora=True,
            target_modules=["q_proj"], layers_to_transform=[0],
        ),
    }  # fmt: skip
    saved = made_once(run_folder / "adapters", lambda half: shutil.copytree(own, half))
    folders = {name: saved / name for name in ("plain", "dora")}
    checkpoint = open_checkpoint(tiny_checkpoint_folder, adapters=folders)
    recipe = tiny_recipe(verify=None, layout={"kind": "chunks", "chunks": 1})
    made = made_once(
        run_folder / "bundles" / "adapted",
        lambda half: build(checkpoint, recipe, half / "tiny", lambda *_: None),
    )
    return Adapted(Bundle(made / "tiny"), tiny_checkpoint_folder, folders, merged)


TOOL_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }} calls: <tool_call>\n{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>"
    "{% endfor %}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.fixture(scope="session")
def chat_bundle(tiny_checkpoint_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The tiny llama in fp16 with a context of 1024, and a template that knows tools."""
    folder = tmp_path_factory.mktemp("chat") / "checkpoint"
    shutil.copytree(tiny_checkpoint_folder, folder)
    (folder / "chat_template.jinja").write_text(TOOL_TEMPLATE)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1024}))
    recipe = tiny_recipe(verify=4, prefill=32, context=1024, layout={"kind": "single"})
    return build(open_checkpoint(folder), recipe, folder.parent / "tiny", lambda *_: None)


@pytest.fixture(scope="module")
def shared_templates() -> Iterator[None]:
    """Builds of the module take no time to convert."""
    with converted_once():
        yield


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`asked(table, **limits)`: gates ask other limits of a table than those that come with cetane;
    `table` may be "quality.good"."""

    def change(table: str, **limits: float) -> None:
        content = read().model_dump()
        part = content
        for key in table.split("."):
            part = part[key]
        part |= limits
        changed = Limits.model_validate(content)
        monkeypatch.setattr("cetane.gates.limits.read", lambda: changed)

    return change


@pytest.fixture
def lowered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the shards that are lowered, in order."""
    names: list[str] = []
    lower = Lowering.lower

    def watch(self: Lowering, shard: str, target: Path) -> None:
        names.append(shard)
        lower(self, shard, target)

    monkeypatch.setattr(Lowering, "lower", watch)
    return names


@pytest.fixture(scope="session", params=VARIANTS)
def variant(request: pytest.FixtureRequest, tiny_bundle: Callable[..., Bundle]) -> Bundle:
    """A bundle of the tiny folder with fp16 weights, for each of `VARIANTS`."""
    contract = request.param.removesuffix("-range")
    shapes = "static" if contract == request.param else "range"
    return tiny_bundle(contract=contract, shapes=shapes, **VARIANTS[request.param])
