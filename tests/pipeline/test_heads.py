"""The search for heads that may stream: its scores by hand, its bytes by the planner."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import build_model, build_tokenizer

from cetane.checkpoint import open_checkpoint
from cetane.errors import CetaneError
from cetane.files import silent
from cetane.fitting.heads import gate_scores
from cetane.fitting.pass_keys import PassKeys, hide
from cetane.gates import reference
from cetane.pipeline import heads
from cetane.pipeline.heads import cache_sizes, find_heads, scored_layers
from cetane.pipeline.request import Request
from cetane.planner import Planner, as_recipe_asks
from cetane.schema.recipe import parse_recipe
from cetane.schema.streaming import HeadScores, Streaming

SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
TOKENS = 720
"""So many hold ten pass keys and their questions in the tiny tokenizer's long spelling."""

Asking = Callable[..., Request]


@pytest.fixture
def asking(tmp_path: Path) -> Asking:
    """`asking(kind, cache={...}, **config)`: a tiny model's folder, and a recipe."""

    def request(kind: str = "llama", cache: Any = None, **config: Any) -> Request:
        config = {"max_position_embeddings": 1024} | config
        build_model(kind, **config).save_pretrained(tmp_path / kind)
        build_tokenizer().save_pretrained(tmp_path / kind)
        content = {
            "name": "test",
            "cache": {"context": 512} | (cache or {}),
            "tokens": {"verify": 0, "prefill": 16},
            "compression": {"default": "fp16"},
        }
        recipe = parse_recipe(content, "test")
        return Request(as_recipe_asks(open_checkpoint(tmp_path / kind), recipe), recipe)

    return request


def lessons(texts: int) -> list[PassKeys]:
    """The texts that score heads."""
    tokenizer = build_tokenizer()
    encoder: Any = type("Encoder", (), {
        "encode_plain": lambda _, text: tokenizer.encode(text, add_special_tokens=False),
        "encode": lambda _, text: tokenizer.encode(text),
    })()  # fmt: skip
    hay = heads.haystack(encoder)
    return [hide(encoder, hay, TOKENS, 1000 + number, 10) for number in range(texts)]


@torch.no_grad()
def masses(texts: int) -> list[list[float]]:
    """The scores of `mass`, from the weights that eager attention gives out: of each text, the
    mean over answers, tokens and query heads of a group, of which the largest counts."""
    model, found = build_model(max_position_embeddings=1024), torch.zeros(texts, 2, 2)
    for number, text in enumerate(lessons(texts)):
        ids, answers = text.whole
        seen = model(torch.tensor([ids]), output_attentions=True).attentions
        for layer, weights in enumerate(seen):
            asked = torch.zeros(4)
            for question, answer in zip(text.questions, answers, strict=True):
                told = list(question.place)[-len(question.answer) :]
                rows = weights[0][:, [at - 1 for at in answer]][..., told]
                asked += rows.sum(-1).mean(-1) / 10
            found[number, layer] = asked.reshape(2, 2).amax(1)
    return found.mean(0).tolist()


def gates(texts: int, window: int) -> Any:
    """The gates of heads that see 64 sinks and a window."""
    model = build_model(max_position_embeddings=1024).requires_grad_(False)
    return gate_scores(model, {0: 2, 1: 2}, lessons(texts), 64, window, silent)


def test_scores_are_attention_on_the_keys(asking: Asking, tmp_path: Path) -> None:
    """Against transformers' own weights; then the file is what the result says."""
    said: list[str] = []
    output = tmp_path / "new folder" / "heads.json"
    result = find_heads(
        asking(), output, tokens=TOKENS, texts=1, keys=2, steps=2,
        progress=lambda what, *_: said.append(what),
    )  # fmt: skip
    assert result.scores.layers == tuple(pytest.approx(row, abs=2e-6) for row in masses(2))
    assert HeadScores.model_validate_json(output.read_text()) == result.scores
    assert result.scores.source == result.scores.model_type == "llama"
    assert result.scores.settings["texts"] == 2
    assert [one.full for one in result.judged] == [1.0, 0.75, 0.5, 0.25]
    assert [(one.found, one.asked) for one in result.judged] == [(0, 2)] * 4
    assert (result.context, result.tokens) == (512, TOKENS)
    assert set(said) == {
        "attention mass", *(f"pass keys with {share}% of the heads" for share in (100, 75, 50, 25))
    }  # fmt: skip


def test_recall_is_counted_with_the_heads_of_each_share(
    asking: Asking, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that finds a key for every head that sees all tokens, of texts of their own."""
    texts: list[Any] = []

    def found(model: Any, text: Any) -> list[bool]:
        from transformers import AttentionInterface

        texts.append(text)
        seen = AttentionInterface()[model.config._attn_implementation].seen
        assert (seen.sinks, seen.window) == (64, 256)
        full = sum(map(len, seen.full.values()))
        return [number < full for number in range(len(text.questions))]

    monkeypatch.setattr("cetane.fitting.pass_keys.found", found)
    result = find_heads(
        asking(), tmp_path / "heads.json", "gates", TOKENS, texts=2, keys=4, steps=3
    )
    assert [(one.found, one.asked) for one in result.judged] == [(8, 8), (6, 8), (4, 8), (2, 8)]
    assert texts == texts[:2] * 4 and texts[0] != texts[1]
    scores = result.scores.layers
    assert scores == tuple(pytest.approx(row, abs=1e-4) for row in gates(3, 128))
    assert scores != tuple(pytest.approx(row, abs=1e-4) for row in gates(3, 700))
    assert result.scores.settings == pytest.approx({
        "texts": 3, "tokens": result.scores.settings["tokens"], "sinks": 64, "window": 128,
        "charge": 0.05, "rate": 0.05,
    })  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "cache", "config"),
    [
        ("llama", {}, {}),
        ("llama", {"contract": "stateful"}, {"num_key_value_heads": 4}),
        ("llama", {"windowed": False}, {}),
        ("gemma3_text", {}, {"layer_types": [SLIDING, FULL], "sliding_window": 32}),
        ("qwen3_5_text", {}, {"layer_types": [LINEAR, FULL], "num_key_value_heads": 4}),
    ],
)
def test_bytes_are_the_planner_s(kind: str, cache: Any, config: Any, asking: Asking) -> None:
    """Of every choice, as a plan of that recipe has them."""
    request = asking(kind, cache, **config)
    layers = scored_layers(request)
    sizes = cache_sizes(request, layers)
    rows = tuple(
        tuple((7 * layer + 3 * head) % 5 / 5 for head in range(layers.get(layer, 0)))
        for layer in range(2)
    )
    scores = HeadScores(source="", model_type="", method="mass", settings={}, layers=rows)
    made = set()
    for full in (1.0, 0.75, 0.5, 0.25, 0.0):
        streaming = Streaming(scores=scores, full=full)
        table = request.recipe.cache.model_copy(update={"streaming": streaming})
        recipe = request.recipe.model_copy(update={"cache": table})
        plan = Planner(as_recipe_asks(request.checkpoint, recipe), recipe).plan()
        made.add(sizes.nbytes(streaming))
        assert sizes.nbytes(streaming) == plan.kv_bytes[512]
    assert len(made) == (1 if cache.get("windowed") is False else min(5, 1 + sizes.heads))


@pytest.mark.parametrize(
    ("kind", "cache", "config", "options", "message"),
    [
        ("llama", {"contract": "shift"}, {}, {}, "a shift cache forgets the first tokens"),
        ("llama", {}, {}, {"tokens": 1025}, "1024 positions .*--tokens 1024"),
        ("llama", {}, {}, {"tokens": 383}, "--tokens 383: too few .* 384"),
        ("llama", {"context": 256}, {"max_position_embeddings": 383}, {"tokens": 384},
         "384 tokens or more, but the model was trained for 383"),
        ("llama", {}, {}, {"tokens": 400}, "10 pass keys .* of 400 .*; --tokens 768 gives"),
        ("llama", {}, {}, {"output": "."}, "--output .*: is a folder"),
        ("llama", {}, {}, {"output": "/proc/heads.json"}, "cannot write /proc/heads.json"),
        ("gemma3_text", {}, {"layer_types": [SLIDING] * 2}, {}, "no layer of .* sees all tokens"),
        ("gemma2", {}, {"layer_types": [SLIDING, FULL]}, {}, "cannot stream: a bound holds"),
    ],
)  # fmt: skip
def test_refused_before_the_model_is_read(
    kind: str, cache: Any, config: Any, options: Any, message: str, asking: Asking,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(reference, "Reference", None)
    output = tmp_path / options.pop("output", "heads.json")
    with pytest.raises(CetaneError, match=message):
        find_heads(asking(kind, cache, **config), output, **{"tokens": TOKENS} | options)
    assert not (tmp_path / "heads.json").exists()


def test_more_tokens_do_not_make_texts_that_score_longer(
    asking: Asking, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heads, "SCORED", 400)
    with pytest.raises(CetaneError, match=r"10 pass keys .* of 400 .*this tokenizer needs more"):
        find_heads(asking(), tmp_path / "heads.json", tokens=TOKENS)


def test_a_recipe_whose_heads_stream_is_refused(asking: Asking, tmp_path: Path) -> None:
    rows = ((0.1, 0.2), (0.3, 0.4))
    scores = HeadScores(source="", model_type="", method="mass", settings={}, layers=rows)
    request = asking("llama", {"streaming": Streaming(scores=scores).model_dump()})
    with pytest.raises(CetaneError, match="recipe test: its heads stream already"):
        find_heads(request, tmp_path / "heads.json", tokens=TOKENS)


def test_a_model_that_is_never_whole_in_memory(
    asking: Asking, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scored by attention mass as ever; gates need its weights twice."""
    request = asking()
    expected = find_heads(request, tmp_path / "one.json", tokens=TOKENS, texts=1, steps=1)
    monkeypatch.setattr(reference, "RESIDENT", 0)
    found = find_heads(request, tmp_path / "two.json", tokens=TOKENS, texts=1, steps=1)
    assert found == expected
    with pytest.raises(CetaneError, match="--method gates: the model is too large"):
        find_heads(request, tmp_path / "three.json", "gates", TOKENS, texts=1, steps=1)
