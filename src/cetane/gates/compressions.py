"""Judges many compressions of one model without lowering any.

The model's authored modules run in fp32. Their weights are encoded and decoded again, as a
compression's constants would be.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch

from cetane.bundle.rows import ROW_FORMATS, RowFormat
from cetane.bundle.tables import Tables, TokenRows
from cetane.checkpoint import Checkpoint
from cetane.compress import Selection, parse_format
from cetane.engine.authored import authored_engine
from cetane.engine.backend import Array
from cetane.engine.call import columns
from cetane.engine.generate import generate
from cetane.engine.sampling import Sampler
from cetane.errors import CetaneError
from cetane.families import Block, Weight
from cetane.gates import metrics
from cetane.gates.probes import windows
from cetane.planner import Encoder, Planner
from cetane.planner.weights import format_of, weight_count
from cetane.schema.function import Route, Step
from cetane.schema.recipe import Mode, Recipe, RowFormatName, parse_recipe
from cetane.tasks.processes import installed_memory

PREFILL, VERIFY = 128, 32
"""The tokens of a call: many for texts, few for prompts."""
MODES: tuple[Mode, ...] = ("prefill", "verify", "decode")
ROWS = 64
"""The rows of logits that are in float64 at a time."""
FP16 = parse_format("fp16")


@dataclass(frozen=True)
class CompressionDistance:
    """The distance of a compressed model from the fp16 weights, on some tokens."""

    perplexity: float
    reference: float
    """The perplexity of the fp16 weights."""
    kl: float
    """The mean KL of a token's predictions, in nats."""
    top1: float
    """The share of tokens after which both predict the same best token."""
    cosines: dict[str, float]
    """The mean cosine of a token's hidden states, by shard."""


@dataclass(frozen=True)
class Window:
    """Tokens, and a model's results on them: logits `(n, V)`, and hidden states `(n, C)` after each
    shard."""

    tokens: Sequence[int]
    logits: Array
    hidden: dict[str, Array]


class Parameter:
    """One weight of a block, with its current format."""

    def __init__(self, block: Block, path: str, weight: Weight) -> None:
        self.block, self.path, self.weight = block, path, weight
        self.stored: tuple[str, str] | None = None
        """The format of its values, and what they were fitted by."""

    def store(self, encoder: Encoder) -> None:
        """Give the module the weight, encoded and decoded again."""
        form = format_of(self.weight, encoder.compression)
        by = encoder.fitted_by if form.bits < FP16.bits else ""
        if self.stored == (form.name, by):
            return
        parameter = self.block.get_parameter(self.path).data
        halves = parameter.to(torch.float16).numpy() if self.stored == (FP16.name, "") else None
        parameter.copy_(torch.from_numpy(encoder(self.weight, halves).decode()))
        self.stored = form.name, by

    def round(self) -> None:
        """Round the module's own weight to fp16."""
        parameter = self.block.get_parameter(self.path).data
        parameter.copy_(parameter.to(torch.float16))
        self.stored = FP16.name, ""


class RoundedRows:
    """A table's rows, encoded in a format and decoded again, as a bundle gives them."""

    def __init__(self, rows: TokenRows, row_format: RowFormat) -> None:
        self.rows, self.row_format, self.shape = rows, row_format, rows.shape

    def __getitem__(self, tokens: Any) -> Array:
        return self.row_format.decode(self.row_format.encode(np.asarray(self.rows[tokens])))


class Judge:
    """Judges compressions of one model, whose weights it holds in fp32, against fp16 weights."""

    def __init__(self, checkpoint: Checkpoint, recipe: Recipe, window: int | None = None) -> None:
        """`window` is the most tokens that are judged together; by default the context.

        Raises CetaneError for a model that this machine cannot hold."""
        self.checkpoint = checkpoint
        self.planner = Planner(checkpoint, plain(recipe, window))
        check_memory(self.planner)
        self.engine = authored_engine(self.planner, checkpoint)
        for shard in self.planner.members:
            self.engine.open(shard)
        self.tables = self.engine.tables
        blocks = chain.from_iterable(self.planner.members.values())
        self.parameters = [Parameter(b, path, w) for b in blocks for path, w in b.weights()]
        for parameter in self.parameters:
            parameter.round()

    def compress(self, selection: Selection) -> None:
        """Store every weight in the format of a selection. Weights already in it are kept."""
        encoder = Encoder(self.checkpoint, selection)
        for parameter in self.parameters:
            parameter.store(encoder)

    def store_rows(self, rows: RowFormatName) -> None:
        """Store the tables' rows in a format."""
        tables, row_format = self.tables, ROW_FORMATS[rows]
        tokens = None if tables.tokens is None else RoundedRows(tables.tokens, row_format)
        others = {name: RoundedRows(table, row_format) for name, table in tables.others.items()}
        self.engine.tables = Tables(tokens, tables.rotary, dict(others))

    def read(self, tokens: Sequence[int]) -> Iterator[Window]:
        """The model's results on a text, in windows of the context, each in a new session."""
        for piece in windows(tokens, self.planner.recipe.cache.context):
            yield self.window(piece)

    def window(self, tokens: Sequence[int]) -> Window:
        seen: dict[str, list[Array]] = {}

        def keep(step: Step | Route, name: str, value: Array, count: int) -> None:
            if name == "hidden_out":
                seen.setdefault(step.shard, []).append(columns(value)[:, :count].T)

        logits = self.engine.session(MODES, watch=[keep]).feed(tokens, "all")
        assert logits is not None
        return Window(tokens, logits, {name: np.concatenate(rows) for name, rows in seen.items()})

    def compare(self, truth: Sequence[Window]) -> CompressionDistance:
        """The current model, compared with earlier results on the same windows."""
        losses: list[Array] = []
        references: list[Array] = []
        kl: list[Array] = []
        top1: list[Array] = []
        cosines: dict[str, list[Array]] = {}
        for before in truth:
            now = self.window(before.tokens)
            for shard, hidden in before.hidden.items():
                cosines.setdefault(shard, []).append(metrics.cosine(now.hidden[shard], hidden))
            targets = np.asarray(before.tokens[1:])
            for start in range(0, len(targets), ROWS):
                rows = slice(start, min(start + ROWS, len(targets)))
                q, p = (self.predictions(w.logits[rows]) for w in (now, before))
                losses.append(metrics.losses(q, targets[rows]))
                references.append(metrics.losses(p, targets[rows]))
                kl.append(metrics.kl(q, p))
                top1.append(metrics.contains_top(now.logits[rows], before.logits[rows], 1))
        return CompressionDistance(
            perplexity=metrics.perplexity(losses),
            reference=metrics.perplexity(references),
            kl=metrics.written(np.concatenate(kl).mean()),
            top1=float(np.concatenate(top1).mean()),
            cosines={shard: float(np.concatenate(c).mean()) for shard, c in cosines.items()},
        )

    def predictions(self, logits: Array) -> Array:
        """Log probabilities `(n, V)`. Tokens that the head lacks get the subset's `missing` share,
        as in a bundle's perplexity: their logits are infinite in both models."""
        subset, q = self.planner.recipe.head.subset, metrics.log_softmax(logits)
        if subset is None:
            return q
        return metrics.with_missing(q, self.engine.plan.choosable, subset.missing)

    def answer(self, prompt: Sequence[int], length: int) -> list[int]:
        """Greedy tokens after a prompt, up to a stop token."""
        stop = self.checkpoint.tokenizer.eos_ids
        return list(generate(self.engine.session(MODES), prompt, Sampler(), length, stop))


def check_memory(planner: Planner) -> None:
    """Raise CetaneError if the weights in fp32 exceed this machine's memory: else the system would
    end the process later."""
    size = 4 * weight_count(planner.blocks)
    if size > (most := installed_memory()):
        raise CetaneError(
            f"judging compressions takes all weights in fp32, {size / 1e9:.1f} GB, and this "
            f"machine has {most / 1e9:.1f} GB of memory",
            "name the formats, and leave --bits out: --set compression.default=int8-per-channel "
            "--set embedding.format=int8",
        )


def plain(recipe: Recipe, window: int | None = None) -> Recipe:
    """A recipe that is quick to judge, with fp16 weights, and without parts that change no value.
    Its context is `window` tokens at most."""
    content = recipe.model_dump()
    context = min(recipe.cache.context, window or recipe.cache.context)
    content["cache"] |= {
        "context": context, "contract": "readonly", "sliding": None, "capacities": (),
        "padded": False, "state_heads": 1,
    }  # fmt: skip
    content["tokens"] = {
        "prefill": min(PREFILL, context), "verify": min(VERIFY, context), "shapes": "static",
    }  # fmt: skip
    content["layout"]["routed"] = ()
    content["head"]["choose"] = False
    content["lowering"] = {}
    content["compression"] = {}
    return parse_recipe(content, recipe.name)
