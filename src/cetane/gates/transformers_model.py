"""A checkpoint's transformers model, and the two ways in which its weights come: transformers reads
them, or each module borrows its own from cetane's reader."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gguf
import torch
from torch import Tensor, nn

from cetane.checkpoint import Checkpoint
from cetane.checkpoint.lora import WEIGHTS, Lora
from cetane.checkpoint.quantized import QUANTIZATION_KEYS
from cetane.checkpoint.safetensors import HEAD
from cetane.checkpoint.text_part import has_text_part, text_config
from cetane.checkpoint.zaya_original import is_original
from cetane.errors import CetaneError
from cetane.families import families, parse_config
from cetane.files import read_json
from cetane.hardware.quiet import quiet_transformers

EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}
"""The plainest arithmetic that transformers has."""
OF_TEXT = {"model_type", "text_config", "tie_word_embeddings"}
"""The keys of a multimodal model's config that concern its text part."""
REGROUPED = ("falcon",)
"""The model types whose rows GGUF files have in another order, and transformers leaves in it."""


class Lender:
    """Gives a module its tensors from the checkpoint before a forward pass, and takes them back
    after it. A `resident` module keeps them."""

    def __init__(
        self, checkpoint: Checkpoint, names: dict[str, str], module: nn.Module, resident: bool
    ) -> None:
        self.checkpoint, self.names, self.module = checkpoint, names, module
        self.resident, self.lent = resident, False

    def lend(self, *_: Any) -> None:
        if self.lent:
            return
        for name, tensor in own_tensors(self.module).items():
            tensor.data = self.checkpoint.read(self.names[name]).float()
        self.lent = True

    def take_back(self, *_: Any) -> None:
        for tensor in own_tensors(self.module).values():
            tensor.data = torch.empty(0)
        self.lent = False


def config_of(checkpoint: Checkpoint) -> Any:
    """The transformers config of a checkpoint: as transformers reads it from the folder, so the
    gates see errors of cetane's own reading.

    cetane's config counts where there is no `config_file`. It also counts for a head that is stored
    although the config ties it. CetaneError if transformers refuses the file.
    """
    ours = parse_config(checkpoint.config)  # before transformers: it has no limits
    path = config_file(checkpoint)
    if path is None:
        return ours
    stored = read_json(path)
    if has_text_part(stored):  # of the other parts, cetane has checked no sizes
        concerned = OF_TEXT & stored.keys()
        if "text_config" not in stored:  # its keys stand beside the others
            concerned = stored.keys() - {"vision_config"}
        whole = parsed_by_transformers({key: stored[key] for key in concerned}, path)
        config = whole.text_config
        if config.model_type not in families():  # it generates no text by itself
            alone = {"model_type": whole.model_type, "text_config": config.to_dict()}
            config = parse_config(text_config(alone, path))
        # some whole models leave it to their text part
        tied = getattr(whole, "tie_word_embeddings", config.tie_word_embeddings)
        config.tie_word_embeddings = tied
    else:
        plain = {key: stored[key] for key in stored if key not in QUANTIZATION_KEYS}
        config = parsed_by_transformers(plain, path)
    if HEAD in checkpoint:
        config.tie_word_embeddings = ours.tie_word_embeddings
    return config


def config_file(checkpoint: Checkpoint) -> Path | None:
    """The config.json that transformers reads whole; None for a GGUF file, of which it reads a
    part, and for Zyphra's own form, which it does not know."""
    path = None if checkpoint.folder is None else checkpoint.folder / "config.json"
    known = path is not None and path.is_file() and not is_original(read_json(path))
    return path if known else None


def parsed_by_transformers(content: dict[str, Any], path: Path) -> Any:
    """The config that transformers reads from a file with this content. `path` is the file that it
    comes from, for errors."""
    from transformers import AutoConfig

    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(content))
        try:
            with quiet_transformers():
                return AutoConfig.from_pretrained(
                    folder, local_files_only=True, trust_remote_code=False
                )
        except Exception as error:  # it raises many kinds
            raise CetaneError(f"transformers cannot read {path}: {error}") from error


@contextmanager
def runs(source: str) -> Iterator[None]:
    """A context in which the transformers model of a checkpoint runs. CetaneError if it cannot:
    configs that transformers reads may lack what its model needs."""
    try:
        yield
    except CetaneError:
        raise
    except Exception as error:  # it raises many kinds
        raise CetaneError(
            f"transformers cannot run the config of {source}: {type(error).__name__}: {error}",
            "compare its config.json with that of a published model of this type",
        ) from error


def unfilled(config: Any) -> Any:
    """The transformers model of a config, its fp32 weights not initialised: so they take no
    memory yet."""
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    with no_init_weights():
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32, **EAGER).eval()


def stored_names(model: Any, config: Any) -> dict[str, dict[str, str]]:
    """The checkpoint's names of each module's own tensors, by module path."""
    names: dict[str, dict[str, str]] = {}
    table = next(path for path, m in model.named_modules() if m is model.get_input_embeddings())
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        own = {name: prefix + name for name in own_tensors(module)}
        if own.get("weight") == "lm_head.weight" and config.tie_word_embeddings:
            own["weight"] = f"{table}.weight"
        if own:
            names[path] = own
    return names


def load_by_transformers(
    checkpoint: Checkpoint, config: Any, names: dict[str, dict[str, str]]
) -> nn.Module | None:
    """The model, its weights read by transformers and its adapters merged by peft; None for a
    checkpoint that they do not know, or read only in part.

    cetane gives the config, since transformers reads only a part of a GGUF file's. That config has
    no quantisation: by it, transformers reads the integers of a quantised checkpoint as weights,
    without their scales. So such a checkpoint is none that it knows."""
    from transformers import AutoModelForCausalLM

    if checkpoint.quantization is not None:
        return None
    path = Path(checkpoint.source)
    if checkpoint.folder is not None and path.suffix != ".safetensors":
        where: dict[str, Any] = {"pretrained_model_name_or_path": checkpoint.folder}
    elif path.suffix == ".gguf" and path.is_file() and config.model_type not in REGROUPED:
        where = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    else:
        return None
    try:
        with quiet_transformers(), one_name_map():
            model, told = AutoModelForCausalLM.from_pretrained(
                **where, config=config, dtype=torch.float32, local_files_only=True,
                output_loading_info=True,
                **EAGER,
            )  # fmt: skip
    except Exception:  # transformers raises many kinds for checkpoints that it does not know
        return None
    whole = not told["missing_keys"] and not told["mismatched_keys"]
    paths = {path for path, _ in model.named_modules()}
    if not whole or not names.keys() <= paths:
        return None
    fill_buffers(model, checkpoint, names)
    for lora in checkpoint.merged:
        model = merged_by_peft(model, lora)
        if model is None:
            return None
    return model.eval()


@contextmanager
def one_name_map() -> Iterator[None]:
    """A context in which gguf makes its map of tensor names once. transformers 5 asks for it at
    every module, which is half of the time to read SmolLM2."""
    made = gguf.get_tensor_name_map
    gguf.get_tensor_name_map = lru_cache(made)
    try:
        yield
    finally:
        gguf.get_tensor_name_map = made


def merged_by_peft(model: nn.Module, lora: Lora) -> nn.Module | None:
    """The model with an adapter that peft merged; None without peft, or if peft does not take all
    of the adapter's tensors.

    peft gets the paths of modules in place of the config's patterns: the patterns are regular
    expressions of an untrusted file.
    """
    try:
        from peft import LoraConfig, PeftModel, set_peft_model_state_dict
    except ModuleNotFoundError:
        return None
    from safetensors.torch import load_file

    config = LoraConfig.from_pretrained(str(lora.folder))
    config.target_modules, config.exclude_modules = set(lora.modules.values()), None
    config.layers_to_transform = config.layers_pattern = None
    try:
        with quiet_transformers():
            adapted = PeftModel(model, config)
            told: Any = set_peft_model_state_dict(adapted, load_file(lora.folder / WEIGHTS))
            missing = [name for name in told.missing_keys if "lora_" in name]
            whole = not missing and not told.unexpected_keys
            return adapted.merge_and_unload() if whole else None
    except (ValueError, RuntimeError, KeyError):  # for paths that the model does not have
        return None


def fill_buffers(
    model: nn.Module, checkpoint: Checkpoint, names: dict[str, dict[str, str]]
) -> None:
    """Give the model its stored buffers. transformers 5.23 reads them, and then initialises them
    anew: the balancing biases of a ZAYA's routers come out as zeros."""
    for path, stored in names.items():
        for name, buffer in model.get_submodule(path).named_buffers(recurse=False):
            if name in stored:
                buffer.data = checkpoint.read(stored[name]).float()


def by_parent(path: str, module: nn.Module) -> bool:
    """Whether the module's parent computes with its tensors and never calls it, as LFM2's
    convolutions and the projection of Mamba's steps in transformers, or calls only other methods of
    it, as of Gemma 3n's AltUp."""
    apart = isinstance(module, nn.Conv1d) and module.groups == module.in_channels
    return apart or path.endswith(".dt_proj") or type(module).__name__.endswith("AltUp")


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """A module's own parameters and stored buffers, without its children's."""
    buffers = module.named_buffers(recurse=False)
    passing = module._non_persistent_buffers_set
    return dict(module.named_parameters(recurse=False)) | {
        name: tensor for name, tensor in buffers if name not in passing
    }
