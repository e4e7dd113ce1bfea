"""The public API: instant to import, typed, and its examples run."""

import doctest
import importlib
import inspect
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

import cetane
from cetane.bundle import Bundle
from cetane.engine.sampling import Sampler
from cetane.lab.models import zaya_tiny
from cetane.tasks.workers import Workers

MODULES = ("audit", "diff", "language_model", "plan", "port", "validate")


@pytest.fixture(scope="module")
def names(chat_bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What examples call: cetane, a model, a recipe, and a bundle in which they may keep gates."""
    bundle = shutil.copytree(chat_bundle.path, tmp_path_factory.mktemp("api") / "tiny")
    model, recipe = chat_bundle.path.with_name("checkpoint"), chat_bundle.plan.recipe
    return {"cetane": cetane, "model": model, "recipe": recipe, "bundle": bundle}


@pytest.mark.parametrize("module", MODULES)
def test_examples_of_docstrings_run(module: str, names: dict[str, Any]) -> None:
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = finder.find(importlib.import_module(f"cetane.pipeline.{module}"), extraglobs=names)
    examples = [test for test in found if test.examples]
    assert examples
    runner = doctest.DocTestRunner()
    for test in examples:
        assert runner.run(test).failed == 0, test.name


def test_a_conversation_goes_on_where_it_was(names: dict[str, Any]) -> None:
    """A prompt that begins with what is in the cache gives what a new session gives."""
    with cetane.load(names["bundle"]) as lm:
        first = lm.generate("def f(self", max_new_tokens=6)
        prompt = [*lm.ids("def f(self"), *first.tokens]
        again = lm.generate(prompt, max_new_tokens=6)
    with cetane.load(names["bundle"]) as lm:
        assert lm.generate(prompt, max_new_tokens=6).tokens == again.tokens
        logits = lm.logits(prompt)
        assert logits.shape == (len(prompt), lm.bundle.plan.vocab)
        assert int(logits[-1].argmax()) == again.tokens[0]


def test_a_seed_gives_the_same_wherever_the_conversation_was(
    names: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A continued session has other roundings: of these logits a draw depends on every bit."""
    seen: list[Any] = []
    draw = Sampler.probabilities
    monkeypatch.setattr(
        Sampler, "probabilities", lambda sampler, row: seen.append(row) or draw(sampler, row)
    )
    with cetane.load(names["bundle"]) as lm:
        start = lm.ids("def f(self, name): ")
        longer = [*start, *lm.generate(start, max_new_tokens=6).tokens, *lm.ids("import os")]
        for _ in range(2):
            lm.generate(longer, max_new_tokens=1, temperature=1.0, seed=3)
    after, anew = seen
    assert after.tobytes() == anew.tobytes()


def test_a_stream_says_what_generate_says_and_can_be_closed(names: dict[str, Any]) -> None:
    with cetane.load(names["bundle"]) as lm:
        whole = lm.generate("import ", max_new_tokens=8)
        stream = lm.stream("import ", max_new_tokens=8)
        assert "".join(stream) == whole.text == stream.completion.text
        assert stream.completion.finish_reason == "length"
        stream = lm.stream("import ", max_new_tokens=8)
        next(stream)
        stream.close()
        assert stream.completion.finish_reason == "interrupted"
        assert lm.generate("import ", max_new_tokens=8).text == whole.text


def test_a_new_answer_ends_the_one_before(names: dict[str, Any]) -> None:
    """Two streams do not share a session, nor a sampler's seed."""
    with cetane.load(names["bundle"]) as lm:
        warm = {"max_new_tokens": 12, "temperature": 1.0, "seed": 3}
        drawn, greedy = lm.generate("import ", **warm), lm.generate("def ", max_new_tokens=12)
        first, second = lm.stream("import ", **warm), lm.stream("def ", max_new_tokens=12)
        begun = next(first)  # made before the second, and it samples all the same
        assert drawn.text.startswith(begun)
        assert "".join(second) == greedy.text
        with pytest.raises(cetane.CetaneError, match="began another one"):
            next(first)
        assert first.completion.finish_reason == "interrupted"
        assert drawn.tokens[: len(first.completion.tokens)] == first.completion.tokens
        longer = [*lm.ids("def "), *greedy.tokens]
        again = lm.generate(longer, max_new_tokens=6)
    with cetane.load(names["bundle"]) as lm:
        assert lm.generate(longer, max_new_tokens=6).tokens == again.tokens


def test_a_head_that_chooses_does_not_sample(names: dict[str, Any]) -> None:
    with cetane.load(names["bundle"]) as lm:
        vars(lm.bundle.plan.recipe.head)["choose"] = True
        for option in ({"temperature": 1.0}, {"logit_bias": {1: 5.0}}, {"presence_penalty": 1.0}):
            with pytest.raises(cetane.CetaneError, match="only its likeliest token"):
                lm.stream("import ", **option)  # type: ignore[arg-type]
        lm.stream("import ", seed=1)


def test_numbers_that_are_too_small(names: dict[str, Any], tmp_path: Path) -> None:
    """Perplexity left out as many tokens from the text's end; others ended in a traceback."""
    bundle, text = str(names["bundle"]), tmp_path / "text.txt"
    text.write_text("import os\n" * 20)
    assert cetane.Bundle(bundle).plan == Bundle(names["bundle"]).plan
    for tokens in (-5, 0, 1):
        with pytest.raises(cetane.CetaneError, match=f"tokens = {tokens}: must be at least 2"):
            cetane.perplexity(bundle, str(text), tokens=tokens)
    for name in ("prompt_tokens", "tokens", "rounds"):
        with pytest.raises(cetane.CetaneError, match=f"^{name} = 0: must be at least 1"):
            cetane.versus(bundle, bundle, **{name: 0})


@pytest.mark.parametrize("tolerance", [float("nan"), -1.0])
def test_a_tolerance_that_nothing_exceeds(names: dict[str, Any], tolerance: float) -> None:
    """Whatever differed passed."""
    with pytest.raises(cetane.CetaneError, match=r"tolerance = .*: must be at least 0"):
        cetane.diff(names["bundle"], precision="fp16", tolerance=tolerance)


@pytest.mark.parametrize("prompt", [["a", "b"], [{"role": "user", "content": "a"}, 5], [1.5]])
def test_a_prompt_of_other_things(names: dict[str, Any], prompt: Any) -> None:
    with (
        cetane.load(names["bundle"]) as lm,
        pytest.raises(cetane.CetaneError, match="a prompt is a text, a list of token ids, or"),
    ):
        lm.generate(prompt)


def test_a_conversation_of_other_things(names: dict[str, Any]) -> None:
    """A text would be continued as it is, without the chat template."""
    others: list[Any] = ["Why?", ["Why?"], [5, 7], {"role": "user", "content": "Why?"}]
    with cetane.load(names["bundle"]) as lm:
        for messages in others:
            with pytest.raises(cetane.CetaneError, match=r"list of messages: .*continues a text"):
                lm.chat(messages)


def test_a_message_without_a_role_or_content(chat_bundle: Bundle) -> None:
    """Templates write such messages without a word, as another's or as nothing."""
    others: list[Any] = [{}, {"content": "Why?"}, {"role": "user"}, {"role": "user", "content": 5}]
    with cetane.load(chat_bundle.path) as lm:
        for message in others:
            with pytest.raises(cetane.CetaneError, match="no role or no content"):
                lm.ids([message])
        assert lm.ids([{"role": "user", "content": "Why?"}])


def test_speculation_is_no_switch(names: dict[str, Any]) -> None:
    switch: Any = False
    with pytest.raises(cetane.CetaneError, match="write None for plain decoding"):
        cetane.load(names["bundle"], speculative=switch)


def test_a_full_context_is_a_reason(names: dict[str, Any]) -> None:
    with cetane.load(names["bundle"]) as lm:
        ids = (lm.ids("x = 1\n") * 1024)[: lm.context - 1]
        assert lm.generate(ids, max_new_tokens=9).finish_reason == "context"
        with pytest.raises(cetane.CetaneError, match="the context holds 1024"):
            lm.generate([*ids, 1, 1])
        with pytest.raises(cetane.CetaneError, match=r"the prompt has no tokens \(give some text"):
            lm.stream([])
        with pytest.raises(cetane.CetaneError, match=r"no tokens to run \(give at least one"):
            lm.logits([])
        with pytest.raises(cetane.CetaneError, match=r"not a whole number \(give a list of token"):
            lm.logits([1.5, 2])  # type: ignore[list-item]
        with pytest.raises(cetane.CetaneError, match="max_new_tokens = 0"):
            lm.generate(ids, max_new_tokens=0)
        with pytest.raises(cetane.CetaneError, match=r"max_new_tokens: .*fractional"):
            lm.generate(ids, max_new_tokens=2.5)  # type: ignore[arg-type]
        with pytest.raises(cetane.CetaneError, match="did you mean 'temperature'"):
            lm.generate(ids, temperatur=1)  # type: ignore[call-arg]
        with pytest.raises(cetane.CetaneError, match=r"logit_bias\.the.*valid integer"):
            lm.stream(ids, logit_bias={"the": 1.0})  # type: ignore[dict-item]
        with pytest.raises(cetane.CetaneError, match="temperature = nan"):
            lm.generate(ids, temperature=float("nan"))


def test_a_prompt_with_a_token_that_the_model_lacks(names: dict[str, Any]) -> None:
    with cetane.load(names["bundle"]) as lm:
        vocab = lm.bundle.plan.vocab
        lm.bundle.tokenizer.backend.add_tokens([f"<{number}>" for number in range(vocab)])
        with pytest.raises(
            cetane.CetaneError, match=f"has '<{vocab - 1}>' as token .* only {vocab}"
        ):
            lm.stream(f"x <{vocab - 1}>")


def test_the_import_is_instant_and_every_name_is_there() -> None:
    code = (
        "import sys, time; t = time.process_time(); import cetane; "
        "print(time.process_time() - t, 'torch' in sys.modules, 'numpy' in sys.modules)"
    )
    seconds, *heavy = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert float(seconds) <= 0.1
    assert heavy == ["False", "False"]
    assert all(getattr(cetane, name) is not None for name in cetane.__all__)
    assert set(cetane.__all__) == set(dir(cetane))
    with pytest.raises(AttributeError, match="attribute prot"):
        _ = cetane.prot
    assert (Path(cetane.__file__).parent / "py.typed").is_file()


def test_whatever_users_give_or_get_has_a_public_name() -> None:
    public = [getattr(cetane, name) for name in cetane.__all__]
    functions = [one for one in public if inspect.isfunction(one)]
    functions += [cetane.LanguageModel.stream, cetane.LanguageModel.generate]
    for function in functions:
        for name, hint in get_type_hints(function).items():
            for kind in types_in(hint):  # open workers: only the command gives these
                assert kind in public or kind is Workers, f"{function.__name__}: {name}"
    assert get_type_hints(cetane.port)["quality"] == cetane.Quality | None


def types_in(hint: Any) -> list[type]:
    """The classes of cetane in an annotation."""
    parts = [inner for part in get_args(hint) for inner in types_in(part)]
    own = isinstance(hint, type) and hint.__module__.startswith("cetane.")
    return [*parts, hint] if own else parts


def test_a_room_does_not_hide_a_function() -> None:
    """`cetane.NAME` stays a function once every room is imported."""
    importlib.import_module("cetane.sweeps.run")
    for name in ("port", "plan", "load", "validate", "audit", "diff", "sweep", "train_draft_head"):
        assert callable(getattr(cetane, name)), name


def test_bad_input_raises_cetane_errors_only(tmp_path: Path) -> None:
    started = time.monotonic()
    for call in (
        lambda: cetane.port(tmp_path / "none"),
        lambda: cetane.plan(tmp_path / "none"),
        lambda: cetane.load(tmp_path / "none"),
        lambda: cetane.validate(tmp_path),
        lambda: cetane.audit(tmp_path),
        lambda: cetane.diff(tmp_path),
        lambda: cetane.sweep(tmp_path / "none"),
        lambda: cetane.plan(zaya_tiny(), bits=5),
        lambda: cetane.plan(zaya_tiny(), changes={"cache.contekst": 64}),
        lambda: cetane.plan(zaya_tiny(), changes={"cache context": 64}),
    ):
        with pytest.raises(cetane.CetaneError):
            call()
    assert time.monotonic() - started < 60


@pytest.mark.parametrize(("name", "package", "wanted"), [
    ("serve", "fastapi", "'fastapi>="), ("evaluate", "lm_eval", "'lm-eval[api]>="),
])  # fmt: skip
def test_an_extra_that_is_missing(name: str, package: str, wanted: str) -> None:
    """The hint names its packages: no index has cetane."""
    code = f"import sys; sys.modules['{package}'] = None; import cetane; cetane.{name}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    line = done.stderr.splitlines()[-1]
    assert line.startswith("cetane.errors.CetaneError")
    assert f"pip install {wanted}" in line and "cetane[" not in line
