"""Decode speed of the portable backend against transformers: eager, same weights, one process.

Both generate the same number of tokens from the same prompt, in turns, so that a noisy machine
disturbs both; ratios of medians are reported.
"""

import statistics
import time

import torch

from cetane.checkpoint import open_checkpoint
from cetane.engine.generate import generate, open_engine
from cetane.engine.sampling import Sampler
from cetane.gates.probes import chat_prompts
from cetane.gates.reference import Reference
from cetane.recipe import load_recipe
from common import arguments, bundle_of, report


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--recipe", default="fp16")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    checkpoint = open_checkpoint(options.model)
    bundle = bundle_of(checkpoint, load_recipe(options.recipe))
    prompt = chat_prompts(bundle.tokenizer, 1)[0]
    engine = open_engine(bundle, "portable")
    model = Reference(checkpoint).model

    def ours() -> tuple[list[int], float, float]:
        session = engine.session(["decode", "prefill"])
        started = time.perf_counter()
        tokens, marks = [], []
        for token in generate(session, prompt, Sampler(), options.tokens):
            tokens.append(token)
            marks.append(time.perf_counter())
        return tokens, marks[0] - started, (len(marks) - 1) / (marks[-1] - marks[0])

    @torch.inference_mode()
    def theirs() -> tuple[list[int], float, float]:
        started = time.perf_counter()
        tokens, marks = [], []
        ids, past = torch.tensor([prompt]), None
        for _ in range(options.tokens):
            result = model(ids, past_key_values=past, use_cache=True)
            past, ids = result.past_key_values, result.logits[:, -1:].argmax(-1)
            tokens.append(int(ids))
            marks.append(time.perf_counter())
        return tokens, marks[0] - started, (len(marks) - 1) / (marks[-1] - marks[0])

    ours(), theirs()
    rounds = [(ours(), theirs()) for _ in range(options.rounds)]
    decode = [statistics.median(pair[side][2] for pair in rounds) for side in (0, 1)]
    prefill = [statistics.median(pair[side][1] for pair in rounds) for side in (0, 1)]
    result = {
        "recipe": options.recipe,
        "tokens_per_second": decode[0],
        "tokens_per_second_transformers": decode[1],
        "ratio_transformers": decode[0] / decode[1],
        "prompt_tokens": len(prompt),
        "seconds_to_first_token": prefill[0],
        "seconds_to_first_token_transformers": prefill[1],
        "same_tokens": rounds[0][0][0] == rounds[0][1][0],
    }
    rows = [
        ["decode, tokens/s", decode[0], decode[1], decode[0] / decode[1]],
        ["first token, s", prefill[0], prefill[1], prefill[1] / prefill[0]],
    ]
    title = f"portable backend ({options.recipe}) against transformers eager fp32"
    report(title, ["what", "cetane", "transformers", "ratio"], rows, result, options.json)


if __name__ == "__main__":
    main()
