"""Text that a model writes itself, as training data for draft heads: `train-head --data`.

Greedy answers to questions made from templates and topics, none of which is a prompt of the
speculative suite, in the model's own chat format.
"""

from itertools import product
from pathlib import Path

import torch

from cetane.checkpoint import open_checkpoint
from cetane.gates.reference import Reference
from common import arguments

TOPICS = (
    "rivers", "steam engines", "honey", "chess", "volcanoes", "the moon", "windmills", "cheese",
    "maps", "glass", "swimming", "bread", "trains", "owls", "paper", "clocks", "tea", "bridges",
    "lightning", "wool", "violins", "deserts", "soap", "kites", "salt", "whales", "bicycles",
    "lists in Python", "sorting", "regular expressions", "recursion", "hash tables", "files",
    "loops", "a calculator", "a queue", "prime numbers", "strings", "dates", "a bank account",
)  # fmt: skip
TEMPLATES = (
    "Tell me something about {}.",
    "Explain {} to a beginner in simple words.",
    "Write a short Python example that has to do with {}.",
    "List five facts about {}.",
    "Write a short story about {}.",
    "What are common mistakes people make with {}?",
    "Give me JSON with three entries about {}.",
    "Write a Python function about {} with a docstring and a test.",
)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--output", type=Path, default=Path("build/bench/self.txt"))
    parser.add_argument("--tokens", type=int, default=160, help="of an answer")
    parser.add_argument("--answers", type=int, default=len(TOPICS) * len(TEMPLATES))
    parser.add_argument("--batch", type=int, default=32)
    options = parser.parse_args()
    checkpoint = open_checkpoint(options.model)
    tokenizer, model = checkpoint.tokenizer, Reference(checkpoint).model
    questions = [t.format(topic) for topic, t in product(TOPICS, TEMPLATES)]
    order = torch.randperm(len(questions), generator=torch.Generator().manual_seed(0)).tolist()
    asked = [
        tokenizer.chat([{"role": "user", "content": questions[i]}])
        for i in order[: options.answers]
    ]
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with options.output.open("w", encoding="utf-8") as file:
        for start in range(0, len(asked), options.batch):
            for ids in answers(model, asked[start : start + options.batch], options.tokens,
                               tokenizer.eos_ids):  # fmt: skip
                file.write(tokenizer.decode(ids, skip_special_tokens=False) + "\n")
            file.flush()
            print(f"{min(start + options.batch, len(asked))} of {len(asked)}", flush=True)


@torch.inference_mode()
def answers(model, prompts, count: int, stop):  # type: ignore[no-untyped-def]
    """Greedy continuations of prompts of unequal lengths, with them."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    made = model.generate(
        input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=count,
        eos_token_id=list(stop), pad_token_id=0,
    )  # fmt: skip
    for prompt, row in zip(prompts, made[:, longest:].tolist(), strict=True):
        end = next((i + 1 for i, token in enumerate(row) if token in stop), len(row))
        yield [*prompt, *row[:end]]


if __name__ == "__main__":
    main()
