"""Text that a model writes itself, as training data for draft heads: `train-head --text`.

Greedy answers to questions made from templates and subjects, none of which is a prompt of the
speculative suite, in the model's own chat format. Two processes, `--part 0/2` and `--part 1/2`,
use two cores better than two threads do.
"""

import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from cetane.checkpoint import open_checkpoint
from cetane.gates.reference import Reference
from common import arguments

TOPICS = (
    "rivers", "steam engines", "honey", "chess", "volcanoes", "the moon", "windmills", "cheese",
    "maps", "glass", "swimming", "bread", "trains", "owls", "paper", "clocks", "tea", "bridges",
    "lightning", "wool", "violins", "deserts", "soap", "kites", "salt", "whales", "mountains",
    "the Roman Empire", "photosynthesis", "magnets", "earthquakes", "democracy", "coffee",
    "penguins", "the printing press", "gravity", "jazz", "vaccines", "coral reefs", "inflation",
    "submarines", "dinosaurs", "the human heart", "glaciers", "pottery", "solar power", "ants",
    "opera", "comets", "rice", "telescopes", "sleep", "horses", "rain forests", "Japan", "Brazil",
)  # fmt: skip
ABOUT = (
    "Tell me something about {}.",
    "Explain {} to a beginner in simple words.",
    "List five facts about {}.",
    "Write a short story about {}.",
    "What are common misunderstandings about {}?",
    "Why are people interested in {}?",
    "Write a short dialogue between two friends about {}.",
    "What is the history of {}?",
    "What would you ask an expert on {}?",
    "Write a poem about {}.",
    "How would the world be without {}?",
    "Give me three good reasons to learn about {}, and one against it.",
)
TASKS = (
    "clean a cast iron pan", "learn a new language", "save money for a long trip",
    "fix a flat tyre",
    "prepare for a job interview", "train a puppy", "grow tomatoes", "write a cover letter",
    "remove a coffee stain", "start running",
    "make friends in a new city", "cook rice",
    "plan a week of meals", "choose a good book", "stop biting my nails", "move to another flat",
    "give a speech", "wake up earlier", "make pancakes", "repair a leaking tap", "draw a face",
    "ask my boss for a raise", "keep a diary", "paint a fence", "calm a crying baby",
    "pack for a hiking trip", "sell an old bicycle", "study for an exam", "bake a cake",
    "write a wedding speech", "organise my desk", "get over a cold", "apologise to a friend",
)  # fmt: skip
ADVICE = (
    "How do I {}?",
    "I want to {}. Where should I begin?",
    "I tried to {} and failed. What did I do wrong?",
    "My sister wants to {}. What could I tell her?",
    "What do I need in order to {}?",
    "What are the three most important things when you {}?",
)
PROGRAMS = (
    "a queue", "prime numbers", "a bank account", "a calculator", "binary search", "a linked list",
    "the Fibonacci numbers", "counting words", "a matrix", "dates", "sorting a list", "a cache",
    "reversing a string", "a guessing game", "reading a file", "a shopping cart", "temperatures",
    "a binary tree", "anagrams", "a timer", "a to-do list", "bubble sort", "leap years", "vowels",
)  # fmt: skip
CODE = (
    "Write a short Python example of {}.",
    "Write a Python function for {} with a docstring and a test.",
    "Write a Python class for {} and show how it is used.",
    "Explain step by step how to program {}.",
    "Write {} in JavaScript.",
)
STRUCTURED = (
    "Give me JSON with three entries about {}.",
    "Make a table with two columns about {}.",
    "Write a numbered list of six steps that has to do with {}.",
)
PASSAGE = (
    "{0} travelled to {1} on {2} to see {3}. It was raining, so {0} went to a museum first. In the "
    "evening {0} wrote a letter home and described all that had happened, and the next morning "
    "took the early bus back."
)
READ = (
    "Summarise in one sentence: {}",
    "Answer from the text. Text: {} Question: Why did the visitor go to a museum first?",
    "Answer from the text. Text: {} Question: What happened in the evening?",
    "Give the main points as a list: {}",
)
PEOPLE = ("Clara", "Tom", "Professor Lind", "my uncle", "Aisha", "the postman")
PLACES = ("Oslo", "the coast", "Vienna", "a small village", "Lisbon", "the old mill")
DAYS = ("Monday", "a cold Friday", "the first of June", "New Year's Eve")


def questions() -> list[str]:
    """All of them, in an order that does not change."""
    draw = random.Random(0)
    passages = [PASSAGE.format(p, o, d, draw.choice(TOPICS))
                for p in PEOPLE for o in PLACES for d in DAYS]  # fmt: skip
    pairs = (
        (ABOUT, TOPICS), (ADVICE, TASKS), (CODE, PROGRAMS), (STRUCTURED, TOPICS),
        (READ, passages[:40]),
    )  # fmt: skip
    made = [template.format(s) for templates, subjects in pairs
            for template in templates for s in subjects]  # fmt: skip
    draw.shuffle(made)
    return made


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--output", type=Path, default=Path("build/bench/self.txt"))
    parser.add_argument("--tokens", type=int, default=160, help="of an answer")
    parser.add_argument("--answers", type=int, default=800)
    parser.add_argument("--minutes", type=float, default=30.0, help="most minutes")
    parser.add_argument("--part", default="0/1", help="i/n: only every n-th question from i on")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--bf16", action="store_true", help="several times faster with AMX")
    options = parser.parse_args()
    started, made = time.monotonic(), 0
    checkpoint = open_checkpoint(options.model)
    tokenizer, model = checkpoint.tokenizer, Reference(checkpoint).model
    model.set_attn_implementation("sdpa")
    if options.bf16:
        model.bfloat16()
    part, parts = map(int, options.part.split("/"))
    asked = [
        tokenizer.chat([{"role": "user", "content": question}])
        for question in questions()[: options.answers][part::parts]
    ]
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with options.output.open("w", encoding="utf-8") as file:
        for start in range(0, len(asked), options.batch):
            batch = asked[start : start + options.batch]
            for ids in answers(model, batch, options.tokens, tokenizer.eos_ids):
                text = tokenizer.decode(ids, skip_special_tokens=False)
                if tokenizer.encode(text) == ids:  # else it is not what the model said
                    file.write(text + "\n")
                    made += len(ids)
            file.flush()
            seconds = time.monotonic() - started
            print(f"{min(start + options.batch, len(asked))} of {len(asked)}, {made} tokens, "
                  f"{seconds:.0f} s, {time.process_time():.0f} s of CPU", flush=True)  # fmt: skip
            if seconds > 60 * options.minutes:
                break


@torch.inference_mode()
def answers(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], count: int, stop: Sequence[int]
) -> Iterator[list[int]]:
    """Greedy continuations of prompts of unequal lengths, with them. An answer that is complete
    leaves the batch."""
    longest = max(map(len, prompts))
    tokens = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    texts = [list(p) for p in prompts]
    rows, cache = torch.arange(len(prompts)), DynamicCache()
    ends = torch.tensor(list(stop))
    for _ in range(count):
        places = (mask.cumsum(-1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        states = model.model(
            input_ids=tokens, attention_mask=mask, position_ids=places, past_key_values=cache,
            use_cache=True,
        ).last_hidden_state  # fmt: skip
        # a slice of a wide batch would copy the head's weights for each row
        chosen: Tensor = model.lm_head(states[:, -1]).argmax(-1)
        for row, token in zip(rows.tolist(), chosen.tolist(), strict=True):
            texts[row].append(token)
        going = (~torch.isin(chosen, ends)).nonzero()[:, 0]
        if not len(going):
            break
        if len(going) < len(rows):
            cache.batch_select_indices(going)
            rows, mask, chosen = rows[going], mask[going], chosen[going]
        tokens, mask = chosen[:, None], torch.cat([mask, mask.new_ones(len(rows), 1)], 1)
    yield from texts


if __name__ == "__main__":
    main()
