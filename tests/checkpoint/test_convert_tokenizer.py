"""Tokenizers without a tokenizer.json: the ids are those of the library that made the file."""

import base64
import json
from pathlib import Path

import pytest
import sentencepiece
import tiktoken
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoTokenizer

from cetane.checkpoint.convert_tokenizer import converted
from cetane.checkpoint.tokenizer import Tokenizer
from cetane.errors import CetaneError

TEXTS = ["The fuel ignites.", "its cetane number is 51", "a  b", "naïve 中"]
CORPUS = ["The rating of how readily a fuel ignites is its cetane number."] * 20


def config(folder: Path, **said: object) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / "tokenizer_config.json").write_text(json.dumps(said))


def trained(folder: Path) -> None:
    """Train a tokenizer.model as Llama's."""
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_prefix=str(folder / "tokenizer"), vocab_size=300,
        model_type="bpe", byte_fallback=True, hard_vocab_limit=False, minloglevel=2,
        normalization_rule_name="identity", remove_extra_whitespaces=False,
    )  # fmt: skip
    (folder / "tokenizer.vocab").unlink()


def test_sentencepiece(tmp_path: Path) -> None:
    config(tmp_path, tokenizer_class="LlamaTokenizer", legacy=False)
    trained(tmp_path)
    theirs = sentencepiece.SentencePieceProcessor(str(tmp_path / "tokenizer.model"))
    ours = Tokenizer.load(tmp_path)
    for text in TEXTS:
        assert ours.encode_plain(text) == theirs.encode(text)
        assert ours.decode(theirs.encode(text)) == text
    assert Tokenizer.load(tmp_path).digest == ours.digest  # from the cache


def test_added_tokens_of_a_converted_tokenizer(tmp_path: Path) -> None:
    """Their flags are those that the conversion gives: the library changes the declared ones."""
    token = {"content": "<c>", "lstrip": False, "normalized": True, "rstrip": False}
    config(
        tmp_path, tokenizer_class="PreTrainedTokenizerFast", legacy=False,
        added_tokens_decoder={300: token}, extra_special_tokens=["<d>"],
    )  # fmt: skip
    trained(tmp_path)
    ours, theirs = Tokenizer.load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for text in ("a fuel<c> b<d>", "<c><d>"):
        assert ours.encode_plain(text) == theirs.encode(text, add_special_tokens=False)
    assert repr(ours.backend.get_added_tokens_decoder()) == repr(theirs.added_tokens_decoder)


@pytest.mark.parametrize(
    "name",
    [
        "vocab.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "config.json",
    ],
)
def test_a_conversion_is_of_the_files_as_they_are(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cetane.checkpoint.convert_tokenizer.convert", lambda *_: ("{}", "{}"))
    config(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"a")
    before = converted(tmp_path)
    assert converted(tmp_path) == before
    (tmp_path / name).write_text('{"a": 1}')
    assert converted(tmp_path) not in (None, before)


def test_tiktoken(tmp_path: Path) -> None:
    config(tmp_path, tokenizer_class="PreTrainedTokenizerFast")
    pairs = [b"th", b"he", b"fu", b"el", b"fuel", b" c", b"in", b"it"]
    ranks = {bytes([byte]): byte for byte in range(256)}
    ranks |= {pair: 256 + number for number, pair in enumerate(pairs)}
    lines = [base64.b64encode(token) + b" %d" % rank for token, rank in ranks.items()]
    (tmp_path / "tokenizer.model").write_bytes(b"\n".join(lines))
    pattern = (
        r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+"""
        r"""[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
    )
    theirs = tiktoken.Encoding("t", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    ours = Tokenizer.load(tmp_path)
    for text in TEXTS:
        assert ours.encode_plain(text) == theirs.encode(text)


def gpt2_files(folder: Path, tokenizer_class: str) -> None:
    """Write a tiny vocab.json and merges.txt."""
    config(folder, tokenizer_class=tokenizer_class, unk_token="<unk>", eos_token="<unk>")
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(CORPUS, 300, special_tokens=["<unk>"], show_progress=False)
    trained.save_model(str(folder))


def test_vocabulary_and_merges(tmp_path: Path) -> None:
    gpt2_files(tmp_path, "Qwen2Tokenizer")
    ours, theirs = Tokenizer.load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert max(map(len, theirs.get_vocab())) > 4  # it has merged some
    for text in [*TEXTS, "<unk>a"]:
        assert ours.encode_plain(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text), False) == text
    (tmp_path / "vocab.json").unlink()
    with pytest.raises(CetaneError, match=r"merges.txt but no vocab.json"):
        Tokenizer.load(tmp_path)


def test_a_class_that_ignores_the_files(tmp_path: Path) -> None:
    gpt2_files(tmp_path, "LlamaTokenizer")
    with pytest.raises(CetaneError, match="LlamaTokenizer finds no tokens") as caught:
        Tokenizer.load(tmp_path)
    assert "tokenizer_class" in str(caught.value.hint)


@pytest.mark.parametrize("said", [None, {}, {"bos_token": "<c>"}, {"eos_token": None}])
def test_special_tokens_of_a_class(said: dict[str, str | None] | None, tmp_path: Path) -> None:
    """A folder of Llama's may have no file that names BOS and the stop token."""
    config(tmp_path, **said or {})
    if said is None:
        (tmp_path / "tokenizer_config.json").unlink()
    trained(tmp_path)
    ours, theirs = Tokenizer.load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.bos_token_id is not None
    assert ours.bos_id == theirs.bos_token_id
    assert ours.eos_ids == ((theirs.eos_token_id,) if theirs.eos_token else ())
    assert ours.special_tokens == theirs.special_tokens_map
    assert ours.encode("a fuel") == theirs.encode("a fuel")


def test_an_empty_file(tmp_path: Path) -> None:
    config(tmp_path, tokenizer_class="LlamaTokenizer")
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(CetaneError, match="is empty"):
        Tokenizer.load(tmp_path)


def test_a_damaged_conversion_is_made_again(tmp_path: Path, own_cache: Path) -> None:
    gpt2_files(tmp_path, "Qwen2Tokenizer")
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    Tokenizer.load(tmp_path)
    for name, swap in (("converted-?-*[0-9a-f].json", swapped), ("*.special.json", other_eos)):
        (kept,) = own_cache.glob(f"tokenizers/{name}")
        content = kept.read_text()
        for damaged in ("", content[: len(content) // 2], swap(content)):
            kept.write_text(damaged)
            ours = Tokenizer.load(tmp_path)
            assert [ours.encode(text) for text in TEXTS] == [theirs.encode(text) for text in TEXTS]
            assert ours.eos_ids == (theirs.eos_token_id,)
            assert kept.read_text() == content


def swapped(vocabulary: str) -> str:
    """The ids of two letters, exchanged."""
    return vocabulary.replace('"a":', '"?":').replace('"e":', '"a":').replace('"?":', '"e":')


def other_eos(_: str) -> str:
    return '{"eos_token": "a"}'
