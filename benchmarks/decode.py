"""Speed of the portable backend against transformers (eager, fp32) and llama.cpp (llama-cpp-python,
if it is installed, with the GGUF file itself).

They have the same weights, and run in one process, in turns: a noisy machine disturbs all of them.
Ratios of medians are reported.

Decoding goes on from a chat prompt; prefill runs `--prefill` tokens of text. Perplexity is that of
decoding, one token a step, in the arithmetic in which the speed was measured.

`--one-thread` decodes with one thread, and measures its processor time: other jobs disturb that
little. It says how much work a step is, not how long users wait.
"""

import itertools
import math
import os
import statistics
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from transformers import DynamicCache

from cetane.bundle import Bundle
from cetane.checkpoint import Checkpoint, open_checkpoint
from cetane.engine.engine import Engine
from cetane.engine.open import open_engine
from cetane.fitting.cache import extending
from cetane.gates.metrics import log_softmax
from cetane.gates.probes import chat_prompts
from cetane.gates.quality import read_tokens
from cetane.gates.reference import Reference
from cetane.mil.fast import share_threads
from cetane.schema.recipe import load_recipe
from common import arguments, bundle_of, report, standard_library_text


class Runner(Protocol):
    """A model that holds one sequence at a time."""

    def start(self) -> None: ...

    def feed(self, tokens: list[int]) -> np.ndarray:
        """Logits of the last token."""
        ...


class Cetane:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def start(self) -> None:
        self.session = self.engine.session(["decode", "prefill"])

    def feed(self, tokens: list[int]) -> np.ndarray:
        logits = self.session.feed(tokens)
        assert logits is not None
        return logits


class Transformers:
    def __init__(self, model: Any) -> None:
        self.model = model

    def start(self) -> None:
        self.cache = DynamicCache(config=self.model.config)

    @torch.inference_mode()
    def feed(self, tokens: list[int]) -> np.ndarray:
        result = self.model(
            torch.tensor([tokens]), **extending(self.model, self.cache), logits_to_keep=1
        )
        return result.logits[0, -1].numpy()


class LlamaCpp:
    def __init__(self, path: str, context: int, threads: int) -> None:
        from llama_cpp import Llama

        self.model = Llama(
            path,
            n_ctx=context,
            n_threads=threads,
            n_threads_batch=threads,
            n_batch=512,
            verbose=False,
        )

    def start(self) -> None:
        self.model.reset()

    def feed(self, tokens: list[int]) -> np.ndarray:
        self.model.eval(tokens)
        # The row of the last token; `scores` would copy those of all.
        return np.ctypeslib.as_array(self.model._ctx.get_logits(), (self.model.n_vocab(),))


def decode(
    runner: Runner, prompt: list[int], count: int, clock: Callable[[], float] = time.perf_counter
) -> tuple[list[int], float]:
    """Greedy tokens, and tokens per second after the first."""
    runner.start()
    tokens = [int(runner.feed(prompt).argmax())]
    started = clock()
    while len(tokens) < count:
        tokens.append(int(runner.feed(tokens[-1:]).argmax()))
    return tokens, (count - 1) / (clock() - started)


def prefill(runner: Runner, tokens: list[int]) -> float:
    """Tokens per second."""
    runner.start()
    started = time.perf_counter()
    runner.feed(tokens)
    return len(tokens) / (time.perf_counter() - started)


def perplexity(runner: Runner, tokens: list[int], window: int) -> float:
    losses = []
    for start in range(0, len(tokens), window):
        part = tokens[start : start + window]
        runner.start()
        for token, target in itertools.pairwise(part):
            losses.append(-float(log_softmax(runner.feed([token]).astype(np.float32))[target]))
    return math.exp(statistics.fmean(losses))


def in_turns(runners: dict[str, Runner], measure: Callable[[Runner], float], rounds: int
             ) -> dict[str, float]:  # fmt: skip
    """Medians, after a first round that does not count."""
    found = [{name: measure(runner) for name, runner in runners.items()} for _ in range(rounds + 1)]
    return {name: statistics.median(result[name] for result in found[1:]) for name in runners}


def open_runners(
    model: str, checkpoint: Checkpoint, bundles: dict[str, Bundle], threads: int
) -> dict[str, Runner]:
    """Every recipe's bundle, and the models that it is compared with."""
    runners: dict[str, Runner] = {
        name: Cetane(open_engine(bundle, "portable")) for name, bundle in bundles.items()
    }
    runners["transformers"] = Transformers(Reference(checkpoint).model)
    context = next(iter(bundles.values())).plan.recipe.cache.context
    try:
        runners["llama.cpp"] = LlamaCpp(model, context, threads)
    except ImportError:
        print("pip install llama-cpp-python adds llama.cpp to the comparison")
    return runners


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--recipes", nargs="+", default=["fp16", "int8"])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prefill", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--perplexity", type=int, default=0, help="of so many tokens of text")
    parser.add_argument("--one-thread", action="store_true", help="measure its time of decoding")
    options = parser.parse_args()
    threads = 1 if options.one_thread else 2
    clock = time.thread_time if options.one_thread else time.perf_counter
    torch.set_num_threads(threads)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    share_threads()
    checkpoint = open_checkpoint(options.model)
    bundles = {name: bundle_of(checkpoint, load_recipe(name)) for name in options.recipes}
    runners = open_runners(options.model, checkpoint, bundles, threads)
    first = bundles[options.recipes[0]]
    prompt = list(chat_prompts(first.tokenizer, 1)[0])
    length = max(options.prefill, options.perplexity)
    text = read_tokens(first.tokenizer, standard_library_text(), length)

    said = {name: decode(runner, prompt, options.tokens)[0] for name, runner in runners.items()}
    speeds = in_turns(
        runners, lambda r: decode(r, prompt, options.tokens, clock)[1], options.rounds
    )
    fills = in_turns(runners, lambda r: prefill(r, text[: options.prefill]), options.rounds)
    result = {}
    for name, runner in runners.items():
        same = sum(a == b for a, b in zip(said[name], said["transformers"], strict=True))
        entry = {
            "tokens_per_second": speeds[name],
            "prefill_tokens_per_second": fills[name],
            "prefill_ratio_transformers": fills[name] / fills["transformers"],
            "same_tokens": same / options.tokens,
        }
        for other in ("transformers", "llama.cpp"):
            if other in runners:
                entry[f"ratio_{other.replace('.', '_')}"] = speeds[name] / speeds[other]
        if options.perplexity and name != "transformers":  # the slowest, whose weights are exact
            context = first.plan.recipe.cache.context
            entry["perplexity"] = perplexity(runner, text[: options.perplexity], context)
        result[name] = entry
    columns = list(next(iter(result.values())))
    rows = [[name, *entry.values()] for name, entry in result.items()]
    report("decode and prefill", ["", *columns], rows, result, options.json)


if __name__ == "__main__":
    main()
