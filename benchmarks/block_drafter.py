"""A block drafter as an experiment, beside EAGLE-3 and Medusa: all tokens of a draft from one call
of two layers, as DFlash does with five (shipstuff/mlx-ane-sd). All are trained on the same windows
for as many minutes, and judged by what would be accepted on windows that were held out.

    python benchmarks/block_drafter.py BUNDLE --text FILE --features FOLDER [--minutes 5]
        [--steps 3] [--kinds medusa eagle3 block]

Each place of a draft has a learned embedding. In both layers it attends to the text, by keys made
of the target's hidden states, and to all places of its draft. Nothing of it is a shard: a first
look at what such drafts would be worth.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cetane.bundle import Bundle
from cetane.engine.open import open_engine
from cetane.files import silent
from cetane.gates.quality import read_tokens
from cetane.pipeline.draft_head import embedding_of
from cetane.pipeline.draft_head_text import whole_windows
from cetane.pipeline.origin import checkpoint_of
from cetane.schema.draft_head import DraftHeadKind
from cetane.speculate.draft_heads.acceptance import acceptance
from cetane.speculate.draft_heads.modules import TAPS, DraftHeadConfig, Eagle3, apply_rotary
from cetane.speculate.draft_heads.train import devices, new_draft_head, train
from cetane.speculate.draft_heads.windows import collect, split
from common import report

LAYERS = 2


class Layer(nn.Module):
    """Attention to the text and to a draft's own places, then an MLP."""

    def __init__(self, hidden: int, eps: float, heads: int) -> None:
        super().__init__()
        self.heads, inner = heads, heads * Eagle3.WIDTH
        self.norm, self.norm_mlp = nn.RMSNorm(hidden, eps), nn.RMSNorm(hidden, eps)
        self.q = nn.Linear(hidden, inner, bias=False)
        self.kv = nn.Linear(hidden, 2 * inner, bias=False)
        self.out = nn.Linear(inner, hidden, bias=False)
        self.gate_up = nn.Linear(hidden, 6 * hidden, bias=False)
        self.down = nn.Linear(3 * hidden, hidden, bias=False)

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.heads, Eagle3.WIDTH)).permute(2, 0, 3, 1, 4)

    def forward(self, text: Tensor, places: list[Tensor], seen: Tensor) -> list[Tensor]:
        """`text (B, n, C)`; `places`: of the drafts after each token of it, `(B, n, C)` each;
        `seen (n, n + places * n)`."""
        known = [text, *(self.norm(place) for place in places)]
        pairs = [self.split(self.kv(x)) for x in known]
        keys = torch.cat([apply_rotary(pair[0]) for pair in pairs], 2)
        values = torch.cat([pair[1] for pair in pairs], 2)
        made = []
        for place, normed in zip(places, known[1:], strict=True):
            (query,) = self.split(self.q(normed))
            mixed = F.scaled_dot_product_attention(
                apply_rotary(query), keys, values, attn_mask=seen
            )
            h = place + self.out(mixed.transpose(1, 2).flatten(2))
            gate, up = self.gate_up(self.norm_mlp(h)).chunk(2, -1)
            made.append(h + self.down(F.silu(gate) * up))
        return made


class Block(Eagle3, kind="block"):
    """Its config says eagle3: it reads the same hidden states."""

    def __init__(self, config: DraftHeadConfig) -> None:
        super().__init__(config)
        for unused in ("qkv", "out", "gate_up", "down", "norm_mlp"):
            delattr(self, unused)
        hidden, heads = config.hidden, self.attention_heads
        self.join = nn.Linear(2 * hidden, hidden, bias=False)
        self.places = nn.Parameter(torch.randn(config.steps, hidden))
        self.layers = nn.ModuleList(Layer(hidden, config.eps, heads) for _ in range(LAYERS))

    def teach(self, features: Tensor, embedded: Tensor) -> list[Tensor]:
        count = features.shape[1] - 1
        feature = self.norm_features(self.fuse(features[:, :count].flatten(2)))
        text = self.join(torch.cat([self.norm_embedded(embedded[:, 1:]), feature], -1))
        at = torch.arange(count, device=features.device)
        before, same = at[:, None] >= at, at[:, None] == at
        seen = torch.cat([before, *(same for _ in self.places)], 1)
        places = [text + place for place in self.places]
        for layer in self.layers:
            places = layer(text, places, seen)
        return [self.logits(h)[:, : count - step] for step, h in enumerate(places)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--text", type=Path, action="append", required=True)
    parser.add_argument("--features", type=Path, required=True)
    parser.add_argument("--kinds", nargs="+", default=["medusa", "eagle3", "block"])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--window", type=int, default=256)
    options = parser.parse_args()
    bundle = Bundle(options.bundle)
    engine, checkpoint = open_engine(bundle), checkpoint_of(bundle)
    ids = whole_windows(
        [read_tokens(bundle.tokenizer, path, 10**7) for path in options.text], options.window
    )
    folder = options.features / bundle.digest
    learned, held = split(collect(engine, ids, options.window, silent, folder))
    embedding, rows = embedding_of(bundle), []
    for kind in options.kinds:
        known: DraftHeadKind = "eagle3" if kind == "block" else kind
        head = new_draft_head(known, bundle, checkpoint, learned, 8192, options.steps)
        if kind == "block":
            torch.manual_seed(0)
            made = Block(head.config)
            made.vocabulary, made.output, made.norm = head.vocabulary, head.output, head.norm
            head = made
        train(head, learned, embedding, options.epochs, options.minutes, 4, silent, devices())
        found = acceptance(head, held, embedding)
        right = " ".join(f"{share:.3f}" for share in found.top1)
        whole = " ".join(f"{share:.3f}" for share in found.accepted)
        size = sum(p.numel() for p in head.parameters()) / 1e6
        rows.append([kind, size, right, whole, 1 + sum(found.accepted), found.positions])
        print(rows[-1], flush=True)
    columns = ["drafter", "own M weights", "right by place", "right with all before",
               "tokens a call", "positions"]  # fmt: skip
    report(f"{TAPS} depths, drafts of {options.steps}", columns, rows, {}, as_json=False)


if __name__ == "__main__":
    main()
