"""The modules that are traced: cetane's blocks behind ANEMLL's inputs and outputs."""

import torch
from torch import Tensor, nn

from cetane.export.anemll.contract import FolderSizes
from cetane.families import Block, CacheSpec, Flow, Head, Model, Shard, Stateful
from cetane.schema.function import Function
from cetane.schema.interface import MASKED, Input, Mask, Position, Rotary


class Ring(Stateful):
    """A window's slots when all are in use: the next columns replace the oldest.

    Their converter shifts the whole window in place. Its hosts feed the last token of a prompt
    twice, so a shifted window would lose a token. Here, the second time writes the same slot.
    """

    def write(self, layer: int, cache: Tensor, new: Tensor) -> Tensor:
        if new.shape[-1] == 1:
            return super().write(layer, cache, new)
        # The first token still sees columns that the call replaces, so it reads before it writes.
        _, heads, dim, slots = self.spec.shape
        joined = torch.cat([cache[layer : layer + 1, :heads, :dim, :slots], new], -1)
        super().write(layer, cache, new)
        return joined


class Chunk(Shard):
    """Some layers: `forward(hidden_states, position_ids, causal_mask, current_pos)`.

    Hosts hide keys with minus infinity, which becomes finite here. A prefill starts at a multiple
    of its batch, which divides the window; so in a ring, its columns are neighbours.
    """

    own: Tensor
    columns: Tensor
    slots: Tensor

    def __init__(
        self,
        model: Model,
        blocks: tuple[Block, ...],
        caches: tuple[CacheSpec, ...],
        inner: Function,
        sizes: FolderSizes,
        last: bool,
    ) -> None:
        """`inner` is the function as cetane's engine would call it. The `last` chunk's prefill
        gives one hidden state."""
        super().__init__(model, blocks, caches, (), inner.inputs, inner.outputs)
        self.sizes, self.tokens, self.last = sizes, inner.tokens, last
        self.rings = {spec.group for spec in caches if spec.form is Ring}
        self.counts = {spec.group: spec.slots for spec in caches}
        for table in {i.source.table for i in inner.inputs if isinstance(i.source, Rotary)}:
            for part, rows in zip(
                ("cos", "sin"), model.rotary[table].cos_sin(sizes.context), strict=True
            ):
                self.register_buffer(f"table_{part}_{table}", rows)
        query = torch.arange(inner.tokens)
        hidden = query[:, None] < query
        self.register_buffer("own", torch.where(hidden, MASKED, 0.0)[None, None])
        self.register_buffer("columns", query[:, None])
        self.register_buffer("slots", torch.arange(sizes.window or 1)[None])

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        hidden, positions, mask, current = tensors
        mask = mask.clamp(MASKED, 0)
        given = (self.given(item, hidden, positions, mask, current) for item in self.inputs)
        (made,) = super().forward(*given)
        rows = made.flatten(2).transpose(1, 2)
        return (rows[:, :1] if self.last and self.tokens > 1 else rows,)

    def given(
        self, item: Input, hidden: Tensor, positions: Tensor, mask: Tensor, current: Tensor
    ) -> Tensor:
        """An input of cetane's shard, made from theirs."""
        match item.source:
            case Rotary(table=table, part=part):
                rows = nn.functional.embedding(positions, self.get_buffer(f"table_{part}_{table}"))
                return rows.transpose(0, 1)[None, None]
            case Mask(group=group):
                return self.mask(group, mask, positions)
            case Position(group=group):
                ring = group in self.rings
                return torch.remainder(current, self.counts[group]) if ring else current
        return hidden.transpose(1, 2).reshape(item.shape)

    def mask(self, group: str, mask: Tensor, positions: Tensor) -> Tensor:
        """The mask of a group's layers. Where a ring is in use, their mask shows all its slots."""
        count = self.counts[group]
        shown = mask[..., :count]
        if group not in self.rings or self.tokens == 1:
            return shown
        # Token i hides the slots of the call's first i + 1 columns: older tokens are in them.
        replaced = self.slots - torch.remainder(positions[:1], count)
        hides = (replaced >= 0) & (replaced <= self.columns)
        return torch.cat([torch.where(hides, MASKED, 0.0)[None, None], self.own], 3)


class Embeddings(nn.Module):
    """The embedding: `input_ids (1, T)` -> `hidden_states (1, T, C)`."""

    def __init__(self, lookup: Block) -> None:
        super().__init__()
        self.lookup = (lookup,)

    def forward(self, ids: Tensor) -> tuple[Tensor, ...]:
        flow: Flow = {"token_ids": ids}
        self.lookup[0](flow, {})
        return (flow["hidden"].flatten(2).transpose(1, 2),)


class LmHead(nn.Module):
    """The head without its norm: `hidden_states (1, 1, C)` -> parts of logits, all of equal size.

    With `choose`, only the largest logit of every part and its row in the part.
    """

    def __init__(self, heads: tuple[Head, ...], sizes: FolderSizes, softcap: float | None) -> None:
        super().__init__()
        self.heads, self.sizes, self.softcap = heads, sizes, softcap

    def forward(self, hidden: Tensor) -> tuple[Tensor, ...]:
        x = hidden.transpose(1, 2)[:, :, None]
        parts = [self.part(head, x) for head in self.heads]
        if not self.sizes.choose:
            return tuple(parts)
        rows = [part.argmax(2).to(torch.int32).reshape(1) for part in parts]
        return torch.cat(rows), torch.cat([part.amax(2).reshape(1) for part in parts])

    def part(self, head: Head, x: Tensor) -> Tensor:
        """A part's logits. Rows beyond the vocabulary are never the largest."""
        logits = head.lm_head(x).reshape(1, 1, -1)
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        missing = self.sizes.rows - logits.shape[2]
        return nn.functional.pad(logits, (0, missing), value=MASKED) if missing else logits
