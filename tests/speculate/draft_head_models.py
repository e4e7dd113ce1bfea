"""Random draft heads, as torch modules and as shards of bundles."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from cetane.bundle import Bundle
from cetane.bundle.draft_heads import DraftHead
from cetane.bundle.tables import Tables
from cetane.engine.engine import Engine
from cetane.schema.draft_head import Training
from cetane.schema.plan import Plan
from cetane.speculate.draft_heads.build import add_draft_head
from cetane.speculate.draft_heads.modules import DraftHeadConfig, TorchDraftHead, make_draft_head

STEPS = 3
NOTHING = Training(
    data={}, windows=0, length=0, held_out=0, positions=0, top1=(0.0,), accepted=(0.0,)
)


class InMemory(Bundle):
    """A bundle whose model is an engine in memory; its heads are files."""

    def __init__(self, path: Path, engine: Engine) -> None:
        self.path, self.engine = path, engine

    @property
    def plan(self) -> Plan:
        return self.engine.plan

    @property
    def digest(self) -> str:  # type: ignore[override]
        return "ab" * 32

    @property
    def manifest(self) -> Any:
        return SimpleNamespace(source="a tiny model")

    def tables(self) -> Tables:
        return self.engine.tables


def random_draft_head(
    kind: str,
    bundle: Bundle,
    rows: int = 40,
    steps: int = STEPS,
    weights: str = "fp16",
    **seed: int,
) -> TorchDraftHead:
    """A head in which every weight matters, which proposes some tokens of the bundle."""
    hidden, vocab = bundle.plan.hidden, bundle.plan.vocab
    config: dict[str, Any] = {
        "kind": kind, "rows": rows, "steps": steps, "eps": 1e-5, "weights": weights
    }  # fmt: skip
    head = make_draft_head(DraftHeadConfig(hidden=hidden, bundle=bundle.digest, **config))
    random = torch.Generator().manual_seed(seed.get("seed", 0))
    with torch.no_grad():
        for name, tensor in head.state_dict().items():
            if tensor.is_floating_point():
                noise = torch.randn(tensor.shape, generator=random)
                gain = name.startswith("norm")
                tensor.copy_(1 + 0.2 * noise if gain else noise * hidden**-0.5)
    chosen = torch.randperm(vocab, generator=random)[:rows]
    head.vocabulary.copy_(chosen.sort().values)
    head.round()
    return head.eval().requires_grad_(False)


def held_out(bundle: Bundle, windows: int = 2, length: int = 24) -> torch.Tensor:
    random = torch.Generator().manual_seed(5)
    return torch.randint(1, bundle.plan.vocab, (windows, length), generator=random)


def with_draft_head(bundle: Bundle, head: TorchDraftHead) -> DraftHead:
    """The head as a shard of the bundle."""
    return add_draft_head(bundle, head, held_out(bundle), NOTHING)


@torch.inference_mode()
def rollout(
    head: TorchDraftHead, features: np.ndarray, tokens: list[int], embedding: Any
) -> dict[tuple[int, ...], float]:
    """The chances, by the torch head, of texts after tokens of which all but the last have
    `features (n - 1, 3, C)`: of the best one of each length, and of those that differ from it in
    their last token. By `teach`, on the whole text anew for every token; the likeliest first."""
    drafted: list[int] = []
    chances, chance = {}, 1.0
    padded = np.zeros((len(features) + STEPS + 1, *features.shape[1:]), np.float32)
    padded[: len(features)] = features
    for step in range(head.config.steps):
        text = [*tokens, *drafted]
        text += [0] * (len(padded) - len(text))
        embedded = torch.from_numpy(np.array(embedding[np.array(text)], np.float32))
        logits = head.teach(torch.from_numpy(padded)[None], embedded[None])[step]
        shares = logits[0, len(features) - 1].softmax(0)
        for token, share in zip(head.vocabulary.tolist(), shares.tolist(), strict=True):
            chances[*drafted, token] = chance * share
        drafted.append(int(head.vocabulary[shares.argmax()]))
        chance = chances[tuple(drafted)]
    return dict(sorted(chances.items(), key=lambda pair: -pair[1]))
