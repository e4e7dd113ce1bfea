"""The architectures of GGUF files: their names, and what the converter changed, as data.

Source: llama.cpp's conversion scripts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from cetane.checkpoint.gguf import (
    layouts,
    mixture_names,
    names,
    recurrent_layouts,
    recurrent_names,
)
from cetane.checkpoint.gguf.keys import Keys
from cetane.checkpoint.gguf.names import Config, Names
from cetane.checkpoint.gguf.pieces import LayerNumber
from cetane.checkpoint.gguf.rules import TensorRule


@dataclass(frozen=True)
class Architecture:
    """One value of `general.architecture`."""

    model_type: str  # Hugging Face's
    model_class: str
    layer: Names | Callable[[Config, int], Names]
    """The names of a layer; a function where layers differ."""
    rules: tuple[TensorRule, ...] = ()
    """How to make the tensors that the file keeps in another form, or in several pieces."""
    top: Names = field(default_factory=lambda: names.TOP)
    """The names of what is in no layer."""
    biased: tuple[str, ...] = names.BIASED
    """The endings of the modules that may have biases."""
    layers: str = "model.layers"
    """The path of Hugging Face's layers."""
    numbers: tuple[LayerNumber, ...] = ()
    """What the metadata has for each layer, and Hugging Face as tensors."""
    stacks: tuple[str, ...] = ()
    """The tensors that hold several of Hugging Face's."""

    def tensor_names(self, config: Config) -> tuple[Names, Names]:
        """Hugging Face's names by GGUF's: of all weights, and of biases that there may be."""
        weights = dict(self.top)
        if config.get("hidden_size_per_layer_input"):
            weights |= names.PER_LAYER
        for index in range(config["num_hidden_layers"]):
            own = self.layer if isinstance(self.layer, dict) else self.layer(config, index)
            weights |= {
                f"blk.{index}.{theirs}": f"{self.layers}.{index}.{ours}"
                for theirs, ours in own.items()
            }
        biases = {
            f"{theirs.removesuffix('.weight')}.bias": f"{module}.bias"
            for theirs, ours in weights.items()
            if (module := ours.removesuffix(".weight")).endswith(self.biased)
        }
        return weights, biases

    def unused(self, config: Config) -> set[str]:
        """Tensors that a file may hold although no layer reads them: keys and values of layers
        that take those of earlier ones."""
        layers = range(config["num_hidden_layers"])
        return {
            f"blk.{index}.{name}"
            for index in layers
            if names.shares_keys(config, index)
            for name in names.KEYS_AND_VALUES
        }


NEMOTRON_H = Architecture(
    "nemotron_h",
    "NemotronHForCausalLM",
    recurrent_names.nemotron_h,
    (*recurrent_layouts.MAMBA_2, *layouts.INTERLEAVED, *layouts.UNGATED_EXPERTS),
    recurrent_names.NEMOTRON_TOP,
    ("conv1d",),
)
ARCHITECTURES = {
    # Mistral is "llama" to llama.cpp; its modules and its config are the same.
    "llama": Architecture("llama", "LlamaForCausalLM", names.LLAMA, layouts.INTERLEAVED),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", names.LLAMA),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", names.LLAMA | names.QK_NORMS),
    "granite": Architecture("granite", "GraniteForCausalLM", names.LLAMA, layouts.INTERLEAVED),
    "granitemoe": Architecture(
        "granitemoe",
        "GraniteMoeForCausalLM",
        mixture_names.granite_mixture,
        (*layouts.INTERLEAVED, *layouts.EXPERTS, *layouts.SHARED_MLPS),
    ),
    "granitehybrid": Architecture(
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        recurrent_names.granite_hybrid,
        (*layouts.INTERLEAVED, *layouts.EXPERTS, *layouts.SHARED_MLPS, *recurrent_layouts.MAMBA_2),
        biased=recurrent_names.MAMBA_BIASED,
    ),
    "falcon-h1": Architecture(
        "falcon_h1",
        "FalconH1ForCausalLM",
        recurrent_names.falcon_h1,
        recurrent_layouts.MAMBA_2,
        names.TOP | names.weights({"output_norm": "model.final_layernorm"}),
        recurrent_names.MAMBA_BIASED,
    ),
    "arcee": Architecture(
        "arcee",
        "ArceeForCausalLM",
        names.ATTENTION | names.NORMS_BEFORE | names.UNGATED,
        layouts.INTERLEAVED,
    ),
    # Hugging Face's rows are interleaved too, so nothing changes on the way.
    "command-r": Architecture("cohere", "CohereForCausalLM", names.cohere),
    "cohere2": Architecture(
        "cohere2", "Cohere2ForCausalLM", names.ONE_NORM | names.ATTENTION | names.MLP
    ),
    "ernie4_5": Architecture("ernie4_5", "Ernie4_5ForCausalLM", names.LLAMA),
    "olmo": Architecture(
        "olmo", "OlmoForCausalLM", names.ATTENTION | names.MLP, layouts.INTERLEAVED, names.NO_NORM
    ),
    "stablelm": Architecture(
        "stablelm", "StableLmForCausalLM", names.stablelm, biased=names.LAYER_NORMED
    ),
    "starcoder2": Architecture(
        "starcoder2",
        "Starcoder2ForCausalLM",
        names.ATTENTION
        | names.NORMS_BEFORE
        | names.weights({"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}),
        biased=(*names.LAYER_NORMED, "c_fc", "c_proj"),
    ),
    "gpt2": Architecture(
        "gpt2",
        "GPT2LMHeadModel",
        names.GPT2,
        layouts.TRANSPOSED,
        names.GPT2_TOP,
        names.GPT2_BIASED,
        "transformer.h",
    ),
    "starcoder": Architecture(
        "gpt_bigcode",
        "GPTBigCodeForCausalLM",
        names.GPT2,
        (),
        names.GPT2_TOP,
        names.GPT2_BIASED,
        "transformer.h",
    ),
    "gptneox": Architecture(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        names.NEOX,
        layouts.HEAD_BY_HEAD,
        names.NEOX_TOP,
        ("layernorm", "layer_norm", "query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
        "gpt_neox.layers",
    ),
    "minicpm3": Architecture("minicpm3", "MiniCPM3ForCausalLM", names.MINICPM3),
    "phi2": Architecture("phi", "PhiForCausalLM", names.PHI, (), names.PHI_TOP, names.PHI_BIASED),
    "nemotron": Architecture(
        "nemotron",
        "NemotronForCausalLM",
        names.ATTENTION | names.NORMS_BEFORE | names.UNGATED,
        layouts.GAINS_LESS_ONE,
        biased=names.LAYER_NORMED,
    ),
    "jais2": Architecture(
        "jais2",
        "Jais2ForCausalLM",
        names.ATTENTION | names.NORMS_BEFORE | names.UNGATED,
        biased=names.LAYER_NORMED,
    ),
    "ernie4_5-moe": Architecture(
        "ernie4_5_moe", "Ernie4_5_MoeForCausalLM", mixture_names.ernie_mixture, layouts.EXPERTS
    ),
    "chatglm": Architecture("glm", "GlmForCausalLM", names.GLM),
    "glm4": Architecture("glm4", "Glm4ForCausalLM", names.GLM4),
    "hunyuan-dense": Architecture(
        "hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", names.LLAMA | names.HUNYUAN_NORMS
    ),
    "seed_oss": Architecture(
        "seed_oss", "SeedOssForCausalLM", names.ATTENTION | names.POST_NORMS | names.MLP
    ),
    "exaone": Architecture("exaone", "ExaoneForCausalLM", names.LLAMA),
    "exaone4": Architecture(
        "exaone4",
        "Exaone4ForCausalLM",
        names.ATTENTION | names.MLP | names.QK_NORMS | names.NORMS_AFTER,
    ),
    "smollm3": Architecture("smollm3", "SmolLM3ForCausalLM", names.LLAMA, layouts.INTERLEAVED),
    "mistral3": Architecture(
        "ministral3", "Ministral3ForCausalLM", names.LLAMA, layouts.INTERLEAVED
    ),
    "phi3": Architecture("phi3", "Phi3ForCausalLM", names.FUSED),
    "qwen2moe": Architecture(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        mixture_names.MIXTURE | mixture_names.SHARED,
        (*layouts.EXPERTS, *layouts.SHARED_GATES),
    ),
    "qwen3moe": Architecture(
        "qwen3_moe", "Qwen3MoeForCausalLM", mixture_names.MIXTURE | names.QK_NORMS, layouts.EXPERTS
    ),
    "olmoe": Architecture(
        "olmoe", "OlmoeForCausalLM", mixture_names.MIXTURE | names.QK_NORMS, layouts.EXPERTS
    ),
    "gpt-oss": Architecture(
        "gpt_oss", "GptOssForCausalLM", mixture_names.GPT_OSS, layouts.TRANSPOSED_EXPERTS
    ),
    "olmo2": Architecture(
        "olmo2",
        "Olmo2ForCausalLM",
        names.ATTENTION | names.MLP | names.QK_NORMS | names.NORMS_AFTER,
    ),
    "lfm2": Architecture(
        "lfm2",
        "Lfm2ForCausalLM",
        recurrent_names.lfm2,
        recurrent_layouts.SHORT_CONVOLUTIONS,
        recurrent_names.LFM2_TOP,
    ),
    "lfm2moe": Architecture(
        "lfm2_moe",
        "Lfm2MoeForCausalLM",
        recurrent_names.lfm2_mixture,
        (*recurrent_layouts.SHORT_CONVOLUTIONS, *layouts.EXPERTS),
        recurrent_names.LFM2_TOP,
    ),
    "qwen3next": Architecture(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        recurrent_names.qwen_mixture,
        (*recurrent_layouts.QWEN3_NEXT, *layouts.EXPERTS),
    ),
    "qwen35": Architecture(
        "qwen3_5_text", "Qwen3_5ForCausalLM", recurrent_names.qwen35, recurrent_layouts.QWEN3_5
    ),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text",
        "Qwen3_5MoeForCausalLM",
        recurrent_names.qwen_mixture,
        (*recurrent_layouts.QWEN3_5, *layouts.EXPERTS),
    ),
    "deepseek2": Architecture(
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        mixture_names.deepseek2,
        (*layouts.LATENTS, *layouts.EXPERTS),
    ),
    "gemma": Architecture("gemma", "GemmaForCausalLM", names.LLAMA, layouts.GAINS_LESS_ONE),
    "gemma2": Architecture(
        "gemma2",
        "Gemma2ForCausalLM",
        names.ATTENTION | names.MLP | names.GEMMA_NORMS,
        layouts.GAINS_LESS_ONE,
    ),
    "gemma3": Architecture(
        "gemma3_text",
        "Gemma3ForCausalLM",
        names.ATTENTION | names.MLP | names.QK_NORMS | names.GEMMA_NORMS,
        layouts.GAINS_LESS_ONE,
    ),
    "gemma4": Architecture("gemma4_text", "Gemma4ForCausalLM", names.gemma4),
    "gemma3n": Architecture(
        "gemma3n_text",
        "Gemma3nForCausalLM",
        names.gemma3n,
        top=names.GEMMA3N_TOP,
        stacks=tuple(names.STREAMS),
    ),
    "glm4moe": Architecture(
        "glm4_moe", "Glm4MoeForCausalLM", mixture_names.glm_mixture, layouts.EXPERTS
    ),
    "dots1": Architecture("dots1", "Dots1ForCausalLM", mixture_names.dots_mixture, layouts.EXPERTS),
    "exaone-moe": Architecture(
        "exaone_moe", "ExaoneMoeForCausalLM", mixture_names.dots_mixture, layouts.EXPERTS
    ),
    "afmoe": Architecture("afmoe", "AfmoeForCausalLM", mixture_names.afmoe, layouts.EXPERTS),
    "minimax-m2": Architecture(
        "minimax_m2", "MiniMaxM2ForCausalLM", mixture_names.MINIMAX, layouts.EXPERTS
    ),
    "hunyuan-moe": Architecture(
        "hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM", mixture_names.HUNYUAN, layouts.EXPERTS
    ),
    "phimoe": Architecture(
        "phimoe",
        "PhimoeForCausalLM",
        mixture_names.PHIMOE,
        layouts.EXPERTS,
        biased=(*names.LAYER_NORMED, "lm_head"),
    ),
    "mellum": Architecture(
        "mellum", "MellumForCausalLM", mixture_names.MIXTURE | names.QK_NORMS, layouts.EXPERTS
    ),
    "llama4": Architecture(
        "llama4_text", "Llama4ForCausalLM", mixture_names.llama4, layouts.LLAMA4_EXPERTS
    ),
    "granite_swa": Architecture(
        "granite_swa",
        "GraniteSWAForCausalLM",
        mixture_names.granite_windows,
        (*layouts.INTERLEAVED, *layouts.JOINED_EXPERTS),
        biased=(*names.BIASED, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    ),
    "falcon": Architecture(
        "falcon",
        "FalconForCausalLM",
        names.falcon,
        layouts.GROUP_BY_GROUP,
        names.FALCON_TOP,
        ("layernorm", "ln_attn", "ln_mlp", "ln_f"),
        "transformer.h",
    ),
    "apertus": Architecture(
        "apertus",
        "ApertusForCausalLM",
        names.APERTUS,
        numbers=(
            LayerNumber("xielu.alpha_p", "mlp.act_fn.alpha_p", (1,)),
            LayerNumber("xielu.alpha_n", "mlp.act_fn.alpha_n", (1,)),
            LayerNumber("xielu.beta", "mlp.act_fn.beta", ()),
            LayerNumber("xielu.eps", "mlp.act_fn.eps", ()),
        ),
    ),
    "mamba2": Architecture(
        "mamba2",
        "Mamba2ForCausalLM",
        recurrent_names.mamba2,
        recurrent_layouts.MAMBA_2,
        recurrent_names.MAMBA2_TOP,
        ("conv1d",),
        "backbone.layers",
    ),
    "nemotron_h": NEMOTRON_H,
    "nemotron_h_moe": NEMOTRON_H,
}

MIXTRAL = Architecture(
    "mixtral", "MixtralForCausalLM", mixture_names.MIXTURE, (*layouts.INTERLEAVED, *layouts.EXPERTS)
)
"""A "llama" with experts."""
SEEING_GLM4 = replace(ARCHITECTURES["glm4"], rules=layouts.PART_IN_TURN)
"""The text part of a GLM-4 that sees (GLM-4.1V): llama.cpp's positions in a picture need halves."""
BAMBA = Architecture(
    "bamba",
    "BambaForCausalLM",
    recurrent_names.bamba,
    (*layouts.INTERLEAVED, *recurrent_layouts.MAMBA_2),
    names.TOP | names.weights({"output_norm": "model.final_layernorm"}),
    recurrent_names.MAMBA_BIASED,
)
"""A "granitehybrid" without Granite's factors."""


def architecture_of(keys: Keys) -> Architecture | None:
    """The architecture of a file; None for an unknown name."""
    name = keys.architecture
    if not isinstance(name, str):
        return None
    if name == "llama" and keys.optional("expert_count"):
        return MIXTRAL
    if name == "glm4" and keys.get("rope.dimension_sections") is not None:
        return SEEING_GLM4
    if name == "granitehybrid" and keys.get("logit_scale") is None:
        return BAMBA
    return ARCHITECTURES.get(name)
