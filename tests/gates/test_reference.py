"""The truth is what transformers' own model computes, with or without room for its weights."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tests.conftest import InMemoryCheckpoint, build_model
from tests.families.gemma_models import build_gemma3n
from tests.families.matrix_models import build_jamba, build_scan
from tests.families.mixture_models import build_lfm2_moe
from tests.families.zaya_models import build_zaya

from cetane.checkpoint import Checkpoint
from cetane.errors import CetaneError
from cetane.gates.reference import (
    Reference,
    forget_reference,
    reference_of,
    would_choose,
)
from cetane.gates.transformers_model import own_tensors

from .conftest import ZAYA

TOKENS = [5, 250, 17, 3, 99, 254, 40]
LONGER = [int(t) for t in np.random.default_rng(3).integers(1, 288, 20)]
"""Goes past the tiny ZAYA's sliding window."""
STREAMED = 0
ROOMY = 1 << 30
LLAMA_LAYERS = [("model.layers.0", 0), ("model.layers.1", 0)]
ZAYA_TENSORS = [
    ("model.layers.0.post_attention_residual_scale", 0),
    ("model.layers.0", 0),
    ("model.layers.0", 1),
    ("model.layers.1", 0),
]


@pytest.fixture(autouse=True)
def lent(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules take their weights from the checkpoint, unless a test is marked otherwise."""
    if "loads_itself" not in request.node.name:
        monkeypatch.setattr("cetane.gates.reference.load_by_transformers", lambda *_: None)


def test_transformers_loads_itself(
    checkpoint: Checkpoint, truth: transformers.PreTrainedModel
) -> None:
    """Where it can: then nothing that our reader gets wrong is in the reference."""
    ours = Reference(checkpoint)
    assert ours.loader == "transformers"
    with reads(checkpoint) as names:
        (seen,) = ours.run([TOKENS])
    assert names == []
    np.testing.assert_allclose(seen.logits, logits(truth, TOKENS), atol=1e-5)
    assert ours.names.keys() >= {"model.embed_tokens", "model.layers.0.self_attn.q_proj"}


def test_gates_share_a_reference(checkpoint: Checkpoint) -> None:
    """Also those that know of adapters and those that do not."""
    shared = reference_of(checkpoint)
    assert reference_of(checkpoint, None) is shared
    assert reference_of(checkpoint, adapter=None) is shared
    forget_reference()
    assert reference_of(checkpoint) is not shared
    forget_reference()


def test_a_reader_that_errs_shows_since_transformers_loads_itself(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(checkpoint), "read", lambda self, name: torch.zeros(self.shape(name)))
    (seen,) = Reference(checkpoint).run([TOKENS])
    assert np.abs(seen.logits).max() > 0.1


def test_positions_and_faint_embeddings(model: Any, in_memory: Callable[..., Any]) -> None:
    """Beside the model itself, which is given positions, and embeddings that are as faint."""
    checkpoint = in_memory(model)
    seen = Reference(checkpoint).run([TOKENS, TOKENS], [], [0, 9], [0.5, 1.0], [[2, 3], [2, 3]])
    with torch.inference_mode():
        places = torch.arange(9, 9 + len(TOKENS))[None]
        later = model(torch.tensor([TOKENS]), position_ids=places, use_cache=False).logits[0]
    assert seen[0].logits.shape == (2, later.shape[1])
    np.testing.assert_allclose(seen[1].logits, later[2:4].numpy(), atol=1e-4)
    assert np.abs(seen[0].logits - seen[1].logits).max() > 1e-3


@pytest.fixture(params=[ROOMY, STREAMED], ids=["resident", "streamed"])
def reference(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Any], Reference]:
    """`reference(checkpoint)`: a reference whose weights stay, and one whose weights do not."""
    monkeypatch.setattr("cetane.gates.reference.RESIDENT", request.param)
    return Reference


@pytest.fixture
def streamed(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Reference]:
    """`streamed(checkpoint)`: a reference whose weights do not stay."""
    monkeypatch.setattr("cetane.gates.reference.RESIDENT", STREAMED)
    return Reference


@pytest.fixture(scope="module")
def zaya_model() -> Any:
    """With both kinds of layers."""
    return build_zaya(**ZAYA | {"layer_types": ["hybrid_sliding", "hybrid"]})


@pytest.fixture(scope="module", params=["llama", "qwen2 tied", "qwen3", "zaya"])
def model(request: pytest.FixtureRequest, tiny_model: Callable[..., Any], zaya_model: Any) -> Any:
    if request.param == "zaya":
        return zaya_model
    family, _, tied = request.param.partition(" ")
    return tiny_model(family, tie_word_embeddings=bool(tied))


@torch.inference_mode()
def logits(model: Any, tokens: list[int]) -> np.ndarray:
    return model(torch.tensor([tokens]), use_cache=False).logits[0].numpy()


@torch.inference_mode()
def outputs(model: Any, tokens: list[int], wanted: list[tuple[str, int]]) -> list[np.ndarray]:
    """The modules' outputs, with hooks of our own."""
    found: dict[str, Any] = {}
    hooks = [
        model.get_submodule(path).register_forward_hook(
            lambda _, __, output, path=path: found.__setitem__(path, output)
        )
        for path, _ in wanted
    ]
    logits(model, tokens)
    for hook in hooks:
        hook.remove()
    return [
        (found[path][index] if isinstance(found[path], tuple) else found[path])[0].numpy()
        for path, index in wanted
    ]


def holding(reference: Reference) -> list[str]:
    """Paths of the modules that hold weights."""
    return [
        path
        for path, module in reference.model.named_modules()
        if any(tensor.numel() for tensor in own_tensors(module).values())
    ]


@contextmanager
def reads(checkpoint: Any, before: Callable[[], None] = lambda: None) -> Iterator[list[str]]:
    """The names of the tensors that are read."""
    names: list[str] = []
    read = checkpoint.read

    def spy(name: str) -> torch.Tensor:
        before()
        names.append(name)
        return read(name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "read", spy)
        yield names


def test_logits(
    reference: Callable[[Any], Reference], model: Any, in_memory: Callable[..., Any]
) -> None:
    """Of every architecture, also when the weights come a second time."""
    ours = reference(in_memory(model))
    for tokens in (TOKENS, LONGER):
        (found,) = ours.run([tokens])
        np.testing.assert_allclose(found.logits, logits(model, tokens), atol=1e-5)
        assert found.tensors == {}


def test_of_a_folder(
    reference: Callable[[Any], Reference],
    checkpoint: Checkpoint,
    truth: transformers.PreTrainedModel,
) -> None:
    """As transformers loads it."""
    (found,) = reference(checkpoint).run([TOKENS], LLAMA_LAYERS)
    np.testing.assert_allclose(found.logits, logits(truth, TOKENS), atol=1e-5)
    with torch.inference_mode():
        states = truth(torch.tensor([TOKENS]), output_hidden_states=True).hidden_states
        normed = truth.model.norm(torch.tensor(found.tensors[LLAMA_LAYERS[1]])).numpy()
    np.testing.assert_allclose(found.tensors[LLAMA_LAYERS[0]], states[1][0], atol=1e-5)
    np.testing.assert_allclose(normed, states[2][0], atol=1e-5)


def test_tensors_of_a_zaya(
    reference: Callable[[Any], Reference], zaya_model: Any, in_memory: Callable[..., Any]
) -> None:
    """Any output of any module: the router's state is a layer's second one."""
    ours = reference(in_memory(zaya_model))
    (found,) = ours.run([LONGER], ZAYA_TENSORS)
    alone = ours.tensors(LONGER, ZAYA_TENSORS)
    assert found.tensors.keys() == alone.keys() == set(ZAYA_TENSORS)
    for at, expected in zip(ZAYA_TENSORS, outputs(zaya_model, LONGER, ZAYA_TENSORS), strict=True):
        np.testing.assert_allclose(found.tensors[at], expected, atol=1e-5)
        np.testing.assert_allclose(alone[at], expected, atol=1e-5)


def test_stored_buffers_are_the_checkpoints(
    reference: Callable[[Any], Reference], zaya_model: Any, in_memory: Callable[..., Any]
) -> None:
    """The balancing biases are a buffer, and another choice of experts is another model."""
    checkpoint = in_memory(zaya_model)
    name = "model.layers.1.mlp.gate.balancing_biases"
    assert name in checkpoint
    logits = []
    for biases in ([2.0, 0.0, 0.0], [0.0, 2.0, 0.0]):
        checkpoint.tensors[name] = torch.tensor(biases)
        logits.append(reference(checkpoint).run([LONGER])[0].logits)
    assert np.abs(logits[0] - logits[1]).max() > 1e-2


def test_side_by_side(
    reference: Callable[[Any], Reference], model: Any, in_memory: Callable[..., Any]
) -> None:
    """Sequences of several lengths are what they are alone."""
    ours = reference(in_memory(model))
    wanted = [("model.layers.0", 0), ("model.layers.1", 0)]
    sequences = [TOKENS, LONGER, LONGER[:1], TOKENS[::-1]]
    for tokens, found in zip(sequences, ours.run(sequences, wanted), strict=True):
        (alone,) = ours.run([tokens], wanted)
        assert found.logits.shape == (len(tokens), 288)
        np.testing.assert_allclose(found.logits, alone.logits, atol=1e-5)
        for at in wanted:
            assert len(found.tensors[at]) == len(tokens)
            np.testing.assert_allclose(found.tensors[at], alone.tensors[at], atol=1e-5)


def test_weights_come_and_go(
    streamed: Callable[[Any], Reference], model: Any, in_memory: Callable[..., Any]
) -> None:
    """None is left after a pass; during one, a module's and its parents' own are there."""
    checkpoint = in_memory(model)
    ours = streamed(checkpoint)
    ours.run([TOKENS])
    assert holding(ours) == []
    most: list[int] = []
    with reads(checkpoint, lambda: most.append(len(holding(ours)))) as names:
        ours.run([TOKENS])
    assert holding(ours) == []
    assert set(names) == set(checkpoint.tensors)
    assert max(most) <= 3 < len(list(ours.model.named_modules()))


@pytest.mark.parametrize("build", [build_gemma3n, partial(build_scan, "mamba"), build_jamba])
@pytest.mark.parametrize("room", [0, 1 << 40])
def test_a_module_of_which_only_methods_are_called(
    room: int,
    build: Callable[[], Any],
    in_memory: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Gemma 3n's AltUp has parameters, and no layer calls it as a whole. Nor does Mamba call the
    projection of its steps."""
    monkeypatch.setattr("cetane.gates.reference.RESIDENT", room)
    own = build()
    tokens = [5, 17, 80, 41]
    with torch.no_grad():
        wanted = own(torch.tensor([tokens]), use_cache=False).logits[0].numpy()
    (seen,) = Reference(in_memory(own)).run([tokens])
    np.testing.assert_allclose(seen.logits, wanted, rtol=1e-5, atol=1e-6)


def test_weights_stay_where_there_is_room(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = Reference(checkpoint)
    with reads(checkpoint) as names:
        ours.run([TOKENS])
        once = sorted(names)
        ours.run([LONGER])
    assert sorted(names) == once == checkpoint.names()


def test_a_pass_ends_with_the_last_tensor(
    reference: Callable[[Any], Reference], checkpoint: Checkpoint
) -> None:
    """Later layers are not read; and nothing is wrong afterwards."""
    ours = reference(checkpoint)
    with reads(checkpoint) as names:
        found = ours.tensors(TOKENS, LLAMA_LAYERS[:1])
    assert any(name.startswith("model.layers.0.") for name in names)
    assert not [n for n in names if n.startswith(("model.layers.1.", "model.norm", "lm_head"))]
    (whole,) = ours.run([TOKENS], LLAMA_LAYERS)
    np.testing.assert_array_equal(found[LLAMA_LAYERS[0]], whole.tensors[LLAMA_LAYERS[0]])


def test_a_pass_that_ended_early_leaves_little(
    streamed: Callable[[Any], Reference], zaya_model: Any, in_memory: Callable[..., Any]
) -> None:
    """At most what belongs to the parents of the last module."""
    ours = streamed(in_memory(zaya_model))
    ours.run([TOKENS])
    ours.tensors(TOKENS, [("model.layers.0.post_attention_residual_scale", 0)])
    assert set(holding(ours)) <= {"model"}
    (found,) = ours.run([TOKENS])
    np.testing.assert_allclose(found.logits, logits(zaya_model, TOKENS), atol=1e-5)


def test_head(
    reference: Callable[[Any], Reference], model: Any, in_memory: Callable[..., Any]
) -> None:
    hidden = np.random.default_rng(4).normal(size=(5, model.config.hidden_size)).astype(np.float32)
    with torch.inference_mode():
        expected = model.lm_head(model.model.norm(torch.tensor(hidden))).numpy()
    checkpoint = in_memory(model)
    with reads(checkpoint) as names:
        found = reference(checkpoint).head(hidden, "model.norm")
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert len(names) == 2


@pytest.mark.parametrize(
    ("kind", "norm", "config"),
    [
        ("cohere", "model.norm", {"logit_scale": 5.0}),
        ("granite", "model.norm", {"logits_scaling": 5.0}),
        ("falcon_h1", "model.final_layernorm", {"lm_head_multiplier": 0.5}),
        ("gemma2", "model.norm", {"final_logit_softcapping": 0.5, "head_dim": 16}),
        ("lfm2", "model.embedding_norm", {"layer_types": ["conv", "full_attention"]}),
    ],
)
def test_heads_that_scale_or_bound_logits(
    kind: str, norm: str, config: dict[str, Any], in_memory: Callable[..., Any]
) -> None:
    """What enters the final norm gives the model's own logits."""
    model = build_model(kind, **config)
    seen: list[torch.Tensor] = []
    model.get_submodule(norm).register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    with torch.inference_mode():
        expected = model(torch.tensor([TOKENS]), use_cache=False).logits[0].numpy()
    ours = Reference(in_memory(model)).head(seen[0][0].numpy(), norm)
    np.testing.assert_allclose(ours, expected, atol=1e-5)


def resident_memory() -> int:
    """Bytes that this process has in memory."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="Linux tells")
def test_a_large_model_takes_no_memory_before_it_runs(
    tiny_model: Callable[..., Any], in_memory: Callable[..., Any]
) -> None:
    checkpoint = in_memory(tiny_model(num_hidden_layers=1))
    checkpoint.config["vocab_size"] = 1 << 20  # 256 MB, twice
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        checkpoint.tensors[name] = torch.empty((1 << 20, 64), device="meta")
    before = resident_memory()
    ours = Reference(checkpoint)
    assert ours.model.lm_head.weight.shape == (1 << 20, 64)
    assert resident_memory() - before < 64 << 20


def test_choices_of_a_greedy_answer(
    checkpoint: Checkpoint, truth: transformers.PreTrainedModel
) -> None:
    generated = truth.generate(
        torch.tensor([TOKENS]), do_sample=False, max_new_tokens=8, eos_token_id=None
    )[0, len(TOKENS) :].tolist()
    reference = Reference(checkpoint)
    logits = reference.run([[*TOKENS, *generated]])[0].logits
    assert would_choose(logits, TOKENS, generated).tolist() == [True] * 8
    generated[5] = (generated[5] + 1) % 288
    assert would_choose(logits, TOKENS, generated).tolist()[:6] == [True] * 5 + [False]


def test_would_choose() -> None:
    """Of the last token of the prompt and all but the last of what was generated."""
    rows = np.eye(5)[[4, 1, 2, 3, 0]]
    assert would_choose(rows, [0, 0], [1, 2, 3]).tolist() == [True, True, True]
    assert would_choose(rows, [0, 0], [1, 4, 3]).tolist() == [True, False, True]
    assert would_choose(rows, [0, 0, 0, 0, 0], []).tolist() == []


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.mlp.up_proj.weight"])
def test_a_checkpoint_that_does_not_fit(
    tiny_model: Callable[..., Any], in_memory: Callable[..., Any], name: str
) -> None:
    checkpoint = in_memory(tiny_model(num_hidden_layers=1))
    checkpoint.tensors[name] = torch.zeros(63)
    with pytest.raises(CetaneError, match=rf"{name}: shape \(63,\) does not fit the config"):
        Reference(checkpoint)


def test_a_buffer_that_does_not_fit(zaya_model: Any, in_memory: Callable[..., Any]) -> None:
    checkpoint = in_memory(zaya_model)
    checkpoint.tensors["model.layers.0.mlp.gate.balancing_biases"] = torch.zeros(7)
    with pytest.raises(CetaneError, match=r"balancing_biases: shape \(7,\)"):
        Reference(checkpoint)


ROUTED: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
    "deepseek_v2": {
        "num_key_value_heads": 4, "kv_lora_rank": 20, "q_lora_rank": None, "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8, "v_head_dim": 10, "first_k_dense_replace": 1, "n_routed_experts": 5,
        "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 14,
    },
    "llama4_text": {
        "num_local_experts": 4, "num_experts_per_tok": 1, "moe_layers": [1], "head_dim": 16,
        "intermediate_size_mlp": 28, "pad_token_id": None,
    },
    "lfm2_moe": {
        "layer_types": ["conv", "full_attention"], "num_dense_layers": 1, "num_experts": 6,
        "num_experts_per_tok": 3, "moe_intermediate_size": 24,
    },
}  # fmt: skip


@pytest.mark.parametrize("model_type", ROUTED)
def test_margins_of_routers(model_type: str) -> None:
    """Of the probabilities that a router's own matrix gives, sorted by hand. Where sigmoids with
    biases are compared, their difference over the steeper one's slope."""
    build = build_lfm2_moe if model_type == "lfm2_moe" else partial(build_model, model_type)
    model = build(**ROUTED[model_type])
    model.config._experts_implementation = "eager"  # the plainest arithmetic
    wanted: dict[int, np.ndarray] = {}
    for number, layer in enumerate(model.model.layers):
        block = getattr(layer, "feed_forward", None) or layer.mlp
        router = getattr(block, "router", None) or getattr(block, "gate", None)
        if router is None:
            continue

        def note(module: Any, args: Any, _: Any, number: int = number) -> None:
            logits = torch.nn.functional.linear(args[0].flatten(0, -2), module.weight)
            likely, slopes = logits.double().softmax(-1), logits.double().softmax(-1)
            if model_type == "lfm2_moe":
                weights = logits.double().sigmoid()
                likely, slopes = weights + args[1], weights * (1 - weights)
            best = likely.sort(-1, descending=True)
            steep = slopes.gather(-1, best.indices)
            last, next_ = (slice(None), module.top_k - 1), (slice(None), module.top_k)
            difference = best.values[last] - best.values[next_]
            wanted[number] = (difference / torch.maximum(steep[last], steep[next_])).numpy()

        router.register_forward_hook(note)
    (seen,) = Reference(InMemoryCheckpoint(model)).run([TOKENS])
    with torch.inference_mode():
        model(torch.tensor([TOKENS]))
    assert seen.margins.keys() == wanted.keys() != set()
    for number, margins in wanted.items():
        np.testing.assert_allclose(seen.margins[number], margins, rtol=1e-3, atol=1e-6)


def test_a_config_that_transformers_cannot_run(in_memory: Callable[..., Any]) -> None:
    """It reads this one, and its model then ends in an error."""
    rope = {"rope_type": "default", "rope_theta": 1e4}
    checkpoint = in_memory(build_model("ministral3", rope_parameters=rope))
    reference = Reference(checkpoint)
    cannot = "transformers cannot run the config of a tiny ministral3: TypeError"
    with pytest.raises(CetaneError, match=cannot):
        reference.run([TOKENS])
    with pytest.raises(CetaneError, match=cannot):
        reference.tensors(TOKENS, [("model.layers.1", 0)])
