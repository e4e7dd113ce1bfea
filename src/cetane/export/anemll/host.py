"""ANEMLL's hosts as they are, in numpy: what they read of a folder, and what they do around its
packages (`YAMLConfig.swift`, `ModelLoader.swift`, `InferenceManager.swift`, `chat.py`; 45ce981).

Their oddities are kept. The last token of a prompt is fed twice, and masks hold minus infinity. A
rotate function is left out silently. A full context is cut to whole batches and fed anew.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import yaml

from cetane.engine.portable import ReferenceProgram
from cetane.errors import CetaneError
from cetane.export.anemll.contract import INFER, META, PREFILL, ROTATE
from cetane.mil import load

Array = npt.NDArray[Any]


class Model(Protocol):
    """A function of a package, as coremltools' `MLModel` has it."""

    def make_state(self) -> Any: ...
    def predict(self, inputs: Mapping[str, Array], state: Any = None, /) -> dict[str, Array]: ...


class PortableModel:
    """A function of a package on cetane's executor."""

    def __init__(self, program: ReferenceProgram, function: str) -> None:
        self.program, self.function = program, function

    def make_state(self) -> Any:
        return self.program.make_state(self.function)

    def predict(self, inputs: Mapping[str, Array], state: Any = None, /) -> dict[str, Array]:
        return self.program.call(self.function, dict(inputs), state)


class PortableModels:
    """Opens functions on cetane's reference executor, in fp32.

    Functions of a package share its weights. Compiled graphs would copy the one state of all layers
    for each layer: 10 GB for SmolLM2-135M, where the reference needs 2.
    """

    def __init__(self) -> None:
        self.programs: dict[Path, ReferenceProgram] = {}

    def __call__(self, package: Path, function: str | None) -> PortableModel:
        if package not in self.programs:
            self.programs[package] = ReferenceProgram(load(package), "fp32")
        program = self.programs[package]
        return PortableModel(program, function or program.program.default)


class Folder:
    """The models of a folder, by the names that the app's loader derives."""

    def __init__(self, path: Path, load: Callable[[Path, str | None], Model]) -> None:
        """`load(package, function)` opens a model. Where there is no such function, it raises a
        CetaneError or, as coremltools does, a RuntimeError."""
        values = yaml.safe_load((path / META).read_text("utf-8"))["model_info"]["parameters"]
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

        def opened(name: str, function: str | None = None) -> Model:
            return load(path / name.replace(".mlmodelc", ".mlpackage"), function)

        self.embeddings, self.lm_head = opened(values["embeddings"]), opened(values["lm_head"])
        self.chunks = []
        count = values.get("num_chunks", 1)
        for number in range(1, count + 1):
            name = values["ffn"].replace("_chunk_01of", f"_chunk_{number:02}of")
            chunk = {function: opened(name, function) for function in (INFER, PREFILL)}
            if self.window is not None:
                for function in (INFER + ROTATE, PREFILL + ROTATE):
                    with suppress(CetaneError, RuntimeError):
                        chunk[function] = opened(name, function)
            self.chunks.append(chunk)


class ChatHost:
    """A conversation."""

    def __init__(self, folder: Folder, first: int = 0) -> None:
        """`first` is the position of its first token, with nothing before it: 0 for their hosts,
        and another one for a gate. Then no position may be beyond a window."""
        self.folder, self.first = folder, first
        self.shifts: list[int] = []
        """The number of tokens that were kept whenever the context was full."""
        self.state = folder.chunks[0][PREFILL].make_state()

    def run(self, tokens: Sequence[int], position: int, function: str) -> Array:
        """Run the chunks: the hidden states that the last one gives."""
        folder, count = self.folder, len(tokens)
        ids = np.array([tokens], np.int32)
        hidden = folder.embeddings.predict({"input_ids": ids})["hidden_states"]
        assert hidden.shape[:2] == (1, count)
        rows, slots = position + np.arange(count), np.arange(folder.context)
        seen = (slots >= self.first) & (slots <= rows[:, None])
        mask = np.where(seen, 0, -np.inf)[None, None]
        rotates = folder.window is not None and position >= folder.window
        for chunk in folder.chunks:
            model = chunk.get(function + ROTATE) if rotates else None
            given: dict[str, Array] = {
                "hidden_states": hidden.astype(np.float16),
                "position_ids": rows.astype(np.int32),
                "causal_mask": mask.astype(np.float16),
                "current_pos": np.array([position], np.int32),
            }
            hidden = (model or chunk[function]).predict(given, self.state)["output_hidden_states"]
        return np.asarray(hidden)

    def head(self, token: int, position: int) -> dict[str, Array]:
        """Feed one token: what the head gives after it."""
        hidden = self.run([token], position, INFER).astype(np.float16)
        return self.folder.lm_head.predict({"hidden_states": hidden})

    def next(self, token: int, position: int) -> int:
        """Feed one token, and choose greedily after it."""
        return self.best(self.head(token, position))

    def best(self, made: Mapping[str, Array]) -> int:
        """The token that they choose by what the head gave."""
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

    def prefill(self, tokens: Sequence[int]) -> int:
        """Whole batches, and then token by token. Returns the next position."""
        at = 0
        while self.folder.batches and at + self.folder.batch <= len(tokens):
            self.run(tokens[at : at + self.folder.batch], at, PREFILL)
            at += self.folder.batch
        for position in range(at, len(tokens)):
            self.next(tokens[position], position)
        return len(tokens)

    def generate(self, prompt: list[int], count: int) -> list[tuple[list[int], int]]:
        """The next tokens, each with the tokens that were in the context."""
        tokens = list(prompt)
        made: list[tuple[list[int], int]] = []
        self.state = self.folder.chunks[0][PREFILL].make_state()
        position = self.prefill(tokens)
        while len(made) < count:
            if position >= self.folder.context - 2:
                tokens = tokens[position - self.kept : position]
                self.shifts.append(len(tokens))
                self.state = self.folder.chunks[0][PREFILL].make_state()
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
