"""Train the tiny ZAYA that ships with cetane, on the sources of Python's standard library.

    python scripts/train_zaya_tiny.py --minutes 16

The parameters are transformers' own module. `forward` is its mathematics over a batch of equally
long sequences, with experts on sorted tokens. It is several times as fast on a CPU. At the end the
saved checkpoint goes through transformers and through cetane's authored engine, and must agree.

Text: Python's standard library (PSF licence), without tests and tables.
"""

import argparse
import copy
import hashlib
import lzma
import math
import os
import shutil
import sysconfig
import time
import zlib
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # on busy cores, spinning costs tenfold

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import ZayaConfig, ZayaForCausalLM

from cetane.checkpoint import open_checkpoint
from cetane.checkpoint.tokenizer import Tokenizer as CetaneTokenizer
from cetane.engine.authored import authored_engine
from cetane.planner import Planner
from cetane.schema.recipe import parse_recipe

SHIPPED = Path(__file__).parents[1] / "src/cetane/data/zaya-tiny"
LEFT_OUT = {"site-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
CONFIG: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 192,
    "num_hidden_layers": 4,
    "layer_types": ["hybrid", "hybrid_sliding", "hybrid", "hybrid_sliding"],
    "sliding_window": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 8,
    "moe_intermediate_size": 160,
    "router_hidden_size": 32,
    "cca_time0": 2,
    "cca_time1": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 0,
    "initializer_range": 0.04,
}
SKIPPED = 0.05
"""The share of tokens that should choose no expert."""
PROMPTS = (
    "def __init__(self",
    "import",
    "try:\n    import foo\nexcept",
    "        raise ValueError",
    "    def close(self):\n        self",
)


# --- text ------------------------------------------------------------------------------------


def sources() -> tuple[list[str], list[str]]:
    """The library's files to train on, and the 3 % that are held out, chosen by hash of name."""
    root = Path(sysconfig.get_path("stdlib"))
    parts: tuple[list[str], list[str]] = ([], [])
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if not LEFT_OUT & set(name.parts):
            held_out = hashlib.sha256(name.as_posix().encode()).digest()[0] < 8
            try:
                parts[held_out].append(path.read_text(encoding="utf-8"))
            except UnicodeDecodeError:
                print(f"left out, not UTF-8: {name}")
    return parts


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """A byte-level BPE that can spell every byte; token 0 ends a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=CONFIG["vocab_size"],
        special_tokens=["<eos>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def tokenize(tokenizer: Tokenizer, texts: list[str]) -> Tensor:
    """All texts in one row, each ended by <eos>."""
    rows = [np.array([*encoding.ids, 0]) for encoding in tokenizer.encode_batch(texts)]
    return torch.from_numpy(np.concatenate(rows))


# --- the model, batched ----------------------------------------------------------------------


class Permute(torch.autograd.Function):
    """Rows in another order; the gradient by gathering, too, since `order` is a permutation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x[order]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient[ctx.saved_tensors[0]], None, None


def convolve(cca: Any, qk: Tensor) -> Tensor:
    """Both causal convolutions (two taps each) of `qk (B, T, C)`."""
    depthwise, grouped = cca.conv_qk_depthwise, cca.conv_qk_grouped
    x = F.pad(qk, (0, 0, 2, 0))
    before, now = depthwise.weight[:, 0].unbind(-1)
    x = torch.addcmul(depthwise.bias + x[:, :-1] * before, x[:, 1:], now)
    heads, dim = grouped.groups, cca.head_dim
    x = torch.cat([part.unflatten(-1, (heads, dim)) for part in (x[:, :-1], x[:, 1:])], -1)
    taps = grouped.weight.unflatten(0, (heads, dim)).permute(0, 3, 2, 1).flatten(1, 2)
    mixed = x.flatten(0, 1).transpose(0, 1) @ taps  # (heads, B*T, dim)
    return mixed.transpose(0, 1).reshape(qk.shape) + grouped.bias


def unit(x: Tensor) -> Tensor:
    """Heads `(..., D)` at length sqrt(D)."""
    return F.normalize(x, dim=-1, eps=1e-6) * x.shape[-1] ** 0.5


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of the first channels of `x (B, H, T, D)`."""
    first, second, rest = x.split(
        [cos.shape[-1], cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]], -1
    )
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


def attention(module: Any, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
    cca, heads, kv = module.qkv_proj, module.num_attention_heads, module.num_key_value_heads
    current, delayed = cca.v_proj_current.weight, cca.v_proj_delayed.weight
    widths = [heads * module.head_dim, kv * module.head_dim, len(current), len(delayed)]
    joined = torch.cat([cca.q_proj.weight, cca.k_proj.weight, current, delayed])
    q, k, v_now, v_next = F.linear(x, joined).split(widths, -1)
    v = torch.cat([v_now, F.pad(v_next[:, :-1], (0, 0, 1, 0))], -1)
    mixed_q, mixed_k = convolve(cca, torch.cat([q, k], -1)).split(widths[:2], -1)
    q = q.unflatten(-1, (kv, heads // kv, -1))
    q = (q + k.unflatten(-1, (kv, 1, -1))) * 0.5
    k = mixed_k.unflatten(-1, (kv, -1)) + q.mean(-2)
    q = mixed_q.unflatten(-1, (heads, -1)) + q.flatten(-3, -2)
    q, k = unit(q), unit(k) * module.qk_norm.temp[:, None]
    q, k = (rotate(part.transpose(1, 2), cos, sin) for part in (q, k))
    v = v.unflatten(-1, (kv, -1)).transpose(1, 2)
    mixed = F.scaled_dot_product_attention(
        q, k, v.to(q.dtype), mask, is_causal=mask is None, enable_gqa=True
    )
    return module.o_proj(mixed.transpose(1, 2).flatten(-2))


def route(gate: Any, x: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Router state; the probabilities of all classes; which one is chosen."""
    state = gate.down_proj(x)
    if before is not None:
        state = state + before * gate.router_states_scale
    probabilities = gate.router_mlp(state).float().softmax(-1)
    chosen = (probabilities.detach() + gate.balancing_biases).argmax(-1, keepdim=True)
    return state, probabilities, chosen


def experts(module: Any, x: Tensor, probability: Tensor, chosen: Tensor) -> Tensor:
    """Each expert on its tokens; those that chose none, the last class, get zeros."""
    rows, classes = x.flatten(0, 1), chosen.flatten()
    order = classes.argsort(stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order))
    counts = classes.bincount(minlength=module.num_experts + 1).tolist()
    *parts, nothing = Permute.apply(rows, order, inverse).split(counts)
    results = []
    for part, up, down in zip(parts, module.gate_up_proj, module.down_proj, strict=True):
        gate, value = F.linear(part, up).chunk(2, -1)
        results.append(F.linear(F.silu(gate) * value, down))
    results.append(torch.zeros_like(nothing, dtype=results[0].dtype))
    mixed = Permute.apply(torch.cat(results), inverse, order)
    return mixed.view_as(x) * probability


Watched = tuple[Tensor, Tensor, Tensor]
"""Of a layer: the classes chosen, the hidden state, and the mean probabilities of the classes."""


def forward(model: ZayaForCausalLM, ids: Tensor, watch: list[Watched] | None = None) -> Tensor:
    """Logits `(B, T, V)`; to `watch`, what every layer did."""
    body, config = model.model, model.config
    h = (body.embed_tokens(ids) + body.input_hidden_states_bias) * body.input_hidden_states_scale
    positions = torch.arange(ids.shape[1])
    near = positions[:, None] - positions
    masks = {"hybrid": None, "hybrid_sliding": (near >= 0) & (near < config.sliding_window)}
    state = None
    for layer, kind in zip(body.layers, config.layer_types, strict=True):
        cos, sin = (r[0].chunk(2, -1)[0] for r in body.rotary_emb(h, positions[None], kind))
        x = layer.input_layernorm(h)
        mixed = attention(layer.self_attn, x, cos, sin, masks[kind])
        h = layer.post_attention_residual_scale(mixed, h)
        x = layer.post_attention_layernorm(h)
        state, probabilities, chosen = route(layer.mlp.gate, x, state)
        probability = probabilities.gather(-1, chosen)
        h = layer.post_mlp_residual_scale(experts(layer.mlp.experts, x, probability, chosen), h)
        if watch is not None:
            watch.append((chosen.flatten(), h.detach(), probabilities.mean((0, 1))))
    return model.lm_head(body.norm(h))


# --- training --------------------------------------------------------------------------------


def new_model() -> ZayaForCausalLM:
    """Random, with attention that sees from the start, and skipping as likely as any expert."""
    torch.manual_seed(0)
    model = ZayaForCausalLM(ZayaConfig(**CONFIG))
    for layer in model.model.layers:
        torch.nn.init.ones_(layer.self_attn.qk_norm.temp)
        layer.mlp.gate.balancing_biases.zero_()
    return model


class Muon(torch.optim.Optimizer):
    """Steps of orthogonalised momentum (Keller Jordan's Muon), also for stacks of matrices."""

    def __init__(self, parameters: list[Tensor], lr: float, decay: float) -> None:
        super().__init__(parameters, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                mean.lerp_(p.grad, 0.05)
                update = orthogonal(p.grad.lerp(mean, 0.95))
                p.mul_(1 - group["lr"] * group["decay"])
                p.add_(update, alpha=-group["lr"] * 0.2 * max(p.shape[-2:]) ** 0.5)


def orthogonal(matrix: Tensor) -> Tensor:
    """The nearest matrix with orthonormal rows or columns, by Newton and Schulz, in bf16."""
    x = matrix.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (x.mT if tall else x).to(matrix.dtype)


def optimizers(model: ZayaForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for the embedding, vectors and taps."""
    matrices: list[Tensor] = []
    others: list[Tensor] = []
    for name, parameter in model.named_parameters():
        inside = ".layers." in name and parameter.ndim > 1 and ".conv_qk_" not in name
        (matrices if inside else others).append(parameter)
    return [
        Muon(matrices, lr=0.02, decay=0.1),
        torch.optim.AdamW(others, lr=0.005, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def wanted_shares() -> Tensor:
    count = CONFIG["num_experts"]
    return torch.tensor([(1 - SKIPPED) / count] * count + [SKIPPED])


@torch.no_grad()
def balance(model: ZayaForCausalLM, watched: list[Watched], rate: float) -> None:
    """Move what the choice is biased by towards the wanted shares."""
    wanted = wanted_shares()
    for layer, (chosen, *_) in zip(model.model.layers, watched, strict=True):
        biases = layer.mlp.gate.balancing_biases
        share = chosen.bincount(minlength=len(wanted)) / len(chosen)
        biases += rate * ((wanted - share) / wanted).clamp(-1, 1)
        biases -= biases.mean()


def drift(watched: list[Watched]) -> Tensor:
    """Cross-entropy of mean probabilities and wanted shares.

    Only a chosen expert's probability has a gradient. So without this the skip, which is no one's
    loss, ends up with most of the probability.
    """
    logs = torch.stack([mean.log() for *_, mean in watched])
    return -(wanted_shares() * logs).sum(-1).mean()


def loss_of(model: ZayaForCausalLM, rows: Tensor, watch: Any = None) -> Tensor:
    """Cross-entropy of `rows (B, T + 1)`, in nats a token."""
    logits = forward(model, rows[:, :-1], watch)
    return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def train(model: ZayaForCausalLM, text: Tensor, minutes: float) -> None:
    """Random windows of the text until the time is up; learning rates fall by one cosine."""
    chosen = optimizers(model)
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in chosen]
    generator = torch.Generator().manual_seed(0)
    started, step, seen, average = time.perf_counter(), 0, 0, math.log(CONFIG["vocab_size"])
    while (done := (time.perf_counter() - started) / 60 / minutes) < 1:
        pace = min(1, step / 50) * (0.01 + 0.99 * (0.5 + 0.5 * math.cos(math.pi * done)))
        for optimizer, peak in zip(chosen, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * pace
        length, batch = (256, 10) if done < 0.7 else (512, 5)  # long windows cost more a token
        start = torch.randint(len(text) - length, (batch, 1), generator=generator)
        watched: list[Watched] = []
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, text[start + torch.arange(length + 1)], watched)
        (loss + 0.1 * drift(watched)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in chosen:
            optimizer.step()
            optimizer.zero_grad()
        balance(model, watched, 0.01 * max(pace, 0.05))
        average += (loss.item() - average) * max(0.02, 1 / (step + 1))
        step, seen = step + 1, seen + length * batch
        if step % 25 == 0:
            skipped = sum((c == CONFIG["num_experts"]).float().mean().item() for c, *_ in watched)
            print(
                f"{done:4.0%}  step {step}, {seen / 1e6:.2f} M tokens, loss {average:.3f}, "
                f"skipped {skipped / len(watched):.1%}",
                flush=True,
            )


# --- what came of it -------------------------------------------------------------------------


def ngram_bits(text: Tensor, held_out: Tensor) -> tuple[float, float]:
    """Bits a token of the held-out text under a unigram and a bigram model (Witten-Bell)."""
    size = CONFIG["vocab_size"]
    pairs = torch.zeros(size, size).view(-1)
    pairs = pairs.index_add(0, text[:-1] * size + text[1:], torch.ones(len(text) - 1))
    pairs = pairs.view(size, size)
    unigram = (pairs.sum(0) + 1) / (pairs.sum() + size)
    followers = (pairs > 0).sum(1, keepdim=True).clamp_min(1)
    bigram = (pairs + followers * unigram) / (pairs.sum(1, keepdim=True) + followers)
    after = held_out[1:]
    return (
        -unigram[after].log2().mean().item(),
        -bigram[held_out[:-1], after].log2().mean().item(),
    )


@torch.no_grad()
def held_out_bits(model: ZayaForCausalLM, text: Tensor, length: int, show: bool = False) -> float:
    """Bits a token, in fp32, over windows side by side; with `show`, what the layers did."""
    count = (len(text) - 1) // length
    windows = text[torch.arange(count)[:, None] * length + torch.arange(length + 1)]
    layers, classes = CONFIG["num_hidden_layers"], CONFIG["num_experts"] + 1
    counts, largest, total = torch.zeros(layers, classes), [0.0] * layers, 0.0
    for rows in windows.split(8):
        watched: list[Watched] = []
        total += loss_of(model, rows, watched).item() * len(rows)
        for index, (chosen, h, _) in enumerate(watched):
            counts[index] += chosen.bincount(minlength=classes)
            largest[index] = max(largest[index], h.abs().max().item())
    for index in range(layers if show else 0):
        shares = " ".join(f"{share:5.1%}" for share in counts[index] / counts[index].sum())
        print(f"layer {index}: max |h| {largest[index]:.1f}; experts, then skip: {shares}")
    return total / count / math.log(2)


def save(model: ZayaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """The Hugging Face folder, in bf16, with the balancing biases in fp32, as transformers has
    them; the model becomes what was saved."""
    shutil.rmtree(folder, ignore_errors=True)
    rounded = copy.deepcopy(model).bfloat16()
    for mine, theirs in zip(model.model.layers, rounded.model.layers, strict=True):
        theirs.mlp.gate.balancing_biases = mine.mlp.gate.balancing_biases.clone()
    rounded.save_pretrained(folder)
    model.load_state_dict(rounded.state_dict())
    CetaneTokenizer(tokenizer, {"eos_token": "<eos>"}, (0,), None).save(folder)
    size = sum(path.stat().st_size for path in folder.iterdir())
    print(f"{folder}: {size / 1e6:.2f} MB, {model.num_parameters() / 1e6:.2f} M parameters")


def prove(model: ZayaForCausalLM, folder: Path, ids: list[int]) -> None:
    """The saved checkpoint in transformers and in cetane gives the logits of `forward`; text."""
    checkpoint = open_checkpoint(folder)
    recipe = parse_recipe({"name": "proof", "cache": {"context": 512}}, "proof")
    engine = authored_engine(Planner(checkpoint, recipe), checkpoint)
    theirs = ZayaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    # from_pretrained (5.x) writes its initial -1 over the skip's bias: read the file's again.
    theirs.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    with torch.no_grad():
        wanted = theirs(torch.tensor([ids])).logits[0]
        ours = forward(model, torch.tensor([ids]))[0]
    authored = torch.from_numpy(engine.session().feed(ids, "all"))
    for name, logits in (("this script", ours), ("cetane's authored engine", authored)):
        print(f"max |logits - transformers'| of {name}: {(logits - wanted).abs().max():.2e}")
    for prompt in PROMPTS:
        session, new = engine.session(), checkpoint.tokenizer.encode(prompt)
        written = list(new)
        for _ in range(48):
            row = session.feed(new)
            assert row is not None
            new = [int(row.argmax())]
            written += new
        print("-" * 40, checkpoint.tokenizer.decode(written), sep="\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, default=SHIPPED)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    files, held_out_files = sources()
    held_out_bytes = "".join(held_out_files).encode()
    tokenizer = train_tokenizer(files)
    text, held_out = tokenize(tokenizer, files), tokenize(tokenizer, held_out_files)
    print(
        f"{len(files)} files, {sum(map(len, files)) / 1e6:.1f} MB, {len(text) / 1e6:.2f} M tokens; "
        f"held out: {len(held_out_files)} files, {len(held_out_bytes)} bytes"
    )
    per_byte = len(held_out) / len(held_out_bytes)
    baselines = {
        "zlib -9": 8 * len(zlib.compress(held_out_bytes, 9)) / len(held_out_bytes),
        "xz -9": 8 * len(lzma.compress(held_out_bytes, preset=9)) / len(held_out_bytes),
    }
    unigram, bigram = ngram_bits(text, held_out)
    baselines |= {"unigram": unigram * per_byte, "bigram": bigram * per_byte}

    model = new_model()
    train(model, text, options.minutes)
    trained = held_out_bits(model, held_out, 512) * per_byte
    save(model, tokenizer, options.output)
    print("held-out bits a byte:", ", ".join(f"{k} {v:.3f}" for k, v in baselines.items()))
    rounded = held_out_bits(model, held_out, 512, show=True) * per_byte
    longer = held_out_bits(model, held_out, 1024) * per_byte
    print(f"ZAYA {trained:.3f}; rounded to bf16 {rounded:.3f}; windows of 1024 {longer:.3f}")
    prove(model, options.output, held_out[:512].tolist())


if __name__ == "__main__":
    main()
