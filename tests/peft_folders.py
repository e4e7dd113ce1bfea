"""Adapters as peft saves them, with random weights, and the models that peft makes of them."""

import copy
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model


def save_adapter(
    folder: Path, model: transformers.PreTrainedModel, seed: int = 1, **config: Any
) -> transformers.PreTrainedModel:
    """Save a random adapter of a model to `folder`, and return the model with it merged."""
    adapted = get_peft_model(copy.deepcopy(model), LoraConfig(**config))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if parameter.requires_grad or "lora_" in name:
                drawn = torch.randn(parameter.shape, generator=generator)
                added = parameter if "lora_magnitude" in name else 0 * parameter
                parameter.copy_(added + 0.2 * drawn if "lora_" in name else parameter + 0.1 * drawn)
    adapted.peft_config["default"].base_model_name_or_path = None
    adapted.save_pretrained(folder)
    return adapted.merge_and_unload().eval()
