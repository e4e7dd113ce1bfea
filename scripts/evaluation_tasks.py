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
COUNT = 60
PLAIN = re.compile(r"[A-Za-z0-9 ,;:'’()/%+=<>_.-]+[.]")
SENTENCE = re.compile(r"(?<=[.!?]) (?=[A-Z])")


def sentences(page: str) -> list[str]:
    """The plain sentences of a page in their order, without markup."""
    page = re.sub(r"```.*?```|^[|#][^\n]*", "", page, flags=re.DOTALL | re.MULTILINE)
    page = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", page)
    page = re.sub(r"^\s*([-*]|\d+\.) ", "\n\n", page, flags=re.MULTILINE)
    paragraphs = [" ".join(part.split()) for part in re.sub(r"[`*]", "", page).split("\n\n")]
    return [s for paragraph in paragraphs for s in SENTENCE.split(paragraph) if PLAIN.fullmatch(s)]


def passages() -> list[str]:
    """Passages of 15 to 70 words whose last word stands earlier in them too, so that a reader can
    know it. No two of them overlap."""
    chosen = []
    paths = [p for name in PAGES for p in sorted([ROOT / name, *(ROOT / name).glob("*.md")])]
    for path in filter(Path.is_file, paths):
        parts: list[str] = []
        for sentence in sentences(path.read_text(encoding="utf-8")):
            parts.append(sentence)
            while len(" ".join(parts).split()) > 70:
                del parts[0]
            words = " ".join(parts).split()
            word = words[-1].rstrip(".") if words else ""
            before = re.findall(r"[a-z]+", " ".join(words[:-1]).lower())
            if len(words) >= 15 and re.fullmatch(r"[a-z]{4,}", word) and word in before:
                chosen.append(" ".join(words))
                parts = []
    return sorted(set(chosen))


def main() -> None:
    random.seed(0)
    chosen = sorted(random.sample(passages(), COUNT))
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
