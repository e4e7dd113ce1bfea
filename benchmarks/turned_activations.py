"""What turned channels do for activations of 8 bits: W8A8 with and without `compression.rotate`.

Every linear layer but the head rounds its inputs and its outputs to one static scale a tensor, as
coremltools' passes do. The ranges are those of four passages of the gates' prose. It is computed in
torch, without packages: for the plain model it is near the row "W8A8 real" of
benchmarks/activations.py. Judged on the first tokens of the standard library's documentation.

    python benchmarks/turned_activations.py MODEL
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from cetane.checkpoint import open_checkpoint
from cetane.compress import parse_format
from cetane.gates.probes import texts
from cetane.gates.reference import Reference
from cetane.planner import as_recipe_asks
from cetane.schema.changes import override
from cetane.schema.recipe import load_recipe
from common import arguments, report, standard_library_text

PASSAGES, LENGTH, LIMIT = 4, 256, 127
HEAD = "lm_head"
GATED = "down_proj"
"""The layer that reads a gated product."""
Wanted = Callable[[str], bool]
WAYS: dict[str, tuple[Wanted, Wanted]] = {
    "W8A16": (lambda _: False, lambda _: False),
    "W8A8": (lambda _: True, lambda _: True),
    "W8A8, inputs alone": (lambda _: True, lambda _: False),
    "W8A8, inputs but gated products": (lambda name: GATED not in name, lambda _: False),
}
"""The layers whose inputs, and whose outputs, are rounded."""


class Subject:
    """One model with int8 weights, and the ranges of its layers' inputs and outputs."""

    def __init__(self, model: Any, passages: list[list[int]], judged: list[int]) -> None:
        self.model, self.ids = model, torch.tensor([judged])
        self.truth = self.run()
        layers = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
        self.layers = {name: layer for name, layer in layers.items() if name != HEAD}
        form = parse_format("int8-per-channel")
        for layer in layers.values():
            rounded = form.encode(layer.weight.half().numpy()).decode()
            layer.weight.data = torch.from_numpy(rounded).float()
        self.largest: dict[str, list[float]] = {name: [0.0, 0.0] for name in self.layers}
        with ExitStack() as stack:
            for name, layer in self.layers.items():
                stack.callback(layer.register_forward_hook(partial(self.see, name)).remove)
            for passage in passages:
                model(torch.tensor([passage]))

    def see(self, name: str, _layer: nn.Module, inputs: tuple[Tensor], made: Tensor) -> None:
        for side, x in enumerate((inputs[0], made)):
            self.largest[name][side] = max(self.largest[name][side], float(x.abs().max()))

    @contextmanager
    def rounding(self, inputs: Wanted, outputs: Wanted) -> Iterator[None]:
        with ExitStack() as stack:
            for name, layer in self.layers.items():
                one, other = self.largest[name]
                if inputs(name):
                    before = partial(lambda most, _, x: (rounded(x[0], most),), one)
                    stack.callback(layer.register_forward_pre_hook(before).remove)
                if outputs(name):
                    after = partial(lambda most, _, x, y: rounded(y, most), other)
                    stack.callback(layer.register_forward_hook(after).remove)
            yield

    def run(self) -> tuple[Tensor, Tensor]:
        """Logarithms of the shares `(T, V)`, and the last hidden states `(T, C)`, float64."""
        made = self.model(self.ids, output_hidden_states=True)
        return made.logits[0].double().log_softmax(-1), made.hidden_states[-1][0].double()

    def perplexity(self, logs: Tensor) -> float:
        return float((-logs[:-1].gather(1, self.ids[0, 1:, None])).mean().exp())

    def row(self) -> list[float]:
        """Perplexity, KL, top-1 and the cosine of the last hidden states."""
        (q, hidden), (p, before) = self.run(), self.truth
        kl = (p.exp() * (p - q)).sum(-1)[:-1].mean()
        top = (p.argmax(-1) == q.argmax(-1))[:-1].double().mean()
        cosine = torch.cosine_similarity(hidden, before, dim=-1)
        return [self.perplexity(q), float(kl), float(top), float(cosine.mean())]


def rounded(x: Tensor, most: float) -> Tensor:
    """Integers of 8 bits times the tensor's scale."""
    return (x * (LIMIT / most)).round().clamp(-LIMIT, LIMIT) * (most / LIMIT)


@torch.no_grad()
def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--tokens", type=int, default=512)
    options = parser.parse_args()
    recipe = override(load_recipe("int8"), {"cache.context": options.tokens})
    checkpoint = open_checkpoint(options.model)
    encode = checkpoint.tokenizer.encode
    prose = encode(texts())
    passages = [prose[at * LENGTH :][:LENGTH] for at in range(PASSAGES)]
    judged = encode(standard_library_text().read_text())[: options.tokens]
    rows: list[list[Any]] = []
    for turn in (False, True):
        source = as_recipe_asks(checkpoint, override(recipe, {"compression.rotate": turn}))
        subject = Subject(Reference(source, own=True).model, passages, judged)
        for name, ways in WAYS.items():
            with subject.rounding(*ways):
                rows.append([name, "turned" if turn else "own", *subject.row()])
        for end in ("o_proj", GATED):
            most = [v for name, v in subject.largest.items() if name.endswith(end)]
            print(f"{end}: inputs up to {max(a for a, _ in most):.0f}, outputs "
                  f"{max(b for _, b in most):.0f}")  # fmt: skip
    columns = ["what", "channels", "perplexity", "KL", "top-1", "cosine"]
    whole = subject.perplexity(subject.truth[0])
    report(
        f"{options.tokens} tokens, the model's perplexity {whole:.3f}",
        columns,
        rows,
        {"rows": rows},
        options.json,
    )


if __name__ == "__main__":
    main()
