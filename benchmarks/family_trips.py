"""The journey of a random tiny model of every type, by the commands of a user.

    python benchmarks/family_trips.py [--only mixtral] [--write]

`cetane port`, `cetane run`, `cetane serve` with OpenAI's own client, and `cetane export` in every
layout. The file is bfloat16, as published ones are. Weights are fp16 on both sides, so the greedy
tokens must be transformers'. What an export wrote is run: by its own host, or by the rules of the
runtime that it is for.
"""

import argparse
import importlib.util
import io
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import openai
import torch
import transformers

import cetane.bridge
from cetane.cli import main as cetane_main
from cetane.export.anemll.host import ChatHost, Folder
from cetane.export.coreml_llm.app_folder import read_folder
from cetane.export.coreml_llm.host import AppHost
from cetane.families import families
from cetane.files import remove
from common import WORK, put_lines

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.conftest import build_tokenizer
from tests.export.app_models import MODEL
from tests.families.gemma_models import build_gemma4
from tests.families.mixture_models import build_llama4
from tests.gates.mutations.families import FAMILIES
from tests.lower.half_weights import half_logits_of

PAGE = Path(__file__).parents[1] / "docs/reference/models.md"
PROMPT, NEW = 39, 16
"""Tokens of prompt and answer: past windows of 32, and no multiple of a call's width."""
CLEAR = 0.02
"""The smallest lead of a chosen token; its logits are of the order of 3, and rounded to fp16."""
FP16 = [
    "--bits", "16", "--set", "embedding.format=fp16", "--context", "256",
    "--set", "tokens.prefill=16",
]  # fmt: skip
ROUTED = [*FP16, "--set", "layout.kind=per-block", "--set", 'layout.routed=["decode", "verify"]']
FOUR_PACKAGES = """
layout = {kind = "chunks", cuts = [3, 6, 7], head = "last"}
cache = {contract = "blend", sliding = "shift", context = 64}
tokens = {verify = 3, prefill = 40}
head = {slices = 2}
embedding = {format = "int8"}
compression = {default = "fp16"}
"""
"""A recipe as those of the released Gemma 4, for eight layers."""
CUT = "\ufffd"
"""A character whose last bytes are not there: the server waits for them."""
FILE = torch.bfloat16
"""The precision of the checkpoint's file."""
LAYOUTS = ("contract", "onnx", "anemll", "coreai", "coreml-llm")


@dataclass(frozen=True)
class Trip:
    """A model, and the options of its port."""

    build: Callable[[], Any]
    options: list[str] = field(default_factory=lambda: FP16)
    layouts: tuple[str, ...] = LAYOUTS


class Refusal(Exception):
    """A command's error."""


def trips() -> dict[str, Trip]:
    """By the row's name."""
    longer = {"llama4": lambda: build_llama4(attention_chunk_size=512, floor_scale=512)}
    texts = {f"{name}_text": build for name, build in (FAMILIES | longer).items()}
    made = FAMILIES | texts
    missing = sorted(set(families()) - set(made))
    assert not missing, f"no tiny model of {missing}"
    rows = {name: Trip(made[name]) for name in families()}
    for name in ("flex_olmo", "mixtral", "qwen3_next", "zaya"):
        rows[f"{name}, routed"] = Trip(made[name], ROUTED)
    return rows | {
        "gemma4_text, four packages": Trip(
            lambda: build_gemma4(**MODEL), ["--recipe", "{recipe}"], ("coreml-llm",)
        )
    }


def command(*words: object) -> Any:
    """What a command printed as JSON; it runs in this process, which spares a start of torch.

    Raises Refusal for its error.
    """
    printed, sys.argv = io.StringIO(), ["cetane", *map(str, words), "--json"]
    try:
        with redirect_stdout(printed):
            cetane_main()
    except SystemExit as end:
        answer = json.loads(printed.getvalue())
        if end.code == 2:
            raise Refusal(answer["error"]) from None
    return answer


@dataclass
class Truth:
    """transformers' answer to a prompt, from weights that are rounded to fp16. The prompt is the
    first, of random ones, after which all choices are clear."""

    model: Any

    def __post_init__(self) -> None:
        ends = self.model.config.eos_token_id
        for seed in range(200):
            rng = np.random.default_rng(seed)
            self.prompt = [int(t) for t in rng.integers(1, self.model.config.vocab_size, PROMPT)]
            self.answer: list[int] = []
            while len(self.answer) < NEW:
                row = half_logits_of(self.model, self.prompt + self.answer)[-1]
                second, first = np.argsort(row)[-2:]
                if first == ends or row[first] - row[second] < CLEAR:
                    break
                self.answer.append(int(first))
            else:
                return
        raise RuntimeError("the model ends all answers, or has no clear choices")

    def compare(self, answer: list[int]) -> str:
        """ "equal", or the number of tokens before the first other one."""
        pairs = zip(answer, self.answer, strict=False)
        same = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        return "equal" if answer == self.answer else f"**other after {same}**"


@contextmanager
def served(bundle: Path) -> Iterator[openai.OpenAI]:
    """A client of a server of its own."""
    server = subprocess.Popen(
        [sys.executable, "-m", "cetane", "serve", str(bundle), "--port", "0"],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    try:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        yield openai.OpenAI(base_url=f"{url}v1", api_key="none", max_retries=0, timeout=120)
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(30)


def ask(client: openai.OpenAI, bundle: Path, truth: Truth) -> str:
    """The verdict on a completion and on a chat: tokens arrive as text."""
    tokenizer = build_tokenizer()
    done = client.completions.create(
        model=bundle.name, prompt=truth.prompt, max_tokens=NEW, temperature=0
    )
    chat = client.chat.completions.create(
        model=bundle.name, messages=[{"role": "user", "content": "Hello"}], max_tokens=4
    )
    assert chat.usage is not None and chat.usage.completion_tokens
    wanted = tokenizer.decode(truth.answer, clean_up_tokenization_spaces=False)
    same = done.choices[0].text.rstrip(CUT) == wanted.rstrip(CUT)
    return "equal" if same else "**other text**"


def by_contract(folder: Path, bundle: Path, truth: Truth) -> str:
    """Its own host, whose Core ML is the bridge."""
    return truth.compare(answered(folder, None, truth.prompt))


def answered(folder: Path, models: Any, prompt: list[int]) -> list[int]:
    """The tokens that the host of a contract gives; `models` opens its functions."""
    spec = importlib.util.spec_from_file_location("host", folder / "host.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    host, tokens = module.Host(folder, models), list(prompt)
    while len(tokens) < len(prompt) + NEW:
        tokens.append(int(host.feed(tokens[host.position :]).argmax()))
    return tokens[len(prompt) :]


class OnnxModel:
    """An ONNX file, as a function of Core ML."""

    def __init__(self, path: Path) -> None:
        options = onnxruntime.SessionOptions()
        options.use_per_session_threads = False  # `cetane run` shares its threads
        self.session = onnxruntime.InferenceSession(str(path), options)
        self.names = [output.name for output in self.session.get_outputs()]

    def predict(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        taken = {item.name: np.ascontiguousarray(inputs[item.name], FLOATS.get(item.type))
                 for item in self.session.get_inputs()}  # fmt: skip
        return dict(zip(self.names, self.session.run(None, taken), strict=True))


FLOATS = {"tensor(float)": np.float32, "tensor(int32)": np.int32}


def by_onnx(folder: Path, bundle: Path, truth: Truth) -> str:
    """The contract's host, with the ONNX files in place of the packages."""
    opened: dict[tuple[str, str], OnnxModel] = {}

    def model(shard: str, function: str) -> OnnxModel:
        key = (shard, function)
        if key not in opened:
            opened[key] = OnnxModel(folder / shard / f"{function}.onnx")
        return opened[key]

    return truth.compare(answered(bundle.parent / "contract", model, truth.prompt))


def by_anemll(folder: Path, bundle: Path, truth: Truth) -> str:
    """The rules of ANEMLL's hosts."""
    import coremltools as ct

    host = ChatHost(Folder(folder, lambda path, f: ct.models.MLModel(str(path), function_name=f)))
    return truth.compare([token for _, token in host.generate(truth.prompt, NEW)])


def by_coreai(folder: Path, bundle: Path, truth: Truth) -> str:
    """Apple's runtime; the export itself compared its logits with the bundle's."""
    return "logits agree"


def by_coreml_llm(folder: Path, bundle: Path, truth: Truth) -> str:
    """The rules of CoreML-LLM's Swift runtime."""
    session = AppHost(read_folder(folder))
    answer = [session.prefill(truth.prompt).token]
    while len(answer) < NEW:
        answer.append(session.decode(answer[-1]).token)
    return truth.compare(answer)


PLAYERS: Mapping[str, Callable[[Path, Path, Truth], str]] = {
    "contract": by_contract, "onnx": by_onnx, "anemll": by_anemll, "coreai": by_coreai,
    "coreml-llm": by_coreml_llm,
}  # fmt: skip


def travel(name: str, trip: Trip) -> dict[str, str]:
    """The cells of a row, by their heads."""
    home = home_of(name)
    remove(home)
    home.mkdir(parents=True)
    model = trip.build().to(FILE)
    model.save_pretrained(home / "model")
    build_tokenizer().save_pretrained(home / "model")
    (home / "recipe.toml").write_text(FOUR_PACKAGES)
    filed = type(model).from_pretrained(home / "model", dtype=torch.float32)
    truth, bundle = Truth(filed), home / "bundle"
    options = [word.format(recipe=home / "recipe.toml") for word in trip.options]
    started = time.perf_counter()
    ported = command("port", home / "model", "-o", bundle, *options)
    port = f"{time.perf_counter() - started:.0f} s, {verdict(ported)}"
    cells = {"file": str(FILE).removeprefix("torch."), "port": port}
    ids = ",".join(map(str, truth.prompt))
    ran = command("run", bundle, "--prompt-ids", ids, "--max-new", NEW)
    cells["run"] = truth.compare(ran["tokens"])
    with served(bundle) as client:
        cells["serve"] = ask(client, bundle, truth)
    return cells | {layout: exported(layout, bundle, truth) for layout in trip.layouts}


def home_of(name: str) -> Path:
    """The folder of a row's model, bundle and exports."""
    return WORK / "trips" / name.replace(", ", "-").replace(" ", "-")


def verdict(ported: Any) -> str:
    return "pass" if ported["passed"] else "**red**"


def exported(layout: str, bundle: Path, truth: Truth) -> str:
    """Export a bundle, and run what was written."""
    folder = bundle.parent / layout
    try:
        command("export", bundle, "-o", folder, "--layout", layout)
    except Refusal as error:
        return f"refused: {error}"
    except Exception:  # another layout may work
        traceback.print_exc()
        return "**error**"
    cetane.bridge.install()
    try:
        return PLAYERS[layout](folder, bundle, truth)
    except Exception:
        traceback.print_exc()
        return "**error**"
    finally:
        cetane.bridge.uninstall()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", help="names of rows")
    parser.add_argument("--write", action="store_true", help=f"into {PAGE.name}")
    arguments = parser.parse_args()
    os.environ.setdefault("CETANE_CACHE", str((WORK / "trips/cache").resolve()))
    transformers.logging.set_verbosity_error()
    torch.set_grad_enabled(False)
    chosen = trips()
    for name in arguments.only or chosen:
        try:
            cells = travel(name, chosen[name])
        except Exception:  # the other rows tell their own story
            traceback.print_exc()
            cells = {"port": "**error**"}
        (home_of(name) / "row.json").write_text(json.dumps(cells))
        print(name, cells, flush=True)
    lines = table(
        {name: json.loads(path.read_text()) for name in chosen
         if (path := home_of(name) / "row.json").is_file()}
    )  # fmt: skip
    if arguments.write:
        put_lines(PAGE, "trips", lines)


def table(rows: dict[str, dict[str, str]]) -> list[str]:
    """All rows that were run, and the sentences of refusals below them."""
    heads = ["file", "port", "run", "serve", *LAYOUTS]
    lines = [f"| model type | {' | '.join(heads)} |", f"|{' --- |' * (1 + len(heads))}"]
    reasons: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, cells in rows.items():
        shown = []
        for head in heads:
            cell, _, reason = cells.get(head, "").partition(": ")
            if reason:
                reasons[head, reason].append(name)
            shown.append(cell)
        lines.append(f"| {name} | {' | '.join(shown)} |")
    lines += ["", "What refuses, and why:", ""]
    for (layout, reason), names in sorted(reasons.items()):
        whom = "all others" if len(names) > len(rows) // 2 else ", ".join(names)
        lines.append(f"- {layout}, {whom}: {reason}.")
    return lines


if __name__ == "__main__":
    main()
