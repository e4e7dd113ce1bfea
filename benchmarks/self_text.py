"""Text that a model writes itself, into a file for `train-head --text`: how fast, and how much.

`cetane train-head` without `--text` writes the same. Two processes, `--part 0/2` and `--part 1/2`,
use two cores better than two threads do.
"""

import time
from pathlib import Path

from cetane.checkpoint import open_checkpoint
from cetane.fitting.answers import BATCH, questions, write_answers
from cetane.gates.reference import Reference
from common import arguments


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--output", type=Path, default=Path("build/bench/self.txt"))
    parser.add_argument("--minutes", type=float, default=30.0, help="most minutes")
    parser.add_argument("--part", default="0/1", help="i/n: only every n-th question from i on")
    parser.add_argument("--batch", type=int, default=BATCH)
    options = parser.parse_args()
    started = time.monotonic()
    checkpoint = open_checkpoint(options.model)
    part, parts = map(int, options.part.split("/"))
    model, made, asked = Reference(checkpoint).model, 0, questions()[part::parts]
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with options.output.open("w", encoding="utf-8") as file:
        for texts in write_answers(model, checkpoint.tokenizer, asked, options.batch):
            file.writelines(f"{text}\n" for text in texts)
            file.flush()
            made += sum(len(checkpoint.tokenizer.encode(text)) for text in texts)
            seconds = time.monotonic() - started
            print(f"{made} tokens, {seconds:.0f} s, {time.process_time():.0f} s of CPU", flush=True)
            if seconds > 60 * options.minutes:
                break


if __name__ == "__main__":
    main()
