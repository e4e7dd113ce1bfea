"""The tokenizer against transformers on the same files."""

import json
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from cetane.checkpoint import Tokenizer, tokenizer_trial
from cetane.errors import CetaneError

TEMPLATE = """
{%- if messages[0]['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}
{{ bos_token }}
{%- for message in messages %}
    {%- if message.role == 'skip' %}{% continue %}{% endif %}
<|im_start|>{{ message['role'] }}
{% generation %}{{ message['content'] | tojson }}{% endgeneration %}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
{{ strftime_now('%Y') | length }}"""
SPECIAL = ["<s>", "<|im_start|>", "<|im_end|>", "<pad>"]
TEXTS = [
    "Hello, world!",
    "  two  spaces\n\n\ttab ",
    "naïve 日本語 😀👩‍👩‍👧",
    "<|im_start|>user\n1234<|im_end|>",
    "",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer that adds BOS, as a model's folder holds it."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["hello world, the world of words"] * 3, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    backend.enable_truncation(3)  # as some published files have it; transformers ignores it
    path = tmp_path_factory.mktemp("tokenizer")
    backend.save(str(path / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": {"content": "<s>", "__type": "AddedToken"},
        "eos_token": "<|im_end|>",
        "pad_token": "<pad>",
        "chat_template": "{{ 'from the config' }}",
    }
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    (path / "generation_config.json").write_text('{"eos_token_id": [3, 2]}')
    return path


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


@pytest.mark.parametrize("text", TEXTS)
def test_encode_and_decode(text: str, tokenizer: Tokenizer, theirs: Any) -> None:
    ids = tokenizer.encode(text)
    assert ids == theirs(text).input_ids and ids[0] == 0
    for skip in (True, False):
        expected = theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        assert tokenizer.decode(ids, skip_special_tokens=skip) == expected


def test_attributes(tokenizer: Tokenizer) -> None:
    assert tokenizer.bos_id == 0
    assert tokenizer.eos_ids == (3, 2)  # generation_config's list holds the tokenizer's own
    assert tokenizer.vocab_size == len(tokenizer.backend.get_vocab())
    assert tokenizer.has_chat_template


MESSAGES = [
    {"role": "system", "content": 'Be "brief" & <kind>.'},
    {"role": "skip", "content": ""},
    {"role": "user", "content": "héllo\n"},
]


@pytest.mark.parametrize("generate", [True, False])
def test_chat(generate: bool, tokenizer: Tokenizer, theirs: Any) -> None:
    expected = theirs.apply_chat_template(
        MESSAGES, add_generation_prompt=generate, return_dict=False
    )
    assert tokenizer.chat(MESSAGES, add_generation_prompt=generate) == expected


CALLED = [{"type": "function", "function": {"name": "now", "arguments": {}}}]
LEFT_OUT = [
    {"role": "assistant", "content": None, "tool_calls": CALLED},
    {"role": "assistant", "content": "x", "tool_calls": None, "name": None},
    {"role": "assistant", "content": "x", "reasoning": "since"},
    {"role": "assistant", "content": "x", "thinking": "since", "reasoning_content": None},
    {"role": "assistant", "content": "x", "reasoning_content": "", "thinking": "since"},
]


@pytest.mark.parametrize("message", LEFT_OUT)
def test_keys_that_templates_see(
    message: dict[str, Any], tokenizer: Tokenizer, theirs: Any
) -> None:
    """Clients send `None` for what a message lacks, and reasoning under several names."""
    template = (
        "{{ messages | tojson }}"
        "{% for m in messages %}{% if m.content is defined %}{{ m.content }}{% endif %}{% endfor %}"
    )
    wanted = theirs.apply_chat_template([message], chat_template=template, tokenize=False)
    own = replace(tokenizer, chat_template=template)
    assert own.render_chat([message], False) == wanted


def test_chat_errors(folder: Path, tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(CetaneError, match="no tools here"):
        tokenizer.chat([{"role": "tool", "content": ""}])
    with pytest.raises(CetaneError, match="does not accept"):
        tokenizer.chat([])
    with pytest.raises(CetaneError, match="does not accept"):
        tokenizer.chat([{"role": "user"}])
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    plain = Tokenizer.load(tmp_path)
    assert not plain.has_chat_template and plain.bos_id is None and plain.eos_ids == ()
    with pytest.raises(CetaneError, match="no chat template"):
        plain.chat(MESSAGES)


@pytest.mark.parametrize(
    "template",
    ["{% if %}", "{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ 1 / 0 }}"],
)
def test_broken_and_hostile_templates(template: str, tokenizer: Tokenizer) -> None:
    bad = Tokenizer(tokenizer.backend, {}, (), template)
    with pytest.raises(CetaneError, match="chat template") as caught:
        bad.chat(MESSAGES)
    assert "\n" not in str(caught.value)


def test_save_and_load(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer.save(tmp_path / "a")
    again = Tokenizer.load(tmp_path / "a")
    again.save(tmp_path / "b")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "a")
    assert theirs.bos_token_id == again.bos_id and theirs.eos_token == "<|im_end|>"
    for text in TEXTS:
        assert again.encode(text) == tokenizer.encode(text) == theirs(text).input_ids
    assert again.eos_ids == tokenizer.eos_ids
    assert again.chat(MESSAGES) == tokenizer.chat(MESSAGES)
    assert theirs.apply_chat_template(MESSAGES, return_dict=False) == again.chat(MESSAGES, False)
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert [(tmp_path / "a" / f).read_bytes() for f in files] == [
        (tmp_path / "b" / f).read_bytes() for f in files
    ]


def test_eos_ids_from_other_files(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": {"content": "<|im_end|>"}}')
    assert Tokenizer.load(tmp_path).eos_ids == (2,)
    (tmp_path / "config.json").write_text('{"text_config": {"eos_token_id": [7, 8]}}')
    assert Tokenizer.load(tmp_path).eos_ids == (7, 8, 2)
    (tmp_path / "config.json").write_text('{"eos_token_id": 9}')
    assert Tokenizer.load(tmp_path).eos_ids == (9, 2)
    (tmp_path / "config.json").write_text('{"eos_token_id": -1}')
    assert Tokenizer.load(tmp_path).eos_ids == (2,)


@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
@pytest.mark.parametrize("wrong", [-5, 2**31, 10**30])
def test_a_stop_token_that_no_model_has(
    folder: Path, tmp_path: Path, name: str, wrong: int
) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (tmp_path / name).write_text(json.dumps({"eos_token_id": [2, wrong]}))
    with pytest.raises(CetaneError, match=f"{name}: eos_token_id: no token has the id {wrong} "):
        Tokenizer.load(tmp_path)


def test_decoding_aside_gives_the_same_text(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    ids = tokenizer.backend.encode("naïve 中文 <|im_end|> x").ids
    for skip in (True, False):
        assert tokenizer.decode_aside(ids, skip) == tokenizer.decode(ids, skip)


def test_encoding_aside_gives_the_same_ids_and_lets_other_threads_run(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    for text in ("", "hello world", "naïve 中文 <|im_end|> x"):
        for special in (True, False):
            theirs = tokenizer.backend.encode(text, add_special_tokens=special).ids
            assert tokenizer.encode_aside(text, special) == theirs
    with pytest.raises(CetaneError, match="not valid Unicode"):
        tokenizer.encode_aside("\ud800")
    begun, done, ticks = threading.Event(), threading.Event(), 0

    def encode() -> None:
        begun.set()
        tokenizer.encode_aside("hello " * 300_000)
        done.set()

    thread = threading.Thread(target=encode)
    thread.start()
    begun.wait()
    while not done.wait(0.01):
        ticks += 1
    thread.join()
    assert ticks > 10


SENTENCES = "".join(f"{n}. The naïve world of words, 世界! hello\n\n" for n in range(2000))


@pytest.mark.parametrize("count", [1, 300, 2500, 10**6])
@pytest.mark.parametrize("text", ["", "hello", SENTENCES, "ab" * 50_000])
def test_the_first_tokens_of_a_text_are_those_of_the_whole(
    text: str, count: int, tokenizer: Tokenizer
) -> None:
    assert tokenizer.encode_first(text, count) == tokenizer.encode(text)[:count]


@pytest.mark.parametrize("longest", [1, 200])
def test_no_more_of_a_long_text_is_encoded_than_its_first_tokens_need(
    longest: int, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each MB takes 160 MB of memory. Tokens may be of any length."""
    lengths = list[int]()

    def encode_aside(_: Tokenizer, text: str) -> list[int]:
        lengths.append(len(text))
        return [*range(-(-len(text) // longest))]

    monkeypatch.setattr(Tokenizer, "encode_aside", encode_aside)
    assert tokenizer.encode_first("a" * 10_000_000, 100) == [*range(100)]
    assert sum(lengths) < 10 * max(longest, 8) * 1200


def test_no_token_stands_for_more_bytes_than_the_longest(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    sizes = [len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size)]
    assert tokenizer.longest >= max(sizes)


def entry(text: str, special: bool, **flags: bool) -> dict[str, Any]:
    """An added token, as transformers writes it."""
    plain = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    return {"__type": "AddedToken", "content": text, "special": special} | plain | flags


DECODER = {"402": entry("<a>", False, lstrip=True), "401": entry("<b>", True)}
DECLARED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, int] | None]] = {
    # tokenizer_config.json, special_tokens_map.json, added_tokens.json
    "a decoder": ({"added_tokens_decoder": DECODER}, {}, None),
    "a decoder beside other files": (
        {"added_tokens_decoder": DECODER},
        {"additional_special_tokens": ["<c>"], "pad_token": "<d>"},
        {"<e>": 403},
    ),
    "a decoder that changes a token": (
        {"added_tokens_decoder": {"3": entry("<pad>", False, rstrip=True)}}, {}, None,
    ),
    "additional": (
        {"additional_special_tokens": ["<a>", entry("<b>", False, lstrip=True)]}, {}, None,
    ),
    "extra": ({"extra_special_tokens": ["<b>", "<a>"], "mask_token": "<c>"}, {}, None),
    "extra by name": (
        {"extra_special_tokens": {"image_token": "<b>"}, "additional_special_tokens": ["<a>"]},
        {}, None,
    ),
    "names of its own": ({"image_token": "<b>", "pad_token": "<a>"}, {"cls_token": "<c>"}, None),
    "additional in the map": ({}, {"additional_special_tokens": ["<a>", "<b>"]}, None),
    "extra in both": (
        {"extra_special_tokens": ["<b>"]}, {"extra_special_tokens": ["<a>", "<b>"]}, None,
    ),
    "a role in both": ({"pad_token": "<a>"}, {"pad_token": {"content": "<b>"}}, None),
    "added": ({}, {}, {"<a>": 401, "<b>": 400}),
    "added, some special": (
        {"additional_special_tokens": ["<a>"], "pad_token": "<b>"}, {},
        {"<c>": 402, "<b>": 401, "<a>": 400},
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", DECLARED)
def test_tokens_that_only_other_files_declare(form: str, folder: Path, tmp_path: Path) -> None:
    config, older, added = DECLARED[form]
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>"} | config
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(older))
    if added is not None:
        (tmp_path / "added_tokens.json").write_text(json.dumps(added))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = Tokenizer.load(tmp_path)
    wanted = theirs.backend_tokenizer.get_added_tokens_decoder()
    assert {i: repr(t) for i, t in ours.backend.get_added_tokens_decoder().items()} == {
        i: repr(t) for i, t in wanted.items()
    }
    text = "hello <a> <b>x<c> <d> <e> <pad> w"
    ids = ours.encode(text)
    assert ids == theirs(text).input_ids
    for skip in (True, False):
        assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.special_tokens.get("pad_token") == theirs.pad_token
    ours.save(tmp_path / "saved")
    assert Tokenizer.load(tmp_path / "saved").encode(text) == ids


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("tokenizer_config", {"added_tokens_decoder": []}, "added_tokens_decoder is not an object"),
        ("tokenizer_config", {"added_tokens_decoder": None}, "added_tokens_decoder is not an obj"),
        ("tokenizer_config", {"added_tokens_decoder": {"x": {"content": "<a>"}}}, "token is 'x',"),
        ("tokenizer_config", {"added_tokens_decoder": {"9" * 5000: "<a>"}}, f"is '{'9' * 40}', no"),
        ("added_tokens", {"<a>": "a", "<b>": 5}, "the id of an added token is 'a', not a whole"),
        ("added_tokens", {"<a>": 1.5}, "the id of an added token is '1.5', not a whole number"),
        ("added_tokens", {"<a>": [1]}, r"the id of an added token is '\[1\]', not a whole number"),
    ],
)
def test_malformed_added_tokens(
    name: str, content: Any, reason: str, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (tmp_path / f"{name}.json").write_text(json.dumps(content))
    with pytest.raises(CetaneError, match=rf"{tmp_path}/{name}\.json: .*{reason}") as refusal:
        Tokenizer.load(tmp_path)
    assert refusal.value.hint == "download the model's tokenizer files again"


@pytest.mark.parametrize(
    "declared",
    [
        {"added_tokens_decoder": {n: {"content": f"<{n}>"} for n in range(9)}},
        {"additional_special_tokens": [f"<{n}>" for n in range(9)]},
        {f"{n}_token": f"<{n}>" for n in range(9)},
    ],
)
def test_more_tokens_than_any_model_declares(
    declared: dict[str, Any], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cetane.checkpoint.added_tokens.MOST_TOKENS", 8)
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(declared))
    with pytest.raises(CetaneError, match="added tokens are not valid: they are more than 8"):
        Tokenizer.load(tmp_path)


LONG = {"content": "a" * 50, "special": True}


@pytest.mark.parametrize(
    "declared",
    [
        {"added_tokens_decoder": {"900": LONG}},
        {"additional_special_tokens": [LONG]},
        {"image_token": LONG["content"]},
    ],
)
def test_added_tokens_with_more_characters_than_any_model_has(
    declared: dict[str, Any], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cetane.checkpoint.added_tokens.MOST_CHARACTERS", 49)
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(declared))
    with pytest.raises(CetaneError, match="added tokens have more than 49 characters together"):
        Tokenizer.load(tmp_path)


def test_a_tokenizer_of_many_megabytes_of_added_tokens(folder: Path, tmp_path: Path) -> None:
    """A hundred tokens of 1 MB took 13 s and 3 GB."""
    content = json.loads((folder / "tokenizer.json").read_text())
    token = content["added_tokens"][0]
    content["added_tokens"] += [
        token | {"id": 500 + number, "content": f"{number}{'a' * (1 << 20)}"} for number in range(5)
    ]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(CetaneError, match="more than 4,194,304 characters together"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("regex", [r"(a+)+$", r"(\s+)+$", r"(\d|\d+)+$"])
def test_a_regex_that_tries_all_ways(regex: str, folder: Path, tmp_path: Path) -> None:
    """The library gives up after ten million steps, wherever it runs: that is a verdict."""
    content = json.loads((folder / "tokenizer.json").read_text())
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content | {"pre_tokenizer": split}))
    with pytest.raises(CetaneError, match="is not a valid tokenizer: a regular expression of it"):
        Tokenizer.load(tmp_path)


PANIC = {"decoder": {"type": "Strip", "content": " ", "start": 2**60, "stop": 2**60}}
NO_UNKNOWN = {
    "model": {"type": "WordPiece", "vocab": {"a": 0}, "unk_token": "no such token",
              "continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "why"),
    [(PANIC, "the tokenizers library panics on it"), (NO_UNKNOWN, "fails on a short text: Word")],
)
def test_a_library_that_fails_is_a_verdict(
    changes: dict[str, Any],
    why: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It fails on any machine. Without a verdict, each command would try it anew."""
    monkeypatch.setenv("CETANE_CACHE", str(tmp_path / "cache"))
    content = json.loads((folder / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(content | changes))
    said = f"is not a valid tokenizer: .*{why}"
    with pytest.raises(CetaneError, match=said):
        Tokenizer.load(tmp_path)
    monkeypatch.setattr(tokenizer_trial, "tried", None)
    with pytest.raises(CetaneError, match=said):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize("side", ["lstrip", "rstrip"])
def test_a_blank_token_that_strips(side: str, beside: bool, folder: Path, tmp_path: Path) -> None:
    """Of 100,000 newlines, such a token takes minutes."""
    content = json.loads((folder / "tokenizer.json").read_text())
    token = content["added_tokens"][0] | {"id": 400, "content": "\n"}
    if beside:
        config = {"added_tokens_decoder": {"400": token | {side: True}}}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    else:
        content["added_tokens"].append(token | {side: True})
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(CetaneError, match=r"the added token '\\n' is blank, and takes") as caught:
        Tokenizer.load(tmp_path)
    assert str(caught.value.hint).startswith("set its lstrip and rstrip to false")
    content["added_tokens"] = [*content["added_tokens"][:4], token]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "tokenizer_config.json").unlink(missing_ok=True)
    assert len(Tokenizer.load(tmp_path).encode_plain("\n\n")) == 2


def test_template_from_the_config(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    for value, expected in (
        ("one", "one"),
        ([{"name": "rag", "template": "x"}, {"name": "default", "template": "two"}], "two"),
        ({"rag": "x", "default": "two"}, "two"),
        ({"default": {"default": "two"}}, None),
        ([1], None),
        (7, None),
    ):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}))
        assert Tokenizer.load(tmp_path).chat_template == expected


@pytest.mark.parametrize("splits", [True, False, None])
def test_special_tokens_that_are_split(splits: bool | None, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"chat_template": TEMPLATE, "split_special_tokens": bool(splits)}
    if splits is None:
        del config["split_special_tokens"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    own = Tokenizer.load(tmp_path)
    own.save(tmp_path / "saved")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    for tokenizer in (own, Tokenizer.load(tmp_path / "saved")):
        for text in TEXTS:
            assert tokenizer.encode(text) == theirs(text).input_ids == again(text).input_ids
        assert tokenizer.chat(MESSAGES) == theirs.apply_chat_template(
            MESSAGES, add_generation_prompt=True, return_dict=False
        )


DEFAULT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
TOOL_USE = "<tools>{{ tools | tojson }}</tools>" + DEFAULT
NAMED = [{"name": "default", "template": DEFAULT}, {"name": "tool_use", "template": TOOL_USE}]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize(
    ("configured", "files"),
    [
        (NAMED, {}),
        ([{"name": "rag", "template": "x"}, *NAMED], {}),
        ({"tool_use": TOOL_USE, "default": DEFAULT, "rag": "x"}, {}),
        (None, {"chat_template": DEFAULT, "additional_chat_templates/tool_use": TOOL_USE}),
        (NAMED, {"chat_template": "of a file"}),
        (DEFAULT, {}),
    ],
)
def test_a_template_for_tools(
    configured: Any, files: dict[str, str], folder: Path, tmp_path: Path
) -> None:
    """As Hermes 3 and Mixtral have it. Saved, it is the same for transformers and for cetane."""
    model, saved = tmp_path / "model", tmp_path / "saved"
    (model / "additional_chat_templates").mkdir(parents=True)
    (model / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": configured}
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    for name, text in files.items():
        (model / f"{name}.jinja").write_text(text)
    Tokenizer.load(model).save(saved)
    theirs = transformers.AutoTokenizer.from_pretrained(model)
    again = transformers.AutoTokenizer.from_pretrained(saved)
    asked: dict[str, Any] = {"tokenize": False, "add_generation_prompt": True}
    for tools in ([], TOOLS):
        wanted = theirs.apply_chat_template(MESSAGES, tools=tools or None, **asked)
        assert again.apply_chat_template(MESSAGES, tools=tools or None, **asked) == wanted
        for path in (model, saved):
            own = Tokenizer.load(path)
            assert own.render_chat(MESSAGES, tools=tools) == wanted
            assert own.chat(MESSAGES, tools=tools) == own.encode_plain(wanted)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"model": 1}'])
def test_malformed_files(content: str, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CetaneError, match="not a valid tokenizer"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(CetaneError, match=r"generation_config\.json"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import os; os.kill(os.getpid(), 9)", "another program killed the child process"),
        ("import no_such_library", "No module named 'no_such_library'"),
        ("raise MemoryError", "the machine has less"),
        ("import time; time.sleep(60)", "it takes more than 1 s"),
        ("while True: pass", "it needs more than 1 s of a processor"),
    ],
)
def test_a_trial_without_a_verdict_is_not_kept(
    code: str, why: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same tokenizer would be refused for ever, whatever ended its trial once."""
    monkeypatch.setenv("CETANE_CACHE", str(tmp_path))
    seconds, patience = 1, 1 if "sleep" in code else tokenizer_trial.SANDBOX.patience
    with monkeypatch.context() as once:
        other = replace(tokenizer_trial.SANDBOX, code=code, seconds=seconds, patience=patience)
        once.setattr(tokenizer_trial, "SANDBOX", other)
        with pytest.raises(CetaneError, match=f"came to no verdict: .*{why}"):
            Tokenizer.load(folder)
    Tokenizer.load(folder)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model"])
def test_a_file_that_is_too_large(name: str, tmp_path: Path) -> None:
    """A sparse file takes no room, but its hash takes minutes."""
    with open(tmp_path / name, "wb") as file:
        file.truncate(tokenizer_trial.LARGEST + 1)
    with pytest.raises(CetaneError, match=rf"{name} is larger than the 268,435,456 bytes"):
        Tokenizer.load(tmp_path)


SIDE_FILES = (
    "tokenizer.json", "tokenizer_config.json", "generation_config.json", "special_tokens_map.json",
    "added_tokens.json", "chat_template.jinja", "additional_chat_templates/tool_use.jinja",
)  # fmt: skip


@pytest.mark.parametrize("kind", ["pipe", "device", "broken link"])
@pytest.mark.parametrize("name", SIDE_FILES)
def test_a_special_file_is_no_missing_one(
    name: str, kind: str, folder: Path, tmp_path: Path
) -> None:
    """Its model would have no chat template, or other tokens, without a word."""
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    if kind == "pipe":
        os.mkfifo(tmp_path / name)
    else:
        (tmp_path / name).symlink_to("/dev/zero" if kind == "device" else "nowhere")
    with pytest.raises(CetaneError, match=f"cannot read {tmp_path / name}: "):
        Tokenizer.load(tmp_path)


DOUBLE = {"type": "Replace", "pattern": {"String": "ß"}, "content": "ßß"}


@pytest.mark.parametrize(
    ("part", "step"),
    [
        ("normalizer", {"type": "Sequence", "normalizers": [DOUBLE] * 20}),
        (
            "normalizer",
            {
                "type": "Sequence",
                "normalizers": [DOUBLE | {"pattern": {"Regex": "[\u00df]"}}] * 20,
            },
        ),
        ("normalizer", {"type": "Prepend", "prepend": "a" * 200}),
        ("decoder", {"type": "Sequence", "decoders": [DOUBLE] * 20}),
    ],
)
def test_a_step_that_makes_a_long_text_of_a_letter(
    part: str, step: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    """Its library would fill the memory, and abort the process."""
    content = json.loads((folder / "tokenizer.json").read_text()) | {part: step}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(CetaneError, match="it makes a long text of a short one"):
        Tokenizer.load(tmp_path)


def test_steps_of_real_tokenizers_are_taken(folder: Path, tmp_path: Path) -> None:
    """One ligature of Unicode stands for 18 letters."""
    steps = [DOUBLE, {"type": "NFKC"}, {"type": "Lowercase"}, {"type": "Prepend", "prepend": "▁"}]
    content = json.loads((folder / "tokenizer.json").read_text())
    content |= {"normalizer": {"type": "Sequence", "normalizers": steps}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    normalizer = Tokenizer.load(tmp_path).backend.normalizer
    assert len(normalizer.normalize_str("\ufdfa")) == 19


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, 3], "has '<pad>' as token 3, but the model has only 3 tokens"),
        ([-1], "token -1 is not in the vocabulary of 3"),
        ([2**40], "token 1099511627776 is not in the vocabulary of 3"),
    ],
)
def test_tokens_that_a_model_lacks(ids: list[int], message: str, tokenizer: Tokenizer) -> None:
    tokenizer.check_known([0, 1, 2], 3)
    with pytest.raises(CetaneError, match=message) as caught:
        tokenizer.check_known(ids, 3)
    assert caught.value.hint


def test_text_that_is_no_unicode(tokenizer: Tokenizer) -> None:
    with pytest.raises(CetaneError, match="not valid Unicode"):
        tokenizer.encode("a\ud800")


@pytest.mark.parametrize("text", [*TEXTS, "x" * 50 + "é" * 9])
def test_stream_gives_whole_characters(text: str, tokenizer: Tokenizer) -> None:
    stream = tokenizer.stream()
    pieces = [stream.push(i) for i in tokenizer.encode(text)]
    assert "".join(pieces) == tokenizer.decode(tokenizer.encode(text))
    assert not any("\ufffd" in piece for piece in pieces)


def test_stream_survives_invalid_bytes(tokenizer: Tokenizer) -> None:
    alphabet = tokenizer.backend.get_vocab()
    half = [alphabet[c] for c in "ðŁ"]  # the first half of an emoji
    ids = [*half, *tokenizer.encode("ok"), *half, *tokenizer.encode("é")]
    stream = tokenizer.stream()
    assert "".join(stream.push(i) for i in ids) == tokenizer.decode(ids)


def test_stream_finishes_with_what_it_held_back(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ok 😀")[:-1]
    stream = tokenizer.stream()
    given = "".join(stream.push(i) for i in ids)
    assert given == "ok "
    assert given + stream.finish() == tokenizer.decode(ids)
    assert stream.finish() == ""
    whole = tokenizer.stream()
    whole.push(tokenizer.encode("o")[-1])
    assert whole.finish() == ""


def test_stream_gives_out_bytes_that_are_no_text(tokenizer: Tokenizer) -> None:
    """It would decode all of them again with each further one."""
    half = tokenizer.backend.get_vocab()["ð"]  # the first byte of an emoji
    stream = tokenizer.stream()
    given = "".join(stream.push(half) for _ in range(100))
    assert len(given) > 80
    assert given + stream.finish() == tokenizer.decode([half] * 100)


def sentencepiece() -> Tokenizer:
    """A tokenizer as Llama 2 and Mistral have it: its decoder drops a text's first blank."""
    vocabulary = {"<unk>": 0, "\u2581ab": 1, "c": 2} | {f"<0x{b:02X}>": 3 + b for b in range(256)}
    backend = Backend(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    return Tokenizer(backend, {}, (0,), None)


@pytest.mark.parametrize("split", range(4))
def test_a_stream_that_continues_a_text(split: int) -> None:
    tokenizer, ids = sentencepiece(), [1, 1, 2, 1]
    stream = tokenizer.stream(ids[:split])
    rest = "".join(stream.push(token) for token in ids[split:])
    assert tokenizer.decode(ids[:split]) + rest == tokenizer.decode(ids) == "ab abc ab"


def test_a_stream_that_continues_half_a_character() -> None:
    first, *others = (3 + byte for byte in "é".encode())
    stream = sentencepiece().stream([2, first])
    assert "".join(map(stream.push, [*others, 2])) == "\N{REPLACEMENT CHARACTER}c"


@pytest.mark.parametrize("text", TEXTS)
def test_the_bytes_of_tokens_are_the_text(text: str, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode_plain(text)
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""


def test_the_bytes_of_a_tokenizer_with_byte_fallback() -> None:
    """As of Gemma and Llama 2: a blank is U+2581, and what has no token is single bytes."""
    other = sentencepiece()
    assert [other.token_bytes(token) for token in (1, 2, 3 + 0xE9)] == [b" ab", b"c", b"\xe9"]


def test_tools_reach_the_template(tokenizer: Tokenizer) -> None:
    template = "{% if tools %}{{ tools[0].function.name }}{% endif %}{{ messages[0].content }}"
    own = replace(tokenizer, chat_template=template)
    tool = {"type": "function", "function": {"name": "weather"}}
    messages = [{"role": "user", "content": "?"}]
    assert own.render_chat(messages, tools=[tool]) == "weather?"
    assert own.render_chat(messages) == "?"


@pytest.mark.parametrize(
    "said",
    [
        {"sep_token": "<sep>", "chat_template": "{{ sep_token }}{{ bos_token }}"},
        {"image_token": "<img>", "chat_template": "{{ image_token }}"},
        {"extra_special_tokens": {"eot_token": "<eot>"}, "chat_template": "{{ eot_token }}"},
        {"mask_token": None, "chat_template": "{{ mask_token is defined }}"},
    ],
)
def test_templates_that_write_other_tokens(
    said: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    """A saved tokenizer still has them. No name of a file replaces cetane's own keys."""
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    config = {"bos_token": "<s>", "tokenizer_class": "PreTrainedTokenizerFast"} | said
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    tokenizer.save(tmp_path / "saved")
    for one in (tokenizer, Tokenizer.load(tmp_path / "saved")):
        assert one.chat(MESSAGES) == theirs.apply_chat_template(MESSAGES, return_dict=False)


def test_an_extra_token_named_as_a_key(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    extra = {"extra_special_tokens": {"tokenizer_class": "Evil", "messages": "x"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(extra | {"chat_template": "hi"}))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.render_chat(MESSAGES) == "hi"
    tokenizer.save(tmp_path / "saved")
    config = json.loads((tmp_path / "saved" / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
