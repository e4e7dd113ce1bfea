"""Loading blocks, and every config and weight that no port can be right with."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import InMemoryCheckpoint, build_model
from tests.families.latent_models import DEEPSEEK, ONE_GROUP
from tests.families.matrix_models import QWEN_NEXT
from tests.families.mixture_models import LFM2_EXPERTS, MIXTURES, build_mixture
from tests.families.parity import FEEDS, assert_parity
from tests.families.recipes import recipe

from cetane.errors import CetaneError
from cetane.families import author as author_with
from cetane.families import families
from cetane.families.base import RoutedBlock
from cetane.families.model import Model, StoredTable
from cetane.planner import Planner
from cetane.schema.recipe import parse_recipe

GAIN = "model.layers.1.input_layernorm.weight"
QUERY = "model.layers.1.self_attn.q_proj.weight"
BIAS = "model.layers.1.self_attn.q_proj.bias"
NAMES = (GAIN, QUERY, BIAS)
RECIPE = parse_recipe({"name": "test", "cache": {"context": 64}}, "test")
NO_WEIGHTS = InMemoryCheckpoint(build_model("llama"))


def author(config: dict[str, Any]) -> Model:
    """The model of a config; a llama's depends on no options and no weights."""
    return author_with(config, "c1t", {}, NO_WEIGHTS)


@pytest.fixture
def checkpoint() -> InMemoryCheckpoint:
    return InMemoryCheckpoint(build_model("llama", attention_bias=True))


def test_load_takes_every_parameter_by_its_canonical_name(checkpoint) -> None:
    block = author(checkpoint.config).layers[1]
    assert all(parameter.is_meta for parameter in block.parameters())
    block.load(checkpoint)
    expected = {
        name.removeprefix("model.layers.1."): tensor
        for name, tensor in checkpoint.tensors.items()
        if ".layers.1." in name
    }
    loaded = dict(block.named_parameters())
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(loaded[name].flatten(), tensor.flatten()), name


def test_kinds_of_weights(checkpoint) -> None:
    model = author(checkpoint.config)
    kinds = {
        weight.name.removeprefix("model.layers.0."): weight.kind
        for block in (model.layers[0], *model.heads(1))
        for _, weight in block.weights()
    }
    attention = [f"self_attn.{part}_proj" for part in "qkvo"]
    expected = {f"{name}.weight": "attention" for name in attention}
    expected |= {f"{name}.bias": None for name in attention}
    expected |= {f"mlp.{name}_proj.weight": "mlp" for name in ("gate", "up", "down")}
    expected |= {f"{name}_layernorm.weight": None for name in ("input", "post_attention")}
    assert kinds == expected | {"model.norm.weight": None, "lm_head.weight": "head"}


@pytest.mark.parametrize(
    ("slices", "bounds"),
    [
        (1, [(0, 288)]),
        (2, [(0, 128), (128, 288)]),
        (5, [(0, 32), (32, 96), (96, 160), (160, 224), (224, 288)]),
        (100, [(288 * i // 100, 288 * (i + 1) // 100) for i in range(100)]),
        (288, [(i, i + 1) for i in range(288)]),
    ],
)
def test_head_slices(checkpoint, slices: int, bounds: list[tuple[int, int]]) -> None:
    heads = author(checkpoint.config).heads(slices)
    assert [(head.start, head.stop) for head in heads] == bounds
    heads[-1].load(checkpoint)
    start, stop = bounds[-1]
    rows = checkpoint.tensors["lm_head.weight"][start:stop]
    assert torch.equal(heads[-1].lm_head.weight[..., 0, 0], rows)


def test_more_slices_than_rows(checkpoint) -> None:
    with pytest.raises(CetaneError, match=r"head.slices = 289: the head has only 288 rows"):
        author(checkpoint.config).heads(289)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", NAMES)
def test_weights_that_are_not_finite(checkpoint, name: str, value: float) -> None:
    checkpoint.tensors[name].view(-1)[-1] = value
    with pytest.raises(CetaneError, match=f"{name} holds NaN or infinity"):
        author(checkpoint.config).layers[1].load(checkpoint)


@pytest.mark.parametrize("value", [65505.0, -1e5])
@pytest.mark.parametrize("name", NAMES)
def test_weights_beyond_fp16(checkpoint, name: str, value: float) -> None:
    checkpoint.tensors[name].view(-1)[0] = value
    with pytest.raises(CetaneError, match=f"{name}: .* beyond fp16") as error:
        author(checkpoint.config).layers[1].load(checkpoint)
    assert "download the checkpoint again" in str(error.value.hint)


def test_the_largest_fp16_value_loads(checkpoint) -> None:
    checkpoint.tensors[QUERY][0, 0] = 65504.0
    block = author(checkpoint.config).layers[1]
    block.load(checkpoint)
    assert block.get_parameter("self_attn.q_proj.weight").max() == 65504.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_number_formats_become_fp32(checkpoint, dtype: torch.dtype) -> None:
    checkpoint.tensors[QUERY] = checkpoint.tensors[QUERY].to(dtype)
    block = author(checkpoint.config).layers[1]
    block.load(checkpoint)
    loaded = block.get_parameter("self_attn.q_proj.weight")[..., 0, 0]
    assert loaded.dtype == torch.float32
    assert torch.equal(loaded, checkpoint.tensors[QUERY].float())


HEAD, NORM, TABLE = "lm_head.weight", "model.norm.weight", "model.embed_tokens.weight"
KEY, DOWN = "model.layers.0.self_attn.k_proj.weight", "model.layers.0.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (GAIN, (63,)),
        (GAIN, (64, 1)),
        (BIAS, (65,)),
        (QUERY, (64, 65)),
        (KEY, (64, 32)),  # transposed: as many values as there should be
        (DOWN, (96, 64)),
        (HEAD, (287, 64)),
        (HEAD, (320, 64)),
        (HEAD, (64, 288)),
        (NORM, (32,)),
        (TABLE, (288, 63)),
    ],
)
def test_wrong_shapes(checkpoint, name: str, shape: tuple[int, ...]) -> None:
    checkpoint.tensors[name] = torch.zeros(shape)
    with pytest.raises(CetaneError, match="a tiny llama: ") as error:
        Planner(checkpoint, RECIPE)
    assert f"{name} has shape {shape}, but the config says" in str(error.value)
    assert "weights and config.json are of one model" in str(error.value.hint)


def test_a_shape_that_differs_from_what_the_headers_say(checkpoint) -> None:
    checkpoint.tensors[QUERY] = torch.zeros(32, 128)
    with pytest.raises(CetaneError, match=rf"{QUERY}: shape \(32, 128\) .* needs \(64, 64\)"):
        author(checkpoint.config).layers[1].load(checkpoint)


@pytest.mark.parametrize("name", [*NAMES, KEY, DOWN, HEAD, NORM, TABLE])
def test_missing_tensors(checkpoint, name: str) -> None:
    del checkpoint.tensors[name]
    with pytest.raises(CetaneError) as error:
        Planner(checkpoint, RECIPE)
    assert error.value.message == f"a tiny llama: no tensor {name}, which the config asks for"


@pytest.mark.parametrize("kind", [None, "rwkv", "", "LLAMA", ["llama"], 7])
def test_unknown_architectures(kind: Any) -> None:
    with pytest.raises(CetaneError, match=r"known: .*/docs/reference/models\.md; how") as error:
        author({"model_type": kind})
    assert repr(kind) in str(error.value)
    assert error.value.hint


def test_a_config_without_a_model_type() -> None:
    with pytest.raises(CetaneError, match=r"config\.json has no model_type"):
        author({"architectures": ["LlamaForCausalLM"]})


def test_the_page_of_limits_is_on_this_machine() -> None:
    """A user of the wheel has no folder `docs`."""
    with pytest.raises(CetaneError, match=r"'frob'.*which is not supported") as error:
        author({"model_type": "llama", "rope_parameters": {"rope_type": "frob"}})
    (page,) = (word for word in str(error.value.hint).split() if word.endswith(".md"))
    assert Path(page).is_absolute() and Path(page).is_file()


@pytest.mark.parametrize(("part", "named"), [("lfm2", True), ("rwkv", False), (["lfm2"], False)])
def test_a_known_text_part_of_an_unknown_architecture(part: Any, named: bool) -> None:
    with pytest.raises(CetaneError, match="unknown architecture 'lfm2_vl'") as error:
        author({"model_type": "lfm2_vl", "text_config": {"model_type": part}})
    assert ("its text part is a known one: lfm2" in error.value.message) == named
    assert ("save the text part alone" in str(error.value.hint)) == named


def test_known_architectures() -> None:
    assert {"llama", "mistral", "qwen2", "qwen3"} <= families().keys()


FULL = ["full_attention"] * 2
SLIDING = ["sliding_attention", "full_attention"]
CHUNKED = ["chunked_attention", "full_attention"]
CONVOLVED = ["conv", "full_attention"]


def until(positions: Any) -> dict[str, Any]:
    """A Ministral 3 whose late queries have a factor."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 1.0}
    rope["original_max_position_embeddings"] = positions
    return {"model_type": "ministral3", "rope_parameters": rope}


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "factor": 2.0,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
}
MSCALE = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0, "mscale_all_dim": "a"}
LFM2 = {"model_type": "lfm2_moe", "layer_types": CONVOLVED} | LFM2_EXPERTS
ERNIE, HUNYUAN = {"model_type": "ernie4_5_moe"}, {"model_type": "hunyuan_v1_moe", "num_experts": 6}
MANY_EXPERTS = {"model_type": "qwen3_moe", "num_experts": 512}
UNBOUND = "sliding_window = None, but some layers slide"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0"),
        ({"num_hidden_layers": -1}, "num_hidden_layers = -1"),
        ({"vocab_size": 0}, "vocab_size = 0"),
        ({"intermediate_size": 0}, "intermediate_size = 0"),
        ({"head_dim": 0}, "head_dim = 0"),
        ({"head_dim": -4}, "head_dim = -4"),
        ({"head_dim": 7}, "head_dim"),
        ({"num_attention_heads": 0}, "num_attention_heads = 0, not from 1"),
        ({"num_key_value_heads": 0}, "num_key_value_heads = 0"),
        ({"num_key_value_heads": 3}, "4 is not a multiple of num_key_value_heads = 3"),
        ({"max_position_embeddings": None}, "max_position_embeddings"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": 63}, "63"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings"),
        ({"rope_parameters": [1]}, "rope_parameters"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "factor"),
        ({"rope_parameters": {"rope_type": "nonsense"}}, "nonsense"),
        ({"hidden_act": "mish"}, "mish"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window = 0"),
        ({"model_type": "qwen2", "layer_types": ["full_attention"]}, "layer_types"),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, "not valid"),
        ({"model_type": "smollm3", "no_rope_layers": [1], "layer_types": FULL}, "has 1 entries"),
        ({"model_type": "qwen2", "layer_types": SLIDING, "sliding_window": None}, UNBOUND),
        ({"model_type": "olmo3", "layer_types": SLIDING, "sliding_window": None}, UNBOUND),
        ({"model_type": "gpt_oss", "layer_types": SLIDING, "sliding_window": None}, UNBOUND),
        ({"model_type": "gemma2", "layer_types": SLIDING, "sliding_window": None}, UNBOUND),
        ({"hidden_size": 2**20, "num_attention_heads": 4, "head_dim": None}, "262144 channels"),
        ({"model_type": "lfm2", "conv_L_cache": 20_000}, "conv_L_cache = 20000, more than"),
        ({"model_type": "lfm2", "layer_types": CONVOLVED, "conv_L_cache": 0}, "conv_L_cache = 0"),
        ({"model_type": "zaya", "cca_time0": 20_000}, "cca_time0 = 20000, more than"),
        ({"model_type": "qwen3_next", "linear_conv_kernel_dim": 20_000}, "20000, more than"),
        (until(None), "original_max_position_embeddings = None"),
        (until("b"), "original_max_position_embeddings = 'b'"),
        (until(float("inf")), "original_max_position_embeddings = inf"),
        (until(0), "original_max_position_embeddings = 0"),
        ({"model_type": "granite", "logits_scaling": 0}, "logits_scaling = 0"),
        ({"model_type": "lfm2", "block_multiple_of": 0}, "division"),
        ({"model_type": "lfm2", "block_ffn_dim_multiplier": 0.0}, "MLP has 0 inner channels"),
        ({"model_type": "granitemoe", "num_local_experts": 0}, "num_local_experts = 0"),
        ({"model_type": "granitemoe", "num_experts_per_tok": 9}, "takes 9 experts of 8"),
        ({"model_type": "granitemoe", "logits_scaling": 0}, "logits_scaling = 0"),
        (
            {"model_type": "granitemoe", "residual_multiplier": None},
            "granitemoe model is not valid",
        ),
        ({"model_type": "granitemoeshared", "shared_intermediate_size": -1}, "= -1, not from 0"),
        (ERNIE | {"use_bias": True}, "use_bias = True, which gives the head biases, which is not"),
        (ERNIE | {"moe_norm_min": 0.1}, "moe_norm_min = 0.1, more than 1e-06, which is not"),
        (ERNIE | {"moe_num_experts": 0}, "num_experts = 0, not from 1"),
        (ERNIE | {"moe_num_experts": 5000}, "moe_num_experts = 5000, more than 4096"),
        (ERNIE | {"moe_k": 65}, "takes 65 experts of 64"),
        (ERNIE | {"moe_layer_interval": 0}, "moe_layer_interval = 0, not from 1"),
        (ERNIE | {"moe_num_shared_experts": -1}, "moe_num_shared_experts = -1, not from 0"),
        (HUNYUAN | {"moe_topk": [2]}, "moe_topk has 1 entries, num_hidden_layers = 2"),
        (HUNYUAN | {"moe_topk": [2, 7]}, "takes 7 experts of 6"),
        (HUNYUAN | {"moe_topk": 0}, "takes 0 experts of 6"),
        (
            {"model_type": "glm4_moe", "n_group": 3, "topk_group": 1},
            "no groups of at least two of 128 experts",
        ),
        ({"model_type": "glm4_moe", "n_shared_experts": -1}, "n_shared_experts = -1, not from 0"),
        ({"model_type": "dots1"}, "dots1 model is not valid"),
        ({"model_type": "qwen2_moe", "num_experts": -1}, "num_experts = -1, not from 0"),
        ({"model_type": "qwen2_moe", "num_experts_per_tok": 61}, "takes 61 experts of 60"),
        ({"model_type": "qwen2_moe", "decoder_sparse_step": 0}, "decoder_sparse_step = 0"),
        (
            {"model_type": "qwen2_moe", "shared_expert_intermediate_size": -1},
            "size = -1, not from 0",
        ),
        ({"model_type": "qwen2_moe", "qkv_bias": "no"}, "qkv_bias"),
        (
            {"model_type": "qwen2_moe", "layer_types": SLIDING, "use_sliding_window": False},
            "sliding_window = 0",
        ),
        (LFM2 | {"num_dense_layers": -1}, "num_dense_layers = -1, not from 0"),
        (LFM2 | {"num_experts": 0}, "num_experts = 0"),
        (LFM2 | {"num_experts_per_tok": 7}, "takes 7 experts of 6"),
        (LFM2 | {"moe_intermediate_size": 0}, "moe_intermediate_size = 0"),
        (LFM2 | {"routed_scaling_factor": 0.0}, "routed_scaling_factor = 0, not above 0"),
        (LFM2 | {"norm_eps": -1e-5}, "norm_eps = -1e-05, not above 0"),
        (LFM2 | {"use_expert_bias": None}, "use_expert_bias"),
        (LFM2 | {"layer_types": None}, "lfm2_moe model is not valid"),
        ({"model_type": "lfm2", "block_ffn_dim_multiplier": 1e308}, "infinity"),
        (
            {"model_type": "deepseek_v2", "num_key_value_heads": 4, "rope_parameters": MSCALE},
            "deepseek_v2 model is not valid",
        ),
        ({"model_type": "deepseek_v2", "num_key_value_heads": 4}, "None experts of 64"),
        ({"model_type": "qwen3_moe", "num_local_experts": None}, "experts of None"),
        (MANY_EXPERTS | {"num_hidden_layers": 65}, "65 layers of 512 experts, more than 32768"),
        (
            {"model_type": "gemma4_text", "rope_parameters": {"full_attention": LONGROPE}},
            "gemma4_text model is not valid",
        ),
        ({"model_type": "qwen2", "layer_types": CHUNKED}, "chunked_attention"),
        ({"model_type": "olmo3", "layer_types": CHUNKED}, "chunked_attention"),
        ({"is_causal": False}, "is_causal = False"),
        ({"is_causal": None}, "is_causal = None"),
        (
            {"model_type": "gemma", "use_bidirectional_attention": True},
            "use_bidirectional_attention = True",
        ),
    ],
    ids=str,
)
def test_invalid_configs(checkpoint, change: dict[str, Any], named: str) -> None:
    with pytest.raises(CetaneError) as error:
        author(checkpoint.config | change)
    assert named in str(error.value)
    assert "\n" not in str(error.value)


def test_a_config_of_many_keys() -> None:
    """transformers takes seconds for 100,000 of them."""
    with pytest.raises(CetaneError, match="keys, more than 4,096"):
        author(build_model("llama").config.to_dict() | {f"k{n}": {} for n in range(5000)})


UNREAD = {
    "num_experts": 0, "sliding_window": -1, "moe_intermediate_size": 0, "clip_qkv": 0.0,
    "logits_scaling": 0, "task_specific_params": {"x": {"factor": 0}},
}  # fmt: skip
"""Keys of other model types."""


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("llama", UNREAD),
        ("olmo2", {"sliding_window": 0}),
        ("gemma3_text", {"attn_logit_softcapping": 0.0}),
        ("gemma3_text", {"layer_types": FULL, "sliding_window": 0}),
        ("deepseek_v2", DEEPSEEK | {"n_shared_experts": 0}),
        ("deepseek_v3", DEEPSEEK | ONE_GROUP | {"n_shared_experts": 0}),
        ("glm4_moe_lite", DEEPSEEK | {"n_shared_experts": 0}),
        ("glm4_moe", MIXTURES["glm4_moe"][1] | {"n_shared_experts": 0}),
        ("ernie4_5_moe", MIXTURES["ernie4_5_moe"][1] | {"moe_num_shared_experts": 0}),
        ("granitemoeshared", {"num_local_experts": 3, "shared_intermediate_size": 0}),
        *(
            (kind, QWEN_NEXT[kind] | {"shared_expert_intermediate_size": 0})
            for kind in ("qwen3_next", "qwen3_5_moe_text")
        ),
        ("qwen2_moe", MIXTURES["qwen2_moe"][1] | {"shared_expert_intermediate_size": 0}),
    ],
    ids=str,
)
def test_numbers_that_have_no_effect(kind: str, change: dict[str, Any]) -> None:
    """transformers runs these configs, and the port is the same model."""
    assert_parity(build_mixture(kind, **change), recipe(kind="single"), {"uneven": FEEDS["uneven"]})


NO_WINDOW = {"layer_types": FULL, "sliding_window": None}
ROPE = {"rope_type": "default", "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("kind", "change", "named"),
    [
        ("ministral3", {"rope_parameters": ROPE}, "llama_4_scaling_beta = None"),
        (
            "ministral3",
            {"rope_parameters": ROPE | {"llama_4_scaling_beta": 0.1}},
            "original_max_position_embeddings = None",
        ),
        ("llama4_text", {"layer_types": SLIDING}, "'sliding_attention'; known: chunked_attention"),
        (
            "llama4_text",
            {"layer_types": CHUNKED, "attention_chunk_size": None},
            "attention_chunk_size = None",
        ),
        ("lfm3", {"layer_types": SLIDING, "sliding_window": None}, "sliding_window = None"),
        ("lfm3", {"layer_types": CHUNKED}, "'chunked_attention'; known: conv"),
        *(
            (kind, {"layer_types": SLIDING}, "'sliding_attention'; known: conv")
            for kind in ("lfm2", "lfm2_moe")
        ),
        *(
            (kind, NO_WINDOW, "sliding_window = None")
            for kind in ("gemma2", "gemma3_text", "gpt_oss", "ministral", "olmo3")
        ),
        ("qwen2_moe", NO_WINDOW | {"use_sliding_window": True}, "sliding_window = None"),
    ],
    ids=str,
)
def test_configs_that_transformers_cannot_run(
    kind: str, change: dict[str, Any], named: str
) -> None:
    few = {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 8}
    model = build_model(kind, **few, **change)
    with pytest.raises((AttributeError, KeyError, TypeError, ValueError)):
        model(torch.tensor([[1, 2, 3]]))
    with pytest.raises(CetaneError) as error:
        author(model.config.to_dict())
    assert named in str(error.value)


def test_a_config_prints_nothing(checkpoint, capfd: pytest.CaptureFixture[str]) -> None:
    """transformers would quote it to the terminal, escape sequences too."""
    with pytest.raises(CetaneError):
        author(checkpoint.config | {"rope_parameters": {"rope_type": "\x1b[31m"}})
    author(checkpoint.config | {"eos_token_id": 10**12})
    assert capfd.readouterr() == ("", "")


def test_a_part_uses_some_of_its_blocks_weights() -> None:
    """Together the router and the experts of a block use all of it; the first norm more than once,
    and the skip nothing but the merge."""
    checkpoint = InMemoryCheckpoint(build_model("zaya", num_experts=2))
    block = author(checkpoint.config).layers[1]
    assert isinstance(block, RoutedBlock)
    block.load(checkpoint)
    parts = [block.router(), *block.experts()]
    paths = [{path for path, _ in part.weights()} for part in parts]
    assert set().union(*paths) == {path for path, _ in block.weights()}
    norm, expert = "post_attention_layernorm.weight", "mlp.experts.1.down_proj.weight"
    assert [norm in found for found in paths] == [True, True, True, False]
    assert [expert in found for found in paths] == [False, False, True, False]
    assert all(path.startswith("residual.") for path in paths[-1])
    assert [part.root for part in parts] == [block] * 4
    for part in parts:
        assert not list(part.parameters())  # they are the block's
        for path, weight in part.weights():
            assert torch.equal(part.root.get_parameter(path), weight.read(checkpoint))


def test_rows_of_stacked_experts() -> None:
    checkpoint = InMemoryCheckpoint(build_model("zaya", num_experts=3))
    block = author(checkpoint.config).layers[1]
    block.load(checkpoint)
    stacked = checkpoint.tensors["model.layers.0.mlp.experts.down_proj"]
    for index in range(3):
        loaded = block.get_parameter(f"mlp.experts.{index}.down_proj.weight")
        assert torch.equal(loaded[..., 0, 0], stacked[index])
    checkpoint.tensors["model.layers.0.mlp.experts.down_proj"] = stacked[:2]
    with pytest.raises(CetaneError, match=r"experts\.down_proj: shape"):
        block.load(checkpoint)


@pytest.mark.parametrize(("start", "stop"), [(0, 5), (0, 9), (3, 7), (5, 9), (6, 7)])
def test_a_table_of_more_rows_than_its_weight(start: int, stop: int) -> None:
    checkpoint = InMemoryCheckpoint(build_model("llama"))
    checkpoint.tensors = {"w": torch.randn(5, 3)}
    wanted = [row if row < 5 else 0 for row in range(start, stop)]
    read = StoredTable("w", factor=2.0, rows=5).read(checkpoint, start, stop)
    assert torch.equal(read, checkpoint.tensors["w"][wanted] * 2)


def test_an_embedding_with_an_affine() -> None:
    tensors = {"w": torch.randn(5, 3), "b": torch.randn(3), "s": torch.randn(3)}
    checkpoint = InMemoryCheckpoint(build_model("llama"))
    checkpoint.tensors = {name: tensor.half() for name, tensor in tensors.items()}
    table = StoredTable("w", "b", "s").read(checkpoint)
    expected = (tensors["w"].half().float() + tensors["b"].half().float()) * (
        tensors["s"].half().float()
    )
    assert table.dtype == torch.float32
    assert torch.equal(table, expected)
    assert torch.equal(StoredTable("w").read(checkpoint), checkpoint.tensors["w"].float())
    checkpoint.tensors["s"][1] = float("nan")
    with pytest.raises(CetaneError, match="w holds NaN"):
        StoredTable("w", "b", "s").read(checkpoint)
