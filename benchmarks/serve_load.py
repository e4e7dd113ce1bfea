"""Load on a server: lost, mixed or cut answers, memory, first tokens and steps, and a known prefix.

    python benchmarks/serve_load.py BUNDLE --clients 32 --minutes 10

Prints one JSON document:

- `same`: answers that were the same alone and under load. Each client asks for one of a few answers
  by seed; half of them are streamed.
- `memory`: the server's resident MB every ten seconds, and its growth after the first minute.
- `first_token`, `step`: seconds, from the server's own metrics, as buckets of histograms. With
  32 clients and one engine, a first token waits for other answers.
- `alone`: tokens/s of one client, divided by those of the engine called directly, in turns.
- `prefix`: the time to the first token of a known prompt of some 300 tokens, by that of a new one.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import openai
from openai.types.chat import ChatCompletionMessageParam

from cetane.bundle import Bundle
from cetane.engine.generate import extend
from cetane.engine.open import open_engine
from cetane.engine.prefixes import Prefixes
from cetane.engine.sampling import Sampler
from cetane.mil.fast import share_threads

WORDS = ("fuel", "engine", "valve", "piston", "spark", "diesel", "rating", "number", "heat")
QUESTIONS = 12


def question(number: int, words: int = 20) -> list[ChatCompletionMessageParam]:
    chosen = random.Random(number).choices(WORDS, k=words)
    return [{"role": "user", "content": " ".join(["Explain:", *chosen])}]


def ask(client: openai.OpenAI, name: str, number: int, stream: bool, tokens: int) -> str:
    options: dict[str, Any] = {
        "model": name, "messages": question(number), "seed": number, "max_tokens": tokens,
        "temperature": 0.8,
    }  # fmt: skip
    if not stream:
        return client.chat.completions.create(**options).choices[0].message.content or ""
    chunks = client.chat.completions.create(stream=True, **options)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def resident(process: int) -> float:
    """The resident memory of a process, in MB."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def load(client: openai.OpenAI, name: str, arguments: argparse.Namespace, process: int) -> Any:
    """All clients at once, for some minutes."""
    wanted = [ask(client, name, number, False, arguments.tokens) for number in range(QUESTIONS)]
    results, errors = [], []
    end = time.monotonic() + 60 * arguments.minutes

    def work(number: int) -> None:
        turn = number
        while time.monotonic() < end:
            chosen = turn % QUESTIONS
            try:
                answer = ask(client, name, chosen, turn % 2 == 0, arguments.tokens)
                results.append(answer == wanted[chosen])
            except openai.APIError as error:
                errors.append(str(error))
            turn += 5

    threads = [threading.Thread(target=work, args=(n,)) for n in range(arguments.clients)]
    for thread in threads:
        thread.start()
    memory = []
    while any(thread.is_alive() for thread in threads):
        memory.append(round(resident(process), 1))
        time.sleep(10)
    settled = memory[min(6, len(memory) // 3) :]
    return {
        "clients": arguments.clients, "minutes": arguments.minutes, "answers": len(results),
        "same": sum(results), "errors": errors[:5],
        "memory": {"MB": memory, "growth": round(settled[-1] - settled[0], 1)},
    }  # fmt: skip


def percentiles(client: openai.OpenAI, histogram: str) -> dict[str, str]:
    """p50 and p99 of a histogram of the server: the bucket that they lie in."""
    base = str(client.base_url).removesuffix("/v1/")
    text = client.with_options(base_url=base).get("/metrics", cast_to=str)
    buckets = [
        (line.split('le="')[1].split('"')[0], float(line.rsplit(" ", 1)[1]))
        for line in text.splitlines()
        if line.startswith(f"cetane_{histogram}_bucket")
    ]
    total = buckets[-1][1]
    return {
        name: "<= " + next(bound for bound, count in buckets if count >= share * total)
        for name, share in (("p50", 0.5), ("p99", 0.99))
    }


def alone(client: openai.OpenAI, bundle: Bundle, rounds: int, tokens: int) -> Any:
    """Tokens/s after the first of one client and of the engine itself, in turns."""
    prefixes = Prefixes(open_engine(bundle))
    ids = bundle.tokenizer.chat(question(1))
    through, direct = [], []
    for number in range(rounds + 1):
        started, count, first = 0.0, 0, True
        chunks = client.chat.completions.create(
            model=bundle.path.resolve().name, messages=question(1), max_tokens=tokens, seed=number,
            stream=True, logit_bias={str(i): -100 for i in bundle.tokenizer.eos_ids},
            temperature=0, stream_options={"include_usage": True},
        )  # fmt: skip
        for chunk in chunks:
            if first and chunk.choices and chunk.choices[0].delta.content:
                started, first = time.perf_counter(), False
            if chunk.usage:
                count = chunk.usage.completion_tokens
        through.append((count - 1) / (time.perf_counter() - started))
        fed = prefixes.feed(ids)
        sampler = Sampler(logit_bias={i: -100.0 for i in bundle.tokenizer.eos_ids})
        generation = extend(fed.session, fed.logits, sampler, tokens)
        next(generation)
        started = time.perf_counter()
        rest = sum(1 for _ in generation)
        direct.append(rest / (time.perf_counter() - started))
    pairs = [a / b for a, b in zip(through[1:], direct[1:], strict=True)]
    return {
        "server": statistics.median(through[1:]), "engine": statistics.median(direct[1:]),
        "ratio": statistics.median(pairs), "ratios": [round(pair, 3) for pair in pairs],
    }  # fmt: skip


def first_token(
    client: openai.OpenAI, name: str, messages: list[ChatCompletionMessageParam]
) -> float:
    started = time.perf_counter()
    client.chat.completions.create(
        model=name, messages=messages, max_tokens=1, seed=1, temperature=0
    )  # fmt: skip
    return time.perf_counter() - started


def prefix(client: openai.OpenAI, name: str, rounds: int) -> Any:
    """First tokens of new prompts, of the same again, and of longer ones with the same start."""
    new, again, longer, short = [], [], [], []
    for number in range(rounds):
        text = question(1000 + number, 200)
        ending: list[ChatCompletionMessageParam] = [
            {"role": "assistant", "content": "Yes."},
            {"role": "user", "content": "Why?"},
        ]
        new.append(first_token(client, name, text))
        again.append(first_token(client, name, text))
        longer.append(first_token(client, name, [*text, *ending]))
        short.append(first_token(client, name, [{"role": "user", "content": f"Why {number}?"}]))
    medians = [statistics.median(values) for values in (new, again, longer, short)]
    return {
        "new": medians[0], "again": medians[1], "longer": medians[2], "short": medians[3],
        "ratio again": medians[1] / medians[0],
        "ratio in a longer prompt": (medians[2] - medians[3]) / medians[0],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    server = subprocess.Popen(
        [sys.executable, "-m", "cetane", "serve", str(arguments.bundle), "--port", "0",
         "--seconds", "3600"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        client = openai.OpenAI(base_url=f"{url}v1", api_key="none", max_retries=0, timeout=3600)
        bundle = Bundle(arguments.bundle)
        share_threads()
        name = bundle.path.resolve().name
        result: dict[str, Any] = {"prefix": prefix(client, name, arguments.rounds)}
        result["alone"] = alone(client, bundle, arguments.rounds, 64)
        result |= load(client, name, arguments, server.pid)
        result["first_token"] = percentiles(client, "first_token_seconds")
        result["step"] = percentiles(client, "step_seconds")
        print(json.dumps(result, indent=1))
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)


if __name__ == "__main__":
    main()
