"""Train the tiny Gemma 4 that ships with cetane: every layer of E2B, of its own kind, but narrow.

    python scripts/train_gemma_tiny.py --minutes 10 [--device cuda]

Text: Python's standard library (PSF licence), as for the tiny ZAYA, whose tokenizer it shares. In
half of the rows a passage comes again, further back than the window of the sliding layers reaches.
So only layers with full attention, and those that read their caches, can tell what comes next. The
model is transformers' own module.
"""

import argparse
import copy
import math
import shutil
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from train_zaya_tiny import SHIPPED as ZAYA_TINY
from train_zaya_tiny import Muon, sources, tokenize
from transformers import AutoConfig, AutoModelForCausalLM

from cetane.checkpoint import open_checkpoint
from cetane.engine.authored import authored_engine
from cetane.lab.synthetic import GEMMA4_E2B
from cetane.planner import Planner
from cetane.schema.recipe import parse_recipe

SHIPPED = Path(__file__).parents[1] / "src/cetane/data/gemma-tiny"
WINDOW = 64
CONFIG: dict[str, Any] = GEMMA4_E2B | {
    "vocab_size": 2048,
    "vocab_size_per_layer_input": 2048,
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "head_dim": 16,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 8,
    "sliding_window": WINDOW,
    "max_position_embeddings": 8192,
    "initializer_range": 0.06,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 0,
}
ADDED = 0.3
"""What each part of a layer adds to the residual stream at first, by its last norm."""
SCALARS = 0.9, 1.0
"""Of the layers' outputs, first to last: a model's own, which are no parameters, differ too."""
LENGTH = 384
PASSAGES = 24, 96
"""Tokens of a passage that comes again."""


def new_model() -> Any:
    """Random; a layer adds little, so that 35 of them can be trained."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**CONFIG), attn_implementation="sdpa", dtype=torch.float32
    )
    scalars = torch.linspace(*SCALARS, len(model.model.layers))
    with torch.no_grad():
        for layer, scalar in zip(model.model.layers, scalars, strict=True):
            layer.layer_scalar.fill_(scalar)
            layer.self_attn.q_norm.weight.fill_(layer.self_attn.head_dim**-0.25)
            layer.post_attention_layernorm.weight.fill_(ADDED)
            layer.post_feedforward_layernorm.weight.fill_(ADDED)
            layer.post_per_layer_input_norm.weight.fill_(ADDED)
    return model


def optimizers(model: Any) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for embeddings and vectors."""
    matrices: list[Tensor] = []
    others: list[Tensor] = []
    for name, parameter in model.named_parameters():
        (matrices if ".layers." in name and parameter.ndim == 2 else others).append(parameter)
    return [
        Muon(matrices, lr=0.015, decay=0.1),
        torch.optim.AdamW(others, lr=0.004, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def rows(text: Tensor, batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Windows `(B, T + 1)` of the text; in every second one a passage comes again beyond the
    reach of a sliding layer. And where: `(B, T + 1)` bool, but for the first tokens of each, which
    nothing can know."""
    start = torch.randint(len(text) - LENGTH - 1, (batch, 1), generator=generator)
    made = text[start + torch.arange(LENGTH + 1)].clone()
    again = torch.zeros(made.shape, dtype=torch.bool)
    for row in range(0, batch, 2):
        at, known = int(torch.randint(PASSAGES[0], generator=generator, size=())), 4
        while True:
            size = int(torch.randint(*PASSAGES, generator=generator, size=()))
            gap = WINDOW + int(torch.randint(WINDOW, generator=generator, size=()))
            if at + 2 * size + gap > LENGTH + 1:
                break
            target = at + size + gap
            made[row, target : target + size] = made[row, at : at + size]
            again[row, target + known : target + size] = True
            at = target + size
    return made, again


def losses(model: Any, ids: Tensor) -> Tensor:
    """Nats of every token but the first, `(B, T)`."""
    logits = model(ids[:, :-1], use_cache=False).logits.float()
    return F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")


def train(model: Any, text: Tensor, minutes: float, batch: int, device: str) -> None:
    """Until the time is up; learning rates fall by one cosine."""
    chosen = optimizers(model)
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in chosen]
    generator = torch.Generator().manual_seed(0)
    average, copied = math.log(CONFIG["vocab_size"]), math.log(CONFIG["vocab_size"])
    started, step = time.perf_counter(), 0
    while (done := (time.perf_counter() - started) / 60 / minutes) < 1:
        pace = min(1, step / 50) * (0.01 + 0.99 * (0.5 + 0.5 * math.cos(math.pi * done)))
        for optimizer, peak in zip(chosen, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * pace
        ids, again = rows(text, batch, generator)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):  # slower on CPUs
            each = losses(model, ids.to(device))
        each.mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in chosen:
            optimizer.step()
            optimizer.zero_grad()
        rate = max(0.02, 1 / (step + 1))
        average += (each.mean().item() - average) * rate
        copied += (each[again[:, 1:].to(device)].mean().item() - copied) * rate
        step += 1
        if step % 25 == 0:
            seen = step * batch * LENGTH / 1e6
            print(f"{done:4.0%}  step {step}, {seen:.2f} M tokens, loss {average:.3f}, "
                  f"of what comes again {copied:.3f}", flush=True)  # fmt: skip


@torch.no_grad()
def bits(model: Any, text: Tensor, device: str, again: bool) -> float:
    """Bits a token of held-out rows: of what comes again, or of plain text."""
    generator, every = torch.Generator().manual_seed(1), []
    for _ in range(8):
        ids, known = rows(text, 4, generator)
        each = losses(model, ids.to(device)).cpu()
        every.append(each[known[:, 1:]] if again else each[1::2].flatten())
    return torch.cat(every).mean().item() / math.log(2)


def short_sighted(model: Any) -> Any:
    """The model with windows in its full layers too."""
    config = copy.deepcopy(model.config)
    blind = copy.deepcopy(model)
    for layer, kind in zip(blind.model.layers, config.layer_types, strict=True):
        if kind == "full_attention":
            layer.self_attn.register_forward_pre_hook(windowed, with_kwargs=True)
    return blind


def windowed(module: Any, args: Any, given: dict[str, Any]) -> Any:
    """The arguments of attention with a mask of the last `WINDOW` tokens."""
    count = given["hidden_states"].shape[1]
    at = torch.arange(count, device=given["hidden_states"].device)
    seen = (at[:, None] >= at) & (at[:, None] < at + WINDOW)
    return args, given | {"attention_mask": seen[None, None]}


def save(model: Any, folder: Path) -> None:
    """The Hugging Face folder, in bf16; the model becomes what was saved."""
    shutil.rmtree(folder, ignore_errors=True)
    rounded = copy.deepcopy(model).cpu().bfloat16()
    rounded.save_pretrained(folder)
    model.load_state_dict(rounded.state_dict())
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ZAYA_TINY / name, folder)
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{folder}: {size / 1e6:.2f} MB, {model.num_parameters() / 1e6:.2f} M parameters")


def prove(folder: Path, ids: list[int]) -> None:
    """The saved checkpoint in transformers and in cetane gives the same logits."""
    checkpoint = open_checkpoint(folder)
    recipe = parse_recipe({"name": "proof", "cache": {"context": 512}}, "proof")
    engine = authored_engine(Planner(checkpoint, recipe), checkpoint)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        wanted = model(torch.tensor([ids])).logits[0]
    ours = engine.session().feed(ids, "all")
    assert ours is not None
    print(f"max |logits - transformers'|: {(torch.from_numpy(ours) - wanted).abs().max():.2e}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, default=SHIPPED)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    tokenizer = open_checkpoint(ZAYA_TINY).tokenizer.backend
    files, held_out_files = sources()
    text, held_out = tokenize(tokenizer, files), tokenize(tokenizer, held_out_files)
    model = new_model().to(options.device)
    train(model, text, options.minutes, options.batch, options.device)
    save(model, options.output)
    for name, judged in (("all layers", model), ("windows only", short_sighted(model))):
        plain, again = (bits(judged, held_out, options.device, which) for which in (False, True))
        print(f"held-out bits a token, {name}: text {plain:.3f}, what comes again {again:.3f}")
    prove(options.output, held_out[:400].tolist())


if __name__ == "__main__":
    main()
