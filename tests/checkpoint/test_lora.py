"""Adapters, merged as they are read: peft's own merge is the truth."""

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.conftest import build_model
from tests.families.matrix_models import NEMOTRONS
from tests.gguf_files import write_gguf
from tests.peft_folders import save_adapter

from cetane.checkpoint import open_checkpoint
from cetane.checkpoint.adapted import with_adapters, with_lora
from cetane.checkpoint.lora_config import compiled
from cetane.errors import CetaneError

KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "plain": ("llama", {}, {"target_modules": ["q_proj", "down_proj"], "r": 3, "lora_alpha": 5}),
    "every linear layer, rank-stabilised": (
        "llama", {}, {"target_modules": "all-linear", "r": 4, "use_rslora": True},
    ),
    "patterns": (
        "llama", {},
        {"target_modules": ["q_proj", "v_proj", "up_proj"], "r": 4, "lora_alpha": 7,
         "rank_pattern": {"v_proj": 2, r"^model.layers.1.self_attn.q_proj": 3},
         "alpha_pattern": {r"layers\\.[0-9]\\.mlp.up_proj".replace("\\\\", "\\"): 11}},
    ),
    "DoRA": ("llama", {}, {"target_modules": ["k_proj", "up_proj"], "r": 2, "use_dora": True}),
    "biases": ("qwen2", {}, {"target_modules": ["q_proj"], "r": 2, "bias": "all"}),
    "biases of its layers": (
        "qwen2", {}, {"target_modules": ["q_proj", "o_proj"], "r": 2, "bias": "lora_only"},
    ),
    "embedding and head": (
        "llama", {"tie_word_embeddings": False},
        {"target_modules": ["embed_tokens", "lm_head", "q_proj"], "r": 2},
    ),
    "trained whole": (
        "llama", {"tie_word_embeddings": False},
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "input_layernorm"]},
    ),
    "fused projections": ("phi3", {}, {"target_modules": ["qkv_proj", "gate_up_proj"], "r": 2}),
}  # fmt: skip


@pytest.fixture
def base(tmp_path: Path) -> Callable[..., Any]:
    """`base(model_type, **config)`: a model, and the folder that holds it."""

    def made(model_type: str = "llama", **config: Any) -> Any:
        model = build_model(model_type, **config)
        model.save_pretrained(tmp_path / "base")
        return model, tmp_path / "base"

    return made


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_what_peft_merges(kind: str, base: Any, tmp_path: Path) -> None:
    model_type, config, adapter = KINDS[kind]
    model, folder = base(model_type, **config)
    wanted = save_adapter(tmp_path / "lora", model, **adapter).state_dict()
    merged, alone = open_checkpoint(folder, tmp_path / "lora"), open_checkpoint(folder)
    assert merged.names() == alone.names()
    assert merged.fingerprint != alone.fingerprint
    changed = 0
    for name in merged.names():
        tensor = merged.read(name)
        assert tuple(tensor.shape) == merged.shape(name)
        torch.testing.assert_close(tensor, wanted[name], rtol=0, atol=2e-6)
        torch.testing.assert_close(merged.read_rows(name, 1, 9), tensor[1:9], rtol=0, atol=1e-6)
        changed += not torch.equal(wanted[name], alone.read(name))
    assert changed >= 2


def test_a_replaced_tensor_has_the_dtype_of_the_adapter(
    damaged: Any, tiny_checkpoint_folder: Path
) -> None:
    norm = {"base_model.model.model.norm.weight": torch.ones(64, dtype=torch.float16)}
    merged = open_checkpoint(tiny_checkpoint_folder, damaged({}, norm))
    assert merged.read("model.norm.weight").dtype == torch.float16
    assert merged.dtype("model.norm.weight") == "F16"
    assert merged.dtype("model.layers.0.self_attn.q_proj.weight") == "F32"


def test_a_gguf_base(tmp_path: Path) -> None:
    model = build_model("llama", bos_token_id=1, pad_token_id=2)
    path = write_gguf(tmp_path / "base.gguf", "llama", model, gguf.GGMLQuantizationType.Q8_0)
    alone = open_checkpoint(path)
    model.load_state_dict({name: alone.read(name) for name in alone.names()}, strict=False)
    wanted = save_adapter(tmp_path / "lora", model, target_modules=["q_proj", "k_proj"])
    merged = open_checkpoint(path, tmp_path / "lora")
    for name in alone.names():
        torch.testing.assert_close(merged.read(name), wanted.state_dict()[name], rtol=0, atol=2e-6)


@pytest.fixture(scope="session")
def saved(tmp_path_factory: Any) -> Path:
    """A plain adapter of the tiny llama."""
    folder = tmp_path_factory.mktemp("lora") / "plain"
    save_adapter(folder, build_model(), target_modules=["q_proj"], r=2)
    return folder


@pytest.fixture
def damaged(saved: Path, tmp_path: Path) -> Callable[..., Path]:
    """`damaged(config, tensors)`: the adapter with other keys and other tensors; None removes."""

    def made(config: dict[str, Any], tensors: dict[str, torch.Tensor | None]) -> Path:
        folder = tmp_path / "damaged"
        shutil.copytree(saved, folder)
        content = json.loads((folder / "adapter_config.json").read_text()) | config
        (folder / "adapter_config.json").write_text(json.dumps(content))
        held = load_file(folder / "adapter_model.safetensors")
        for name, tensor in tensors.items():
            held.pop(name, None)
            if tensor is not None:
                held[name] = tensor
        save_file(held, folder / "adapter_model.safetensors")
        return folder

    return made


Q = "base_model.model.model.layers.0.self_attn.q_proj"
CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "another kind": ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
    "no kind": ({"peft_type": None}, "peft_type is None"),
    "aLoRA": ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens is not known"),
    "layers twice": ({"layer_replication": [[0, 2]]}, "layer_replication is not known"),
    "tokens": ({"trainable_token_indices": [5]}, "trainable_token_indices is not known"),
    "experts": ({"target_parameters": ["experts.up"]}, "target_parameters is not known"),
    "biases of B": ({"lora_bias": True}, "lora_bias is not known"),
    "from the future": ({"use_something": {"a": 1}}, "use_something is not known"),
    "pissa": ({"init_lora_weights": "pissa"}, "also changed the base"),
    "no rank": ({"r": 0}, "r: "),
    "a huge rank": ({"r": 10**9}, "r: "),
    "alpha": ({"lora_alpha": "many"}, "lora_alpha: "),
    "infinite alpha": ({"alpha_pattern": {"q_proj": float("inf")}}, "alpha_pattern"),
    "a slow pattern": ({"alpha_pattern": {"(a+)+b": 1}}, "not a plain name"),
    "a range from z to a": ({"rank_pattern": {"[z-a]": 2}}, "not a plain name"),
    "a pattern of stars": ({"rank_pattern": {".*.*.*q_proj": 2}}, "not a plain name"),
    "many ranks": ({"rank_pattern": {f"m{n}": 2 for n in range(1025)}}, "1,025 entries, more than"),
    "many alphas": (
        {"alpha_pattern": {f"m{n}": 2 for n in range(1025)}},
        "alpha_pattern has 1,025",
    ),
    "rank": ({"r": 3}, "rank 2, but the config says 3"),
    "DoRA without magnitudes": ({"use_dora": True}, "use_dora is True"),
}
TENSORS: dict[str, tuple[dict[str, torch.Tensor | None], str]] = {
    "no B": ({f"{Q}.lora_B.weight": None}, "has only a"),
    "another layer": (
        {f"{Q.replace('0', '7')}.lora_A.weight": torch.zeros(2, 64)},
        "does not have",
    ),
    "inputs": ({f"{Q}.lora_A.weight": torch.zeros(2, 65)}, "is for shape (64, 65)"),
    "outputs": ({f"{Q}.lora_B.weight": torch.zeros(63, 2)}, "is for shape (63, 64)"),
    "ranks": ({f"{Q}.lora_B.weight": torch.zeros(64, 3)}, "do not fit each other"),
    "integers": ({f"{Q}.lora_B.weight": torch.zeros(64, 2, dtype=torch.int32)}, "is I32"),
    "one axis": ({f"{Q}.lora_B.weight": torch.zeros(64)}, "do not fit each other"),
    "a new part": ({f"{Q}.lora_C.weight": torch.zeros(64)}, "lora_C.weight is not known"),
    "no prefix": ({"model.norm.weight": torch.zeros(64)}, "does not begin with"),
    "a new tensor": ({"base_model.model.score.weight": torch.zeros(2, 64)}, "does not have"),
    "more tokens": ({"base_model.model.model.norm.weight": torch.zeros(65)}, "shape (65,)"),
    "one twice": (
        {f"{Q}.weight": torch.zeros(64, 64), f"{Q}.base_layer.weight": torch.ones(64, 64)},
        "two of its tensors replace model.layers.0.self_attn.q_proj.weight",
    ),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_config_is_refused_by_name(case: str, damaged: Any, tiny_checkpoint_folder: Path) -> None:
    config, reason = CONFIGS[case]
    with pytest.raises(CetaneError) as refusal:
        open_checkpoint(tiny_checkpoint_folder, damaged(config, {}))
    assert reason in refusal.value.message


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_are_refused_by_name(case: str, damaged: Any, tiny_checkpoint_folder: Path) -> None:
    tensors, reason = TENSORS[case]
    with pytest.raises(CetaneError) as refusal:
        open_checkpoint(tiny_checkpoint_folder, damaged({}, tensors))
    assert reason in refusal.value.message
    assert refusal.value.hint


NAN = float("nan")
UNSOUND: dict[str, tuple[dict[str, Any], dict[str, torch.Tensor]]] = {
    "alpha": ({"lora_alpha": 1e300}, {}),
    "up": ({}, {f"{Q}.lora_B.weight": torch.full((64, 2), NAN)}),
    "down": ({}, {f"{Q}.lora_A.weight": torch.full((2, 64), NAN)}),
    "magnitude": (
        {"use_dora": True},
        {
            f"{Q.replace('0', str(n))}.lora_magnitude_vector": torch.full((64,), NAN)
            for n in range(2)
        },
    ),
}


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("case", UNSOUND)
def test_an_adapter_is_blamed_for_its_own_nan(
    case: str, beside: bool, damaged: Any, tiny_checkpoint_folder: Path
) -> None:
    config, tensors = UNSOUND[case]
    folder, base = damaged(config, tensors), open_checkpoint(tiny_checkpoint_folder)
    name = "model.layers.0.self_attn.q_proj.weight"
    opened = with_adapters(base, {"a": folder}) if beside else with_lora(base, folder)
    parts = ("down", "up", "factor") if config.get("use_dora") else ("down", "up")
    with pytest.raises(CetaneError, match=f"damaged: the adapter makes NaN or infinity of {name}"):
        for read in (f"a:{name}:{part}" for part in parts) if beside else (name,):
            opened.read(read)


def test_a_base_is_blamed_for_its_own_nan(saved: Path, tmp_path: Path) -> None:
    model = build_model()
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight[3, 4] = NAN
    model.save_pretrained(tmp_path)
    merged = with_lora(open_checkpoint(tmp_path), saved)
    assert merged.read("model.layers.0.self_attn.q_proj.weight").isnan().any()


@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
def test_a_table_that_is_also_the_head_is_refused(target: str, base: Any, tmp_path: Path) -> None:
    model, folder = base("llama", tie_word_embeddings=True)
    save_adapter(tmp_path / "lora", model, target_modules=[target, "q_proj"], r=2)
    with pytest.raises(CetaneError, match="embedding and head at once"):
        open_checkpoint(folder, tmp_path / "lora")


@pytest.mark.parametrize("kind", ["embedding and head", "trained whole"])
def test_what_no_function_can_share_is_refused_beside(kind: str, base: Any, tmp_path: Path) -> None:
    model_type, config, adapter = KINDS[kind]
    model, folder = base(model_type, **config)
    save_adapter(tmp_path / "lora", model, **adapter)
    with pytest.raises(CetaneError, match=r"as a whole|a table of the host") as refusal:
        open_checkpoint(folder, adapters={"a": tmp_path / "lora"})
    assert "--lora" in str(refusal.value.hint)


def test_another_commit_of_the_base_is_refused(
    damaged: Any, tiny_checkpoint_folder: Path, tmp_path: Path
) -> None:
    snapshot = tmp_path / "snapshots" / ("1" * 40)
    shutil.copytree(tiny_checkpoint_folder, snapshot)
    folder = damaged({"revision": "0" * 40}, {})
    assert open_checkpoint(tiny_checkpoint_folder, folder)  # whose commit nobody knows
    with pytest.raises(CetaneError, match="its base is revision 0000"):
        open_checkpoint(snapshot, folder)


def test_pickles_and_half_folders_are_refused(
    saved: Path, tiny_checkpoint_folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(CetaneError, match=r"no adapter_config.json"):
        open_checkpoint(tiny_checkpoint_folder, tmp_path)
    shutil.copy(saved / "adapter_config.json", tmp_path)
    with pytest.raises(CetaneError, match=r"no adapter_model.safetensors"):
        open_checkpoint(tiny_checkpoint_folder, tmp_path)
    (tmp_path / "adapter_model.bin").write_bytes(b"\x80\x04")
    with pytest.raises(CetaneError, match=r"is a pickle.*save the adapter with peft again"):
        open_checkpoint(tiny_checkpoint_folder, tmp_path)


def test_an_adapter_is_no_model(saved: Path, damaged: Any) -> None:
    folder = damaged({"base_model_name_or_path": "org/base"}, {})
    with pytest.raises(CetaneError, match="holds an adapter, not a model") as caught:
        open_checkpoint(folder)
    assert caught.value.hint == f"give org/base, and add --lora {folder}"


def test_names_of_a_nemotron_h_on_disk(tmp_path: Path) -> None:
    """An adapter that was trained with the model's own code has them."""
    model = build_model("nemotron_h", **NEMOTRONS["dense"])
    model.save_pretrained(tmp_path / "base")
    merged = save_adapter(tmp_path / "lora", model, target_modules=["in_proj"])
    path = tmp_path / "lora/adapter_model.safetensors"
    tensors = {
        name.replace(".model.model.", ".model.backbone."): t for name, t in load_file(path).items()
    }
    save_file(tensors, path)
    name = "model.layers.0.mixer.in_proj.weight"
    own = open_checkpoint(tmp_path / "base", tmp_path / "lora").read(name)
    torch.testing.assert_close(own, merged.state_dict()[name])


def test_an_adapter_of_mlx_lm(tiny_checkpoint_folder: Path, tmp_path: Path) -> None:
    """The keys are those that `mlx_lm.lora` writes."""
    content = {"fine_tune_type": "lora", "model": "org/base", "lora_parameters": {"rank": 8}}
    (tmp_path / "adapter_config.json").write_text(json.dumps(content))
    (tmp_path / "adapters.safetensors").write_bytes(b"")
    with pytest.raises(CetaneError, match="only adapters of peft") as caught:
        open_checkpoint(tiny_checkpoint_folder, tmp_path)
    merge = f"mlx_lm.fuse --model org/base --adapter-path {tmp_path} --save-path merged"
    assert merge in str(caught.value.hint)
    hostile = json.dumps(content | {"model": "x; touch '$HOME' #"})
    (tmp_path / "adapter_config.json").write_text(hostile)
    with pytest.raises(CetaneError, match="only adapters of peft") as caught:
        open_checkpoint(tiny_checkpoint_folder, tmp_path)
    command = str(caught.value.hint).removeprefix("merge it: ")
    assert shlex.split(command)[:4] == ["mlx_lm.fuse", "--model", "x; touch '$HOME' #",
                                        "--adapter-path"]  # fmt: skip


def test_each_pattern_is_compiled_once(damaged: Any, tiny_checkpoint_folder: Path) -> None:
    """Not once for each module."""
    patterns = {f"module{number}": 2 for number in range(1024)}
    folder = damaged({"rank_pattern": patterns, "alpha_pattern": patterns}, {})
    compiled.cache_clear()
    open_checkpoint(tiny_checkpoint_folder, folder)
    assert compiled.cache_info().misses == len(patterns)


def test_a_truncated_file_is_refused(damaged: Any, tiny_checkpoint_folder: Path) -> None:
    folder = damaged({}, {})
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CetaneError, match="not a valid safetensors file"):
        open_checkpoint(tiny_checkpoint_folder, folder)


@pytest.mark.parametrize("name", ["", "1st", "a-b", "a b", "a" * 33, "a/b", "ä"])
def test_names_of_adapters(name: str, saved: Path, tiny_checkpoint_folder: Path) -> None:
    with pytest.raises(CetaneError, match="not a name of an adapter"):
        open_checkpoint(tiny_checkpoint_folder, adapters={name: saved})


def test_a_key_that_appears_twice(damaged: Any, tiny_checkpoint_folder: Path) -> None:
    """Readers take the first or the last of the two, and merge another adapter."""
    folder = damaged({}, {})
    config = folder / "adapter_config.json"
    config.write_text(config.read_text().replace("{", '{"lora_alpha": 500,', 1))
    with pytest.raises(CetaneError, match="a name appears twice"):
        open_checkpoint(tiny_checkpoint_folder, folder)
