"""The data of cetane's own tasks, for lm-eval's `custom_dataset`."""

import json
from pathlib import Path
from typing import Any

from datasets import Dataset


def load(name: str, **_: Any) -> dict[str, Dataset]:
    """The rows of `NAME.jsonl` beside this file, as the split `test`."""
    lines = (Path(__file__).parent / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return {"test": Dataset.from_list([json.loads(line) for line in lines])}
