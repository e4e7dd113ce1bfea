"""Experts as DeepSeek has them, behind any attention, and an MLP beside them for all tokens.

DeepSeek-V2 weighs experts by a softmax. The others weigh them by sigmoids. Learnt numbers correct
the choice, which may begin with groups of experts. The source is transformers'
`DeepseekV3TopkRouter`.
"""

from typing import Protocol

from cetane.families.configs import invalid
from cetane.families.experts import (
    ExpertOptions,
    Mixture,
    MixtureBlock,
    SharedExpert,
    mixture_of,
)
from cetane.families.layers import RMSNorm

PLAIN = ("deepseek_v2",)
"""The model types that weigh experts by a softmax, and correct nothing."""


class DeepseekExpertConfig(Protocol):
    """The keys of the config that describe such experts."""

    model_type: str
    hidden_size: int
    hidden_act: str
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    routed_scaling_factor: float
    norm_topk_prob: bool
    n_group: int | None
    topk_group: int | None
    """The last three are not read of a model type in `PLAIN`."""
    num_experts: int
    num_shared_experts: int
    """EXAONE-MoE's names for `n_routed_experts` and `n_shared_experts`."""


def counts(config: DeepseekExpertConfig) -> tuple[int, int]:
    """The number of experts, and of those that all tokens share."""
    if config.model_type == "exaone_moe":
        return config.num_experts, config.num_shared_experts
    return config.n_routed_experts, config.n_shared_experts


class FirstDenseConfig(Protocol):
    """The keys of a config whose first layers have no experts."""

    num_hidden_layers: int
    first_k_dense_replace: int


def first_dense(config: FirstDenseConfig) -> list[bool]:
    """Whether every layer has one MLP for all tokens: the first ones have."""
    return [index < config.first_k_dense_replace for index in range(config.num_hidden_layers)]


def deepseek_mixture(config: DeepseekExpertConfig, options: ExpertOptions) -> Mixture:
    """The experts of layers that have some. CetaneError for groups that cannot be compared."""
    count, inner = counts(config)[0], config.moe_intermediate_size
    factor = config.routed_scaling_factor
    if config.model_type in PLAIN:
        return mixture_of(config, options, count, inner, False, factor)
    groups, opened = expert_groups(config, count)
    return mixture_of(
        config,
        options,
        count,
        inner,
        config.norm_topk_prob,
        factor,
        sigmoid=True,
        groups=groups,
        open_groups=opened,
    )


def deepseek_block(
    config: DeepseekExpertConfig,
    experts: Mixture,
    index: int,
    norm: RMSNorm,
    factor: float,
    bias: bool = False,
) -> MixtureBlock:
    """The experts of a layer. `factor` is that on the output of the MLP for all tokens, and `bias`
    says whether it has biases."""
    inner = experts.inner * counts(config)[1]
    shared = SharedExpert(experts.hidden, inner, experts.act, factor, bias) if inner else None
    return MixtureBlock(
        experts,
        index,
        norm,
        shared=shared,
        shared_name="mlp.shared_experts",
        correction=None if config.model_type in PLAIN else "gate.e_score_correction_bias",
    )


class GroupedConfig(Protocol):
    """The keys of a config whose experts come in groups."""

    model_type: str
    num_experts_per_tok: int
    n_group: int | None
    topk_group: int | None


def expert_groups(config: GroupedConfig, count: int) -> tuple[int, int]:
    """The groups of `count` experts, and the open ones. CetaneError for groups that transformers
    cannot compare."""
    chosen = config.num_experts_per_tok
    groups, opened = config.n_group, config.topk_group
    if not (groups and opened and opened <= groups and count % groups == 0 and count >= 2 * groups):
        raise invalid(
            config.model_type,
            f"n_group = {groups}, topk_group = {opened}: no groups of at least two of {count} "
            "experts",
        )
    if chosen and chosen > opened * count // groups:
        raise invalid(
            config.model_type,
            f"a token takes {chosen} experts of {opened} groups of {count // groups}",
        )
    return groups, opened
