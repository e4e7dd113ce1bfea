"""Writes the data of the tasks `cetane_cloze` and `cetane_choice` from this repository's pages.

Run it when the pages have changed much; results of different data cannot be compared.
"""

import json
import random
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "src" / "cetane" / "data" / "tasks"
PAGES = (
    "docs/architecture.md",
    "docs/index.md",
    "docs/tutorial.md",
    "docs/how-to",
    "docs/explanation",
)
COUNT = 80
SENTENCE = re.compile(r"(?<=[.!?]) (?=[A-Z])")


def sentences() -> list[str]:
    """Plain sentences of 12 to 30 words that end with a word of at least four letters."""
    plain_ones = []
    paths = [p for name in PAGES for p in sorted([ROOT / name, *(ROOT / name).glob("*.md")])]
    for path in paths:
        if not path.is_file():
            continue
        text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        for paragraph in text.split("\n\n"):
            if re.match(r"\s*([#|>*!-]|\d+\.)", paragraph):
                continue
            for sentence in SENTENCE.split(" ".join(paragraph.split())):
                words = sentence.split()
                plain = re.fullmatch(r"[A-Za-z0-9 ,;:'’().-]+\.", sentence)
                if plain and 12 <= len(words) <= 30 and re.fullmatch(r"[a-z]{4,}\.", words[-1]):
                    plain_ones.append(sentence)
    return sorted(set(plain_ones))


def main() -> None:
    random.seed(0)
    chosen = sorted(random.sample(sentences(), COUNT))
    cloze, choice = [], []
    lasts = [sentence.split()[-1].rstrip(".") for sentence in chosen]
    for sentence, last in zip(chosen, lasts, strict=True):
        context = sentence.rsplit(" ", 1)[0]
        cloze.append({"context": context, "word": last})
        options = random.sample(sorted(set(lasts) - {last}), 3)
        options.insert(random.randrange(4), last)
        choice.append({"context": context, "options": options, "answer": options.index(last)})
    for name, rows in (("cloze", cloze), ("choice", choice)):
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (TARGET / f"{name}.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
