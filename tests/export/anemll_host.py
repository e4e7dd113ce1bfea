"""ANEMLL's hosts as they are, in numpy: what they read of a folder, and what they do around its
packages (`YAMLConfig.swift`, `ModelLoader.swift`, `InferenceManager.swift`, `chat.py`; 45ce981).

Their oddities are kept: the last token of a prompt is fed twice, masks hold minus infinity, a
rotate function is left out silently, and a full context is cut to whole batches and fed anew.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import yaml

Model = Callable[[dict[str, np.ndarray], Any], dict[str, np.ndarray]]


class Folder:
    """The models of a folder, by the names that the app's loader derives."""

    def __init__(self, path: Path, load: Callable[[Path, str | None], Any]) -> None:
        """`load(package, function)` opens a model with `predict` and `make_state`."""
        values = yaml.safe_load((path / "meta.yaml").read_text())["model_info"]["parameters"]
        self.context = values.get("context_length", 2048)
        self.batch = values.get("batch_size", 32)
        self.parts = values.get("split_lm_head", 8)
        self.choose = values.get("argmax_in_model", False)
        self.sizes = values.get("lm_head_chunk_sizes")
        self.batches = values.get("prefill_dynamic_slice") or values.get("update_mask_prefill")
        self.window = values.get("sliding_window")
        prefix = values.get("model_prefix", "llama")
        if self.window is None and prefix.lower().startswith("gemma3") and self.context > 512:
            self.window = 512

        def opened(name: str, function: str | None = None) -> Any:
            return load(path / name.replace(".mlmodelc", ".mlpackage"), function)

        self.embeddings, self.lm_head = opened(values["embeddings"]), opened(values["lm_head"])
        self.chunks = []
        count = values.get("num_chunks", 1)
        for number in range(1, count + 1):
            name = values["ffn"].replace("_chunk_01of", f"_chunk_{number:02}of")
            chunk = {"infer": opened(name, "infer"), "prefill": opened(name, "prefill")}
            if self.window is not None:
                for function in ("infer_rotate", "prefill_rotate"):
                    try:
                        chunk[function] = opened(name, function)
                    except Exception:
                        print(f"{function} of {name} is not there")
            self.chunks.append(chunk)


class Host:
    """A conversation."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self.shifts: list[int] = []
        """The number of tokens that were kept whenever the context was full."""
        self.state = folder.chunks[0]["prefill"].make_state()

    def run(self, tokens: list[int], position: int, function: str) -> np.ndarray:
        """Run the chunks: the hidden states that the last one gives."""
        folder, count = self.folder, len(tokens)
        ids = np.array([tokens], np.int32)
        hidden = folder.embeddings.predict({"input_ids": ids})["hidden_states"]
        assert hidden.shape[:2] == (1, count)
        rows = position + np.arange(count)
        mask = np.where(np.arange(folder.context) <= rows[:, None], 0, -np.inf)[None, None]
        rotates = folder.window is not None and position >= folder.window
        for chunk in folder.chunks:
            model = chunk.get(f"{function}_rotate") if rotates else None
            given = {
                "hidden_states": hidden.astype(np.float16),
                "position_ids": rows.astype(np.int32),
                "causal_mask": mask.astype(np.float16),
                "current_pos": np.array([position], np.int32),
            }
            hidden = (model or chunk[function]).predict(given, self.state)["output_hidden_states"]
        return np.asarray(hidden)

    def next(self, token: int, position: int) -> int:
        """Feed one token, and choose greedily after it."""
        hidden = self.run([token], position, "infer").astype(np.float16)
        made = self.folder.lm_head.predict({"hidden_states": hidden})
        if self.folder.choose:
            best = int(np.argmax(made["argmax_val"]))
            sizes = self.folder.sizes or [0] * best
            return int(made["argmax_idx"][best]) + sum(sizes[:best])
        value, index = -np.inf, 0
        for part in range(1, self.folder.parts + 1):
            logits = made[f"logits{part}"].reshape(-1)
            if logits.max() > value:
                value, index = logits.max(), (part - 1) * logits.size + int(logits.argmax())
        return index

    def prefill(self, tokens: list[int]) -> int:
        """Whole batches, and then token by token. Returns the next position."""
        at = 0
        while self.folder.batches and at + self.folder.batch <= len(tokens):
            self.run(tokens[at : at + self.folder.batch], at, "prefill")
            at += self.folder.batch
        for position in range(at, len(tokens)):
            self.next(tokens[position], position)
        return len(tokens)

    def generate(self, prompt: list[int], count: int) -> list[tuple[list[int], int]]:
        """The next tokens, each with the tokens that were in the context."""
        tokens, made = list(prompt), []
        self.state = self.folder.chunks[0]["prefill"].make_state()
        position = self.prefill(tokens)
        while len(made) < count:
            if position >= self.folder.context - 2:
                tokens = tokens[position - self.kept : position]
                self.shifts.append(len(tokens))
                self.state = self.folder.chunks[0]["prefill"].make_state()
                position = self.prefill(tokens)
            new = self.next(tokens[position - 1], position - 1)
            made.append((list(tokens), new))
            tokens.append(new)
            position += 1
        return made

    @property
    def kept(self) -> int:
        """The tokens that stay when the context is full."""
        context, batch = self.folder.context, self.folder.batch
        return min(max(1, context // batch - 2) * batch, max(1, context - batch))
