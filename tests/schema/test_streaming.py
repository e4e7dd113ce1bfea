"""Heads that keep all tokens, by their scores; and files of scores."""

import json
from pathlib import Path

import pytest

from cetane.errors import CetaneError
from cetane.schema.changes import override
from cetane.schema.recipe import load_recipe
from cetane.schema.streaming import HeadScores, Streaming

SCORES = {
    "source": "a model", "model_type": "llama", "method": "mass", "settings": {"texts": 4},
    "layers": [[0.1, 0.9], [], [0.9, 0.5]],
}  # fmt: skip


@pytest.mark.parametrize(
    ("full", "kept"),
    [
        (0.0, {0: (), 2: ()}),
        (0.25, {0: (1,), 2: ()}),  # of equal scores, the first layer's
        (0.5, {0: (1,), 2: (0,)}),
        (0.75, {0: (1,), 2: (0, 1)}),
        (1.0, {0: (0, 1), 2: (0, 1)}),
    ],
)
def test_the_best_heads_stay(full: float, kept: dict[int, tuple[int, ...]]) -> None:
    streaming = Streaming(scores=HeadScores.model_validate(SCORES), full=full)
    assert streaming.kept() == kept


def test_a_recipe_names_a_file_beside_it(tmp_path: Path) -> None:
    (tmp_path / "heads.json").write_text(json.dumps(SCORES))
    recipe = tmp_path / "long.toml"
    recipe.write_text('[cache]\ncontext = 512\n[cache.streaming]\nscores = "heads.json"\n')
    streaming = load_recipe(str(recipe)).cache.streaming
    assert streaming is not None and streaming.scores.layers == ((0.1, 0.9), (), (0.9, 0.5))
    assert (streaming.full, streaming.sinks, streaming.window) == (0.5, 64, 256)
    for wrong, what in (
        ("{}", "source"),
        (json.dumps(SCORES | {"layers": [[float("nan")]]}), "finite"),
        (json.dumps(SCORES | {"settings": {"texts": float("inf")}}), "finite"),
        ("no", "heads.json"),
    ):
        (tmp_path / "heads.json").write_text(wrong)
        with pytest.raises(CetaneError, match=what):
            load_recipe(str(recipe))
    with pytest.raises(CetaneError, match="only a recipe file"):
        override(load_recipe("default"), {"cache.streaming.scores": str(tmp_path / "heads.json")})
    (tmp_path / "heads.json").unlink()
    with pytest.raises(CetaneError, match=r"cache\.streaming\.scores: "):
        load_recipe(str(recipe))
