"""The contract: names and shapes of the tensors between ANEMLL's hosts and its packages."""

from collections.abc import Iterator
from dataclasses import dataclass

from cetane.export.refusals import MOST_ROWS

META = "meta.yaml"
"""The file that tells hosts a folder's sizes and names."""
STATE = "model_model_kv_cache_0"
"""The state of all packages. A host makes it once, from the first chunk's `prefill`."""
INFER, PREFILL = "infer", "prefill"
ROTATE = "_rotate"
"""The ending of functions for positions beyond the window."""
BATCH = 64
"""Tokens of a prefill for a recipe that has none; their own default."""
PARTS = {"gemma2": 16, "gemma3_text": 16, "qwen2": 16, "qwen3": 16}
"""Parts of the logits that their converters make, by architecture; 8 for others."""
PREFIXES = {"gemma3_text": "gemma3", "gemma2": "gemma2", "qwen2": "qwen25"}
"""Prefixes of file names, by architecture, where they differ from its name."""
ASSUMED_WINDOW = 512
"""The window that the app assumes for the prefix gemma3 with a longer context, if `meta.yaml` names
none."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class FolderSizes:
    """The sizes in `meta.yaml` and `config.json` that decide every shape."""

    hidden: int
    vocab: int
    context: int
    batch: int
    parts: int
    window: int | None
    """The window of sliding layers, if it is shorter than the context."""
    choose: bool
    """Whether the head gives only the largest logit of every part."""

    @property
    def rows(self) -> int:
        """Rows of each part: all have as many, since a host counts offsets in them."""
        return -(-self.vocab // self.parts)

    def functions(self) -> Iterator[tuple[str, int]]:
        """The functions of a chunk, and their tokens."""
        for suffix in ("", *([ROTATE] if self.window else [])):
            yield INFER + suffix, 1
            yield PREFILL + suffix, self.batch

    def inputs(self, tokens: int) -> dict[str, tuple[str, Shape]]:
        """The types and shapes of a chunk's inputs."""
        return {
            "hidden_states": ("fp16", (1, tokens, self.hidden)),
            "position_ids": ("int32", (tokens,)),
            "causal_mask": ("fp16", (1, 1, tokens, self.context)),
            "current_pos": ("int32", (1,)),
        }

    def outputs(self, tokens: int, last: bool) -> dict[str, tuple[str, Shape]]:
        """The types and shapes of a chunk's outputs. The last chunk's prefill gives one hidden
        state, which no host reads."""
        return {"output_hidden_states": ("fp16", (1, 1 if last else tokens, self.hidden))}

    def head_outputs(self) -> dict[str, tuple[str, Shape]]:
        """The types and shapes of the head's outputs."""
        if self.choose:
            return {
                "argmax_idx": ("int32", (self.parts,)),
                "argmax_val": ("fp16", (self.parts,)),
            }
        return {
            f"logits{part + 1}": ("fp16", (1, 1, self.rows)) for part in range(self.parts)
        }  # fmt: skip


@dataclass(frozen=True)
class Names:
    """The names of the folder's packages, without endings."""

    prefix: str
    chunks: int

    @property
    def embeddings(self) -> str:
        return f"{self.prefix}_embeddings"

    @property
    def lm_head(self) -> str:
        return f"{self.prefix}_lm_head"

    def chunk(self, number: int) -> str:
        """The name of a chunk, counted from 1."""
        return f"{self.prefix}_FFN_PF_chunk_{number:02}of{self.chunks:02}"

    @property
    def all(self) -> tuple[str, ...]:
        chunks = (self.chunk(number + 1) for number in range(self.chunks))
        return self.embeddings, *chunks, self.lm_head


def assumes_window(prefix: str, context: int) -> bool:
    """Whether the app assumes a window if `meta.yaml` names none."""
    return prefix.lower().startswith("gemma3") and context > ASSUMED_WINDOW


def parts_for(architecture: str, vocab: int, group: int) -> int:
    """The number of parts: as many as their converters make, if these are equal parts of whole
    groups of rows; else fewer. If no number divides the vocabulary, its last part is padded."""
    most = PARTS.get(architecture, 8)
    halves = [most >> shift for shift in range(most.bit_length())]
    small = [parts for parts in halves if -(-vocab // parts) <= MOST_ROWS]
    equal = [parts for parts in small if vocab % (parts * group) == 0]
    padded = [parts for parts in small if -(-vocab // parts) * (parts - 1) < vocab]
    return next(iter([*equal, *padded]), 1)
