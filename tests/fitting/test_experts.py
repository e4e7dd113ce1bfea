"""Experts that are rounded by the tokens that chose them, in every family that has some."""

from typing import Any

import numpy as np
import pytest
import torch
from tests.conftest import InMemoryCheckpoint, build_model
from tests.families.latent_models import DEEPSEEK, ONE_GROUP
from tests.families.matrix_models import NEMOTRONS, QWEN_NEXT
from tests.families.mixture_models import DEEPSEEK_EXPERTS, LFM2_EXPERTS, LLAMA4, OSS
from torch import Tensor

from cetane.compress import parse_format, second_order
from cetane.families import Weight
from cetane.files import silent
from cetane.fitting.bfloat16 import bfloat16_products
from cetane.fitting.experts import (
    FAINT,
    ExpertCollector,
    ExpertProducts,
    RoutedExperts,
    modules_of_experts,
    with_others,
)
from cetane.fitting.fit import fitted_formats, fitted_parts
from cetane.fitting.importance import importance, loss_of
from cetane.fitting.rounding import Rounder
from cetane.gates.resemblance import arrays, too_far
from cetane.gates.transformers_model import stored_names
from cetane.planner import Planner
from cetane.schema.recipe import parse_recipe

WIDE = {"moe_intermediate_size": 24}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "granitemoe": ("granitemoe", {"num_local_experts": 3}),
    "ernie4_5_moe": ("ernie4_5_moe", {"moe_num_experts": 4, "moe_k": 2} | WIDE),
    "glm4_moe": ("glm4_moe", DEEPSEEK_EXPERTS | WIDE),
    "granitemoeshared": (
        "granitemoeshared",
        {"num_local_experts": 3, "shared_intermediate_size": 24},
    ),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", {"num_experts": 4, "moe_topk": 2}),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "olmoe": ("olmoe", {"num_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 24}),
    "qwen2_moe": ("qwen2_moe", {"num_experts": 5, "num_experts_per_tok": 2} | WIDE),
    "qwen3_moe": ("qwen3_moe", {"num_experts": 7, "num_experts_per_tok": 3} | WIDE),
    "gpt_oss": ("gpt_oss", OSS | {"swiglu_limit": 0.5, "intermediate_size": 24}),
    "llama4": ("llama4_text", LLAMA4 | {"intermediate_size": 24, "num_experts_per_tok": 2}),
    "deepseek_v2": ("deepseek_v2", DEEPSEEK | WIDE),
    "deepseek_v3": ("deepseek_v3", DEEPSEEK | ONE_GROUP | WIDE),
    "nemotron_h": ("nemotron_h", NEMOTRONS["mixture"] | WIDE),
    "lfm2_moe": ("lfm2_moe", LFM2_EXPERTS | WIDE | {"layer_types": ["conv", "full_attention"]}),
    "qwen3_next": ("qwen3_next", QWEN_NEXT["qwen3_next"] | WIDE),
    "qwen3_5_moe": ("qwen3_5_moe_text", QWEN_NEXT["qwen3_5_moe_text"] | WIDE),
    "zaya": ("zaya", {"num_experts": 4, "moe_intermediate_size": 24, "router_hidden_size": 16}),
}
FORM = parse_format("palette2-kmeans-group8")
STACKED = "experts.gate_up_proj", "experts.up_proj", "experts.down_proj"
GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"


class Case:
    """A random model, and the weights of its experts."""

    def __init__(self, name: str, together: int = 1) -> None:
        kind, config = MODELS[name]
        self.model = build_model(kind, **config).requires_grad_(False)
        self.model.config._experts_implementation = "eager"
        self.before = {n: t.clone() for n, t in self.model.state_dict().items()}
        family = {} if name == "zaya" else {"together": together}
        recipe = parse_recipe(
            {
                "name": "experts", "cache": {"context": 32}, "family": family,
                "tokens": {"verify": 0, "prefill": 0}, "layout": {"kind": "single"},
                "compression": {"types": {"experts": FORM.name}},
            },
            "recipe",
        )  # fmt: skip
        planner = Planner(InMemoryCheckpoint(self.model), recipe)
        self.formats = fitted_formats(planner)
        self.experts = fitted_parts(planner, self.formats)
        assert all(weight.of_experts for weight in self.experts.values())

    def rounder(self, method: Any = "gptq") -> Rounder:
        return Rounder(self.formats, method, silent, parts=self.experts.values())

    def run(self, rounder: Rounder, tokens: Tensor) -> None:
        rounder.run(self.model, {}, tokens, stored_names(self.model, self.model.config))

    def read(self, weight: Weight, tensors: dict[str, Tensor]) -> np.ndarray:
        part = tensors[weight.name][slice(*weight.rows)]  # type: ignore[misc]
        return (weight.pick(part) if weight.pick else part[0]).numpy()


def words(seed: int = 0, count: int = 8) -> Tensor:
    return torch.randint(0, 288, (count, 24), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("name", "together"), [(n, t) for n in MODELS for t in (1, 2)])
def test_the_model_computes_with_its_constants(name: str, together: int) -> None:
    """Every matrix of every expert is rounded, and lies where the family reads it."""
    case = Case(name, together)
    rounder = case.rounder()
    case.run(rounder, words())
    stacks = [n for n in case.before if n.endswith(STACKED)]
    elements = sum(case.before[n].numel() for n in stacks)
    assert sum(w.elements for w in case.experts.values()) == elements > 0
    assert rounder.constants.keys() == case.experts.keys()
    after = dict(case.model.state_dict())
    for key, weight in case.experts.items():
        decoded = rounder.constants[key].decode().astype(np.float32)
        np.testing.assert_array_equal(case.read(weight, after), decoded)
        assert too_far(arrays(rounder.constants[key]), case.read(weight, case.before), FORM) is None
    others = {n for n in after if not torch.equal(after[n], case.before[n])}
    assert others == set(stacks), "and nothing else changes"


def seen_by(module: Any, model: Any, tokens: Tensor) -> tuple[Tensor, ...]:
    """What a module is given when the model runs as it is."""
    seen: list[tuple[Tensor, ...]] = []
    hook = module.register_forward_pre_hook(lambda _, given: seen.append(given))
    with torch.no_grad(), bfloat16_products(model):
        model(tokens)
    hook.remove()
    return seen[0]


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def test_products_by_hand() -> None:
    """Mixtral: an expert's tokens count by the squares of their weights, at its first and at its
    last product."""
    case, tokens = Case("mixtral"), words(1, 80)
    module = case.model.model.layers[0].mlp.experts
    states, chosen, weights = (t.numpy() for t in seen_by(module, case.model, tokens))
    rounder = case.rounder()
    case.run(rounder, tokens)
    shares = np.where(chosen == 1, weights, 0).sum(1)
    inputs, shares = states[shares > 0], shares[shares > 0, None]
    both = case.before[f"model.layers.0.{GATE_UP}"][1].numpy()
    made = {}
    for part, matrix in (("gate_proj", both[:96]), ("up_proj", both[96:])):
        constants = rounder.constants[f"model.layers.0.{GATE_UP}[1:2].{part}"]
        made[part] = constants.decode().astype(np.float32)
        assert_by_products_of(inputs * shares, matrix, made[part])
    inner = silu(inputs @ made["gate_proj"].T) * (inputs @ made["up_proj"].T) * shares
    down = rounder.constants[f"model.layers.0.{DOWN}[1:2].down_proj"].decode()
    assert_by_products_of(inner, case.before[f"model.layers.0.{DOWN}"][1].numpy(), down)


def assert_by_products_of(rows: np.ndarray, matrix: np.ndarray, made: np.ndarray) -> None:
    """The constants cost as little as those that are rounded by these inputs. They are not the
    same: the pass computes in bfloat16 where it can."""
    wanted = second_order.encode(matrix, FORM, rows.T @ rows / len(rows)).decode()
    plain = FORM.encode(matrix).decode()
    costs = [np.square(rows @ (one - matrix).T).mean() for one in (made, wanted, plain)]
    assert costs[0] < 1.03 * costs[1] < 0.9 * costs[2], costs


def structured(module: Any, draw: np.random.Generator, count: int = 600) -> list[Tensor]:
    """What transformers calls a module of experts with, whose states have few large directions."""
    hidden, experts = 64, len(module.down_proj)
    sizes = 1 / np.arange(1, hidden + 1)
    turn = np.linalg.qr(np.random.default_rng(7).normal(size=(hidden, hidden)))[0]
    states = torch.from_numpy((draw.normal(size=(count, hidden)) * sizes) @ turn * 8).float()
    if not hasattr(module, "is_transposed"):
        taken = torch.from_numpy(draw.integers(0, experts, count))
        scores = torch.zeros(experts, count)
        scores[taken, torch.arange(count)] = torch.from_numpy(draw.uniform(0.3, 0.9, count)).float()
        return [(states * scores[..., None]).flatten(0, 1)]
    chosen = torch.from_numpy(np.stack([draw.permutation(experts)[:2] for _ in range(count)]))
    weights = torch.from_numpy(draw.dirichlet([2, 2], count)).float()
    return [states, chosen, weights]


@pytest.mark.parametrize("name", MODELS)
def test_outputs_err_less_than_with_plain_rounding(name: str) -> None:
    """On tokens that were not read, whose states have few large directions."""
    case, draw = Case(name), np.random.default_rng(0)
    whole = stored_names(case.model, case.model.config)
    module, names = next(modules_of_experts(case.model, whole))
    given, others = structured(module, draw), structured(module, draw)
    truth = module(*others).clone()
    case.rounder().round_experts(names, module, tuple(given))
    error = float((module(*others) - truth).square().mean())
    for part, stored in names.items():
        getattr(module, part).data = case.before[stored].clone()
    for weight in case.experts.values():
        if weight.name in names.values():
            tensor = getattr(module, weight.name.rpartition(".")[2]).data[slice(*weight.rows)]  # type: ignore[misc]
            view = weight.pick(tensor) if weight.pick else tensor[0]
            plain = FORM.encode(view.contiguous().numpy()).decode()
            view.copy_(torch.from_numpy(plain.astype(np.float32)))
    assert error < 0.4 * float((module(*others) - truth).square().mean())


def test_an_expert_that_no_token_chose() -> None:
    """It is rounded by what the others read."""
    case, draw = Case("mixtral"), np.random.default_rng(0)
    module = case.model.model.layers[0].mlp.experts
    states, chosen, weights = structured(module, draw)
    chosen = torch.where(chosen == 3, 0, chosen)
    names = {part: f"model.layers.0.mlp.experts.{part}" for part in ("gate_up_proj", "down_proj")}
    rounder = case.rounder()
    rounder.round_experts(names, module, (states, chosen, weights))
    key = f"model.layers.0.{GATE_UP}[3:4].gate_proj"
    made, own = rounder.constants[key].decode(), case.before[names["gate_up_proj"]][3, :96].numpy()
    plain = FORM.encode(own).decode()
    wrong = [np.square(states.numpy() @ (one - own).T).mean() for one in (made, plain)]
    assert wrong[0] < 0.8 * wrong[1]


def test_few_tokens_are_joined_by_others() -> None:
    shares = torch.zeros(100, 3)
    shares[:50, 0], shares[7, 1] = 0.5, 0.25
    made = with_others(shares, 20)
    assert torch.equal(made[:, 0], shares[:, 0]), "enough tokens chose it"
    for expert, mean in ((1, 0.25), (2, 1.0)):
        assert (made[:, expert] > 0).sum() == 20
        added = made[:, expert] != shares[:, expert]
        assert torch.allclose(made[added, expert], torch.tensor(FAINT * mean))
        assert added.nonzero().max() > 90 and added.nonzero().min() < 10, "evenly spaced"
    assert made[7, 1] == 0.25
    assert (with_others(shares, 1000) > 0).all(), "there are no more"


def experts_of(case: Case) -> tuple[Any, dict[str, str]]:
    """The last module of experts of a model, and the names of its tensors."""
    found = modules_of_experts(case.model, stored_names(case.model, case.model.config))
    module, names = list(found)[-1]
    return module, dict(names)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_inside_experts_are_those_of_the_loss(name: str) -> None:
    """With two tokens only the first has a loss. So the gradient of an expert's matrix is the
    product of one token's input and one gradient inside: its norm is the product of theirs."""
    case, tokens = Case(name), words(3, 1)[:, :2]
    module, names = experts_of(case)
    collector = ExpertCollector(names, module)
    made = importance(case.model, [collector], tokens, silent)
    seen: list[tuple[Tensor, ...]] = []
    hook = module.register_forward_pre_hook(lambda _, given: seen.append(given))
    first, last = names
    parameter = getattr(module, first).requires_grad_(True)
    loss_of(case.model, tokens).backward()
    hook.remove()
    count, inputs = len(module.down_proj), seen[0][0].detach()
    inputs = inputs.unflatten(0, (count, -1))[:, 0] if len(seen[0]) == 1 else inputs[:1]
    assert parameter.grad is not None
    squares = parameter.grad.square().sum((1, 2)) / inputs.square().sum(1).clamp(min=1e-30)
    inside = float(squares.sum())
    assert collector.inside == pytest.approx(inside, rel=0.05) and inside > 0
    assert set(made) == set(names.values())
    assert made[names[last]].outputs is not None


def test_tokens_count_as_their_importance_says() -> None:
    case, draw = Case("mixtral"), np.random.default_rng(0)
    module, _ = experts_of(case)
    states, chosen, weights = (t.numpy() for t in structured(module, draw, 2000))
    counts = draw.uniform(0, 2, 2000).astype(np.float32)
    given = [torch.from_numpy(t) for t in (states, chosen, weights)]
    made = ExpertProducts(RoutedExperts(module, given), torch.from_numpy(counts)).inputs(2)
    shares = np.where(chosen == 2, weights, 0).sum(1)
    rows = states * shares[:, None]
    wanted = (rows * counts[:, None]).T @ rows / len(rows)
    np.testing.assert_allclose(made, wanted, rtol=1e-3, atol=1e-4)
