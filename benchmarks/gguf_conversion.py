"""Does cetane read what llama.cpp's own converter writes?

    python benchmarks/gguf_conversion.py LLAMA_CPP [VARIANT ...]

LLAMA_CPP is a checkout, or `vendor/llama.cpp` of llama-cpp-python's source package. The tiny random
models of `tests/checkpoint/conftest.py` are saved and converted. A model that is rebuilt from the
file must give the logits of the first one, at 40 positions.

All have one byte-level BPE as tokenizer, which the converter takes for GPT-2's. Some converters
read keys that transformers 5 does not write: `for_converter` adds them.
"""

import json
import logging
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

LLAMA_CPP = Path(sys.argv[1])
sys.path.insert(0, str(LLAMA_CPP / "gguf-py"))
import gguf  # noqa: E402  # the converter's own, which lies beside tests of its own

sys.path[:1] = [str(Path(__file__).parents[1])]
sys.path.append(str(LLAMA_CPP))

import torch  # noqa: E402
import transformers  # noqa: E402
from tests.checkpoint.conftest import VARIANTS, build_variant  # noqa: E402
from tests.conftest import build_tokenizer  # noqa: E402

from cetane.checkpoint import open_checkpoint  # noqa: E402
from cetane.errors import CetaneError  # noqa: E402

LIMIT = 1e-4
"""The most that a logit may differ."""
SPARE = 8
"""Tokens beside the tokenizer's: Qwen's own class adds some."""
WITHOUT = "mistral3-no-temperature"
"""A Mistral's yarn has two scales, which the converter does not write."""


def for_converter(config: dict[str, Any]) -> dict[str, Any]:
    """The keys of a config as the files of releases have them."""
    kind, own = config["model_type"], dict[str, Any]()
    if kind == "cohere2":
        own["rotary_pct"] = 1.0
    if kind == "phimoe":
        own["architectures"] = ["PhiMoEForCausalLM"]
        trained = {"original_max_position_embeddings": config["max_position_embeddings"]}
        own["rope_parameters"] = trained | config["rope_parameters"]
    if kind == "bamba":
        own["attn_rotary_emb"] = 4
    if kind in ("granite_swa", "granitemoe_swa"):
        own["no_rope_layers"] = [int(base > 0) for base in config["layer_rope_theta"]]
    if kind == "nemotron_h":
        letters = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}
        types = config["layers_block_type"]
        own["mamba_d_head"] = config["mamba_head_dim"]
        own["hybrid_override_pattern"] = "".join(letters[one] for one in types)
        if "moe" not in types:
            config = {key: value for key, value in config.items() if "expert" not in key}
    if kind == "falcon" and config["multi_query"] and not config["new_decoder_architecture"]:
        own["num_kv_heads"] = 1
    if kind == "minimax_m2":
        rope = config["rope_parameters"]
        own |= {
            "rotary_dim": int(config["head_dim"] * rope["partial_rotary_factor"]),
            "scoring_func": "sigmoid",
        }
    if kind == "hunyuan_v1_dense":
        own["max_position_embeddings"] = 1 << 15
    if kind == "hunyuan_v1_moe":
        own["moe_intermediate_size"] = [config["intermediate_size"]] * config["num_hidden_layers"]
        own["num_shared_expert"] = [1] * config["num_hidden_layers"]
    if kind == "exaone":
        own |= {"architectures": ["ExaoneForCausalLM"], "activation_function": "silu"}
    if kind == "gpt2":
        own["n_ctx"] = config["n_positions"]
    if kind == "granitemoehybrid":
        own["layer_types"] = [
            "attention" if layer == "full_attention" else "mamba" for layer in config["layer_types"]
        ]
    return config | own


def convert(folder: Path) -> Path:
    """The file that llama.cpp's converter makes of a folder, in fp32."""
    conversion: Any = import_module("conversion")
    conversion.TextModel.get_vocab_base_pre = lambda *_: "gpt-2"
    hyperparameters = conversion.ModelBase.load_hparams(folder, False)
    converter = conversion.get_model_class(hyperparameters["architectures"][0])
    converter.no_mtp = True  # none of the models has layers that only draft
    converter.set_vocab = conversion.TextModel._set_vocab_gpt2
    file = folder / "model.gguf"
    own = None
    if hyperparameters["model_type"] in ("exaone", "nemotron_h"):  # transformers changes their keys
        own = json.loads((folder / "config.json").read_text())
    made = converter(folder, gguf.LlamaFileType.ALL_F32, file, eager=True, hparams=own)
    if hyperparameters["model_type"] == "gpt_neox":  # transformers 5 keeps it in another place
        made.hparams["rotary_pct"] = hyperparameters["rope_parameters"]["partial_rotary_factor"]
    made.write()
    return file


@torch.no_grad()
def furthest(model: Any, file: Path) -> float:
    """The largest difference of logits between a model and the one that a file holds."""
    checkpoint = open_checkpoint(file)
    config = transformers.AutoConfig.for_model(**checkpoint.config)
    rebuilt = transformers.AutoModelForCausalLM.from_config(config)
    weights = {name: checkpoint.read(name) for name in checkpoint.names()}
    missing, unknown = rebuilt.load_state_dict(weights, strict=False)
    assert set(missing) <= {"lm_head.weight"} and not unknown, (missing, unknown)
    rebuilt.tie_weights()
    tokens = torch.arange(40)[None] % model.config.vocab_size
    logits = []
    for one in (model, rebuilt.eval()):
        one.config._experts_implementation = "eager"  # the default's matrices have aligned widths
        logits.append(one(tokens, use_cache=False).logits)
    return float((logits[0] - logits[1]).abs().max())


def main(variants: list[str]) -> int:
    logging.disable(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    tokenizer, wrong = build_tokenizer(), 0
    for variant in variants or [name for name in VARIANTS if name != WITHOUT]:
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder)
            spare = SPARE if "qwen" in variant else 0
            model = build_variant(variant, vocab_size=len(tokenizer) + spare)
            model.save_pretrained(place)
            tokenizer.save_pretrained(place)
            config = json.loads((place / "config.json").read_text())
            (place / "config.json").write_text(json.dumps(for_converter(config)))
            try:
                file = convert(place)
            except Exception as error:  # any of the converter's own
                print(f"{variant:28} not converted: {type(error).__name__}: {error}"[:99])
                continue
            try:
                off = furthest(model, file)
            except (CetaneError, RuntimeError) as error:  # torch's, of sizes that do not fit
                off = float("inf")
                print(f"{variant:28} {error}"[:99])
        wrong += off > LIMIT
        print(f"{variant:28} {off:.1e}{' DIFFERS' if off > LIMIT else ''}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[2:]))
