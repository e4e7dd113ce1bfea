"""Experts that a port chooses and its model does not: near ties, the model takes them too."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.conftest import InMemoryCheckpoint, build_model, build_tokenizer
from tests.families.latent_models import LATENT_MODELS
from tests.families.mixture_models import build_mixture, build_oss

from cetane.checkpoint import open_checkpoint
from cetane.gates import metrics
from cetane.gates.experts import Chosen, RouterScores, TakenExperts, far_blocks, is_router
from cetane.gates.golden import Proof
from cetane.gates.ladder import ladder
from cetane.gates.limits import limits
from cetane.gates.observe import ProbeTask, observe
from cetane.gates.port import Packaged, packaged
from cetane.gates.probes import EXPERTS_PROBE, Probe, ProbePart
from cetane.gates.readings import wrong_bounds
from cetane.gates.reference import Reference
from cetane.pipeline.build import build as build_bundle
from cetane.planner import Planner

from .mutations.families import build, flattened, recipe, tokenizer_of
from .mutations.ports import AuthoredPort, RememberedReference, TinyCheckpoint
from .mutations.table import after

ALIKE = 1e-6
"""A factor on logits below which rounding chooses all experts."""
TOKENS = [1, 17, 230, 54, 5, 99, 171, 8]


@pytest.fixture
def never_following(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Lets the model keep its own experts."""
    return lambda: monkeypatch.setattr("cetane.gates.model_results.differ", lambda *_: False)


def worst(port: Any, checkpoint: Any, reference: Reference) -> float:
    """The largest error of a port's twin."""
    proof = Proof(port, checkpoint, reference, port.tables, lambda *_: None)
    return max(one.relative for one in proof.structure()[0])


@pytest.mark.parametrize(
    "family",
    [
        "gpt_oss", "granitemoe", "lfm2_moe", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3",
        "glm4_moe_lite", "qwen3_next", "qwen3_5_moe", "zaya", "dots1", "ernie4_5_moe", "glm4_moe",
        "granitemoehybrid", "granitemoeshared", "hunyuan_v1_moe", "exaone_moe", "mellum",
        "solar_open", "nemotron_h", "flex_olmo", "afmoe", "minimax_m2", "jamba",
        "hy_v3",
    ],
)  # fmt: skip
def test_a_right_port_whose_experts_all_are_ties(
    family: str, never_following: Callable[[], None]
) -> None:
    checkpoint = TinyCheckpoint(flattened(build(family), ALIKE), tokenizer_of())
    port, reference = AuthoredPort(checkpoint, recipe("fp16")), RememberedReference(checkpoint)
    assert worst(port, checkpoint, reference) < limits().structure.relative
    never_following()
    assert worst(port, checkpoint, reference) > limits().structure.relative


@torch.no_grad()
def at_bounds(model: Any, part: float) -> Any:
    """A Phi-MoE whose router gives its second expert `part` of the logit of its first, which is the
    best for about half of the tokens."""
    for router in filter(is_router, model.modules()):
        router.weight[0] *= 3
        router.weight[1] = part * router.weight[0]
    return model


@pytest.mark.parametrize("part", [1 + 2**-23, 0.98])
def test_a_right_port_whose_second_experts_are_ties(
    part: float, never_following: Callable[[], None]
) -> None:
    """With the first ones, or at the bound below which experts are far."""
    checkpoint = TinyCheckpoint(at_bounds(build("phimoe"), part), tokenizer_of())
    port, reference = AuthoredPort(checkpoint, recipe("fp16")), RememberedReference(checkpoint)
    assert worst(port, checkpoint, reference) < limits().structure.relative
    never_following()
    assert worst(port, checkpoint, reference) > limits().structure.relative


@pytest.fixture(scope="module", params=["plain", "routed", "grouped", "far"])
def alike(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Packaged:
    """A package whose experts all are ties: from a graph of all experts, which may choose groups
    first, or from a router whose experts are functions. Or many lie at the bound of far ones, in
    two layers of a shard."""
    kind, config = LATENT_MODELS["deepseek_v3"]
    if request.param == "far":
        model = at_bounds(build("phimoe"), 0.98)
    elif request.param == "grouped":
        model = flattened(build_mixture(kind, **config), ALIKE)
    else:
        model = flattened(build_oss(limit=0.3, num_hidden_layers=2, num_local_experts=3), ALIKE)
    folder = tmp_path_factory.mktemp("alike")
    model.save_pretrained(folder / "model")
    build_tokenizer().save_pretrained(folder / "model")
    checkpoint = open_checkpoint(folder / "model")
    kind = "chunks" if request.param == "far" else "per-layer"
    layout = {"kind": kind, "routed": ["decode"] if request.param == "routed" else []}
    made = recipe("fp16", layout=layout, tokens={"verify": 0, "prefill": 0}, cache={"context": 64})
    bundle = build_bundle(checkpoint, made, folder / "bundle", lambda *_: None)
    return packaged(bundle, Planner(checkpoint, made), checkpoint)


def test_a_package_shows_its_experts(alike: Packaged, never_following: Callable[[], None]) -> None:
    checkpoint = alike.weights
    reference = Reference(checkpoint)
    assert worst(alike, checkpoint, reference) < limits().structure.relative
    layers = {shard.name: alike.packages.shard(shard.name) for shard in alike.plan.shards[:2]}
    assert ladder(checkpoint, alike.planner, layers).passed
    never_following()
    assert worst(alike, checkpoint, reference) > limits().structure.relative


def test_the_bound_of_far_experts_is_read(alike: Packaged) -> None:
    """A bound that is a hundredth off changes hardly any token, and such tokens are near ties."""
    bounds = [bound for own in alike.bounds(alike.plan.shards[0].name).values() for bound in own]
    far = far_blocks(alike.planner.model.layers)
    assert bounds == pytest.approx([0.02] * len(bounds) if far else bounds, abs=1e-5)
    assert bool(far) <= bool(bounds)
    assert [*wrong_bounds(alike, Reference(alike.weights))] == []


def test_fp16_takes_the_experts_of_fp32(alike: Packaged) -> None:
    """Else tokens after a tie read what another expert gave, and a right port is red."""
    planner, taken = alike.planner, TakenExperts.of(alike.planner)
    task = ProbeTask("decode", Probe("text", tuple(TOKENS)), (ProbePart("decode", len(TOKENS)),))
    (exact,) = observe(alike.computing("fp32"), planner, [task], watch=[taken.note])
    (free,) = observe(alike.computing("fp16"), planner, [task])
    (followed,) = observe(alike.computing("fp16", taken), planner, [task])
    assert not any(taken.calls.values())  # every router took its own
    layers = sorted(exact.choices)
    far = exact.choices[layers[0]].far is not None
    pairs = [(exact.choices[layer], free.choices[layer]) for layer in layers]
    assert any(
        (one.far != two.far).any() if far else (one.experts != two.experts).any()
        for one, two in pairs
    )
    least = limits().fp16.logit_cosine
    assert metrics.cosine(exact.logits, free.logits).min() < least
    assert metrics.cosine(exact.logits, followed.logits).min() > least


def test_experts_are_taken_in_their_order() -> None:
    """A Phi-MoE weighs its first expert otherwise than its second."""
    taken = TakenExperts.of(Planner(InMemoryCheckpoint(build("phimoe")), recipe("fp16")))
    name, *_ = taken.blocks
    scores = np.array([[0.0, 3], [1, 1], [2, 2], [-1, 0], [0, 4]], np.float32).reshape(1, 5, 1, 2)
    taken.note(SimpleNamespace(shard="a"), name, scores, 2)  # type: ignore[arg-type]
    ranks = taken.ranks("a", name, torch.zeros(1, 5, 1, 2))
    assert ranks[0, :, 0].T.tolist() == [[0, 1, 2, 0, 0], [1, 0, 0, 0, 2]]


def experts_by_hand(block: Any, rows: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """The sum of some experts `(n, chosen)` of a Qwen3-MoE for rows `(n, C)`."""
    likely = torch.softmax(rows @ block.gate.weight.T, -1).gather(-1, experts)
    likely = likely / likely.sum(-1, keepdim=True)
    total = torch.zeros_like(rows)
    for token, own in enumerate(experts):
        for expert, weight in zip(own, likely[token], strict=True):
            gate, up = (block.experts.gate_up_proj[expert] @ rows[token]).chunk(2)
            inner = torch.nn.functional.silu(gate) * up
            total[token] += weight * (block.experts.down_proj[expert] @ inner)
    return total


@torch.no_grad()
def test_what_the_model_computes_with_other_experts() -> None:
    """By hand, for the experts that are asked for and for its own."""
    model = build_model(
        "qwen3_moe", num_hidden_layers=1, num_experts=6, num_experts_per_tok=3,
        moe_intermediate_size=24, norm_topk_prob=True,
    )  # fmt: skip
    reference = Reference(InMemoryCheckpoint(flattened(model, ALIKE)))
    block, layer = ("model.layers.0.mlp", 0), ("model.layers.0.post_attention_layernorm", 0)
    (own,) = reference.run([TOKENS], [block, layer])
    asked = np.array([[0, 1, 2], [3, 4, 5], [0, 2, 4], [1, 3, 5]])
    numbers = np.array([0, 2, 3, 7])
    (found,) = reference.run([TOKENS], [block, layer], choices=[{0: Chosen(numbers, asked)}])
    followed = own.experts[0].copy()
    followed[numbers] = asked
    assert (followed != own.experts[0]).any()
    for seen, chosen in ((own, own.experts[0]), (found, followed)):
        rows = torch.from_numpy(seen.tensors[layer])
        wanted = experts_by_hand(model.model.layers[0].mlp, rows, torch.from_numpy(chosen))
        np.testing.assert_allclose(seen.tensors[block], wanted, rtol=1e-3, atol=1e-6)
    np.testing.assert_array_equal(found.experts[0], own.experts[0])


@pytest.mark.parametrize("factor", [1.0, 1e-3])
@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss", "lfm2_moe", "llama4", "zaya"])
def test_no_model_follows_beyond_a_tie(family: str, factor: float) -> None:
    """Here every token is asked to take the first experts. Where logits are small, rounding errs by
    less: a port passed that took the least likely experts of a router with nearly equal ones."""
    reference = Reference(TinyCheckpoint(flattened(build(family), factor), tokenizer_of()))
    (own,) = reference.run([TOKENS])
    asked = {
        layer: Chosen(np.arange(len(TOKENS)), np.indices(experts.shape)[1])
        for layer, experts in own.experts.items()
    }
    (found,) = reference.run([TOKENS], choices=[asked])
    assert any((asked[layer][1] != own.experts[layer]).any() for layer in asked)
    np.testing.assert_array_equal(found.logits, own.logits)


@pytest.mark.parametrize("shape", [(), (4,), (1, 3, 1, 4), (1, 5, 1, 0), (1, 5, 1, 1)])
def test_other_shapes_are_no_experts(shape: tuple[int, ...]) -> None:
    """A package that was made by somebody else may show anything."""
    checkpoint = TinyCheckpoint(build("qwen3_moe"), tokenizer_of())
    port = AuthoredPort(checkpoint, recipe("fp16"))

    def show(_: str, __: str, outputs: dict[str, Any]) -> None:
        if "experts_of_0" in outputs:
            outputs["experts_of_0"] = np.zeros(shape, np.float32)

    port.after.append(show)
    assert worst(port, checkpoint, RememberedReference(checkpoint)) < limits().structure.relative


def test_a_wrong_expert_that_a_text_does_not_take() -> None:
    """All experts are in one graph. Random tokens take those that other probes leave out."""
    model = build_mixture(
        "qwen3_moe", num_hidden_layers=2, num_experts=64, num_experts_per_tok=4,
        moe_intermediate_size=16, norm_topk_prob=True,
    )  # fmt: skip
    checkpoint = TinyCheckpoint(model, tokenizer_of())
    port, reference = AuthoredPort(checkpoint, recipe("fp16")), RememberedReference(checkpoint)
    assert worst(port, checkpoint, reference) < limits().structure.relative
    for expert in left_out(port, checkpoint, reference, layer=1):
        after(port.planner.model.layers[-1].groups[expert], lambda made: -made)  # type: ignore[attr-defined]
    assert worst(port, checkpoint, reference) > limits().structure.relative


def left_out(port: AuthoredPort, checkpoint: Any, reference: Reference, layer: int) -> set[int]:
    """The experts that the model takes on no probe but those of random tokens for experts."""
    proof = Proof(port, checkpoint, reference, port.tables, lambda *_: None)  # type: ignore[arg-type]
    others = [probe for probe in proof.probes if not probe.name.startswith(EXPERTS_PROBE)]
    found = reference.run(
        [probe.tokens for probe in others],
        starts=[probe.start for probe in others],
        scales=[probe.scale for probe in others],
    )
    return set(range(64)).difference(*(one.experts[layer].ravel().tolist() for one in found))


@pytest.mark.parametrize("together", [1, 2])
@pytest.mark.parametrize("routed", [False, True])
def test_an_expert_that_no_token_takes(together: int, routed: bool) -> None:
    """A warning says so, by mode and layer, or names its functions."""
    model = build_oss(limit=0.3, num_hidden_layers=2, num_local_experts=4)
    model.model.layers[1].mlp.router.bias.data[3] = -100
    checkpoint = TinyCheckpoint(model, tokenizer_of())
    layout = {"kind": "chunks", "chunks": 2, "routed": ["decode"] if routed else []}
    made = recipe("fp16", layout=layout, family={"together": together})
    port = AuthoredPort(checkpoint, made)
    proof = Proof(port, checkpoint, RememberedReference(checkpoint), port.tables, lambda *_: None)  # type: ignore[arg-type]
    told = [one for one in proof.structure()[2] if "decode" in one]
    if routed and together == 1:
        (one,) = told
        assert one.startswith("no call of a probe ran these functions of experts, 1 in all, so ")
    else:
        assert [one.split("so ")[0] for one in told] == [
            "no token of a probe was seen to choose these experts, 1 in all, "
        ]
        assert told[0].endswith("judged: 1 of layer 1")


@pytest.mark.parametrize("name", ["moonlight", "deepseek_v3"])
@torch.no_grad()
def test_margins_of_a_router_that_is_corrected(name: str) -> None:
    """By hand, token by token: of groups, and of the experts in those that are open. Differences
    are over the steeper sigmoid's slope."""
    kind, config = LATENT_MODELS[name]
    model = build_mixture(kind, **config)
    router, rows = model.model.layers[1].mlp.gate, []
    router.register_forward_hook(lambda _, __, output: rows.append(output[0].double()))
    (seen,) = Reference(InMemoryCheckpoint(model)).run([TOKENS])
    model(torch.tensor([TOKENS]))
    groups, opened = config["n_group"], config["topk_group"]
    wanted = []
    for likely in rows[-1].sigmoid():
        compared = likely + router.e_score_correction_bias.double()
        best = [part.argsort(descending=True)[:2] for part in compared.chunk(groups)]
        slopes = likely * (1 - likely)
        sums, steep = (
            torch.stack([part[two].sum() for part, two in zip(x.chunk(groups), best, strict=True)])
            for x in (compared, slopes)
        )
        order = sums.argsort(descending=True)
        inside = compared.chunk(groups), slopes.chunk(groups)
        both = (torch.cat([parts[number] for number in order[:opened]]) for parts in inside)
        margins = [lead(*both, router.top_k)]
        if opened < groups:
            margins.append(lead(sums, steep, opened))
        wanted.append(min(margins))
    np.testing.assert_allclose(seen.margins[1], wanted, rtol=1e-3, atol=1e-5)


def lead(compared: torch.Tensor, slopes: torch.Tensor, count: int) -> float:
    """How far the last of the `count` largest lies above the next one, over the larger slope."""
    last, next_ = compared.argsort(descending=True)[count - 1 : count + 1]
    return float((compared[last] - compared[next_]) / torch.maximum(slopes[last], slopes[next_]))


@torch.no_grad()
def test_a_step_of_fp32_beside_a_large_correction_is_a_tie() -> None:
    """It is 4e-6 near 40. These sums lie between two steps, so logits that err by 1e-7 move some to
    the other one."""
    kind, config = LATENT_MODELS["moonlight"]
    router = build_mixture(kind, **config).model.layers[1].mlp.gate
    router.e_score_correction_bias.fill_(40)
    logits = 2**-17 + 1e-7 * torch.randn(200, router.num_experts)
    nudged = logits + 1e-7 * torch.randn_like(logits)
    ranked = logits.sigmoid() + router.e_score_correction_bias
    scores = RouterScores.of(router, (logits,), ranked, torch.Size([1, 200]))
    margins = scores.margin(nudged.topk(router.top_k).indices[None])
    assert (margins < 0).any()
    assert (margins >= -scores.tie).all()
