"""Configs of adapters that peft does not write: refused, with the key's name."""

import json
from pathlib import Path
from typing import Any

import pytest

from cetane.checkpoint.lora_config import read_config
from cetane.errors import CetaneError

GOOD = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "base_model_name_or_path": "a/ä"}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("r", 4.0),
        ("r", True),
        ("rank_pattern", {"q_proj": 4.0}),
    ],
)
def test_values_that_peft_cannot_take(tmp_path: Path, key: str, value: Any) -> None:
    """peft makes a matrix of `r` rows."""
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(GOOD))
    assert read_config(path).r == 4
    path.write_text(json.dumps(GOOD | {key: value}))
    with pytest.raises(CetaneError, match=f"adapter_config.json: {key}"):
        read_config(path)
