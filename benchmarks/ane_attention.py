"""Errors of attention under the executor's "ane" arithmetic: beside the published ones, and of
cetane's own graphs at the key counts that ship. docs/explanation/precision.md has the tables.

    python benchmarks/ane_attention.py [--keys 512 2048 4096 8192 32768]
"""

import argparse

import torch

from cetane.families.grouped_query import AttentionHeads, attend
from cetane.mil.ane import matmul
from common import report

HEADS = AttentionHeads(32, 8, 128, 128**-0.5)
"""As in the published experiment: 32 query heads, 8 of keys and values, 128 channels."""
KEYS, BLOCK = 4096, 1024
PUBLISHED = {
    "softmax, then times V": "5.22 to 5.42",
    "blocks of 1,024": "1.01",
    "exponentials times V, then divided": "0.106 to 0.113",
    "weights times 16": "0.22",
    "weights times 64": "0.060",
}
"""Relative errors on an M5 Pro in percent (llms-on-apple-neural-engine,
findings/attention-product-precision, commit 2159b565)."""
SPREADS = (1.0, 1.0), (1.5, 0.5)
"""Standard deviations of scores and of values: the experiment does not name its inputs."""
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def draw(keys: int, scores: float, values: float) -> Tensors:
    """Normal q, k, v of fp16 numbers, `(1, heads, 128, 1 or keys)`."""
    random = torch.Generator().manual_seed(0)
    shapes = ((1, 32, 128, 1), scores), ((1, 8, 128, keys), 1.0), ((1, 8, 128, keys), values)
    q, k, v = ((spread * torch.randn(s, generator=random)).half().float() for s, spread in shapes)
    return q, k, v


def error(made: torch.Tensor, true: torch.Tensor) -> float:
    """The relative error, in percent."""
    return 100 * float((made.double() - true).norm() / true.norm())


def forms(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, float]:
    """The errors of the published forms."""
    rows = q.reshape(1, 8, 4, 128)
    scores = rows @ k * HEADS.scale
    exact = torch.softmax(scores.double(), -1)
    values = v.transpose(2, 3)
    true = exact @ values.double()

    def times(weights: torch.Tensor, part: slice = slice(None)) -> torch.Tensor:
        return matmul(weights.half().float(), values[:, :, part]).half().float()

    top = scores.half().float().amax(-1, keepdim=True)
    powers = torch.exp((scores.half().float() - top).half().float()).half().float()
    blocks, shares = [], []
    for start in range(0, KEYS, BLOCK):
        part = slice(start, start + BLOCK)
        blocks.append(times(torch.softmax(scores[..., part], -1), part))
        shares.append(exact[..., part].sum(-1, keepdim=True))
    made = {
        "softmax, then times V": times(exact.float()),
        "blocks of 1,024": sum(b * s for b, s in zip(blocks, shares, strict=True)),
        "exponentials times V, then divided": times(powers) / powers.sum(-1, keepdim=True),
        "weights times 16": times(16 * exact.float()) / 16,
        "weights times 64": times(64 * exact.float()) / 64,
    }
    return {name: error(torch.as_tensor(value), true) for name, value in made.items()}


class Rounded(torch.overrides.TorchFunctionMode):
    """Torch functions as an executor of "ane" has them: results in fp16, products by its rules."""

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func in (torch.Tensor.matmul, torch.Tensor.__matmul__):
            return matmul(*args).half().float()
        made = func(*args, **(kwargs or {}))
        floats = isinstance(made, torch.Tensor) and made.is_floating_point()
        return made.half().float() if floats else made


def authored(keys: int, spread: tuple[float, float]) -> float:
    """The error of `attend` on some keys."""
    q, k, v = draw(keys, *spread)
    mask = torch.zeros(1, 1, 4, keys)
    true = torch.softmax((q.reshape(1, 8, 4, 128) @ k * HEADS.scale).double(), -1)
    true = (true @ v.transpose(2, 3).double()).reshape(1, 32, 128, 1)
    with Rounded():
        made = attend(q, k, v, mask, HEADS)
    return error(made, true)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keys", type=int, nargs="+", default=[512, 2048, 4096, 8192, 32768])
    options = parser.parse_args()
    columns = [forms(*draw(KEYS, *spread)) for spread in SPREADS]
    rows = [[n, text, *(c[n] for c in columns)] for n, text in PUBLISHED.items()]
    names = [f"scores {s}, values {v}" for s, v in SPREADS]
    report("published errors, %", ["form", "published", *names], rows, {}, as_json=False)
    own = [[keys, *(authored(keys, spread) for spread in SPREADS)] for keys in options.keys]
    report("cetane's attention, %", ["keys", *names], own, {}, as_json=False)


if __name__ == "__main__":
    main()
