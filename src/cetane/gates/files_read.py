"""Does cetane read a model's files as transformers does: tokenizer, names, config of a GGUF file?

What cetane reads wrongly is wrong in the bundle and in its truth, so no other question shows it.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import zip_longest
from math import log
from typing import Any

from cetane.checkpoint import Checkpoint, Tokenizer
from cetane.checkpoint.safetensors import HEAD
from cetane.errors import CetaneError
from cetane.families import Model, parse_config, unread, warn_unread
from cetane.gates.reference import Reference
from cetane.gates.transformers_files import (
    CHATS,
    TEXTS,
    TokenizerSample,
    TransformersFiles,
    read_by_transformers,
)
from cetane.gates.transformers_model import config_file
from cetane.gates.weights import READING, WrongWeight

NOT_COMPARED = {
    "model_type", "architectures", "vocab_size", "num_hidden_layers", "tie_word_embeddings",
    "rope_parameters", "rope_scaling", "transformers_version",
}  # fmt: skip
"""Fields in which cetane and transformers differ on purpose; the file's tensors show the right
values. transformers takes `vocab_size` from the tokens, and counts layers that only draft. It takes
every "llama" for a Llama. The scaling that it makes for gpt-oss is not valid in a config."""
STATED = {"BOS token", "stop tokens", "chat template"}
"""What a GGUF file states itself. For the splitting of texts it only names a rule, and cetane and
transformers each have code for that name."""
SHOWN = 40
"""The characters that a message shows of a prompt's end."""
ONLY_OURS = "only cetane read the model's {}: an error of its reading would not show"
AS_CHANCE = (
    "the compared model predicts the text hardly better than chance (perplexity {:.4g}, "
    "{} tokens): compare its answers with those of the published model"
)
CHANCE = 0.8
"""A loss above this part of log(vocabulary) is hardly better than chance. SmolLM2 135M has 0.30 of
it, and Gemma 3 270M 0.39. With all zero points one step off they have 2.0 and 3.5."""
OTHER_CLASS = "transformers' {} does not read as the model's files say, which cetane follows: {}"
OTHER_RULE = (
    "transformers' {} splits texts otherwise than cetane. A GGUF file only names the rule, and it "
    "may not know that name. Compare some tokens with the published tokenizer's ({})"
)
UNREAD = (
    "{}: neither it nor the compared model reads this tensor. Port the model's safetensors as "
    "transformers' save_pretrained writes them, and report the file"
)

REFUSED_CHAT = "{}. So greedy decoding was judged on plain text alone"


class FilesRead:
    """A checkpoint's files, as cetane and transformers read them."""

    def __init__(
        self, checkpoint: Checkpoint, model: Model, reference: Reference, given: Tokenizer
    ) -> None:
        """`given` is the port's tokenizer."""
        self.checkpoint, self.model, self.reference = checkpoint, model, reference
        self.given = given

    @cached_property
    def theirs(self) -> TransformersFiles:
        return read_by_transformers(self.checkpoint)

    @cached_property
    def unread(self) -> list[str]:
        """The tensors of the checkpoint that the model does not read."""
        return unread(self.checkpoint.names(), self.model)

    @cached_property
    def tokens(self) -> tuple[list[WrongWeight], list[str]]:
        """`other_tokens` of the port."""
        return other_tokens(self.given, self.theirs)

    @property
    def wrong(self) -> list[WrongWeight]:
        """What cetane reads otherwise."""
        return [*self.tokens[0], *other_config(self.checkpoint, self.theirs)]

    @property
    def unread_errors(self) -> list[str]:
        """Messages for tensors that neither the port nor the compared model reads. Empty where
        transformers reads the config whole (`config_file`)."""
        if config_file(self.checkpoint) is not None:
            return []
        names = self.reference.parameters
        return [UNREAD.format(name) for name in self.unread if name not in names]

    def warnings(self, perplexity: float) -> Iterator[str]:
        """What may differ, and what one or both did not read. `perplexity` is the compared
        model's."""
        loader, gguf = self.reference.loader, self.checkpoint.folder is None
        yield from self.tokens[1]
        told = [
            only_ours(self.theirs, gguf, loader),
            as_chance(perplexity, self.model.vocab) if loader == "cetane" else None,
            warn_unread(self.unread_in_folder, self.model),
            refused_chat(self.given),
        ]
        yield from filter(None, told)

    @property
    def unread_in_folder(self) -> Iterator[str]:
        """Of a folder, the tensors that the model does not read. A tied head is left out, and so is
        what transformers ignores by name, such as layers that draft."""
        if config_file(self.checkpoint) is None:  # `unread_errors` names them
            return
        ignored = getattr(self.reference.model, "_keys_to_ignore_on_load_unexpected", None) or ()
        for name in self.unread:
            if name != HEAD and not any(re.search(pattern, name) for pattern in ignored):
                yield name


def other_tokens(
    given: Tokenizer, theirs: TransformersFiles
) -> tuple[list[WrongWeight], list[str]]:
    """What a bundle's tokenizer reads otherwise than transformers; and warnings of what may
    differ.

    Of a folder, it must agree with one of the samples. Of a GGUF file, only what the file states
    must agree: cetane and transformers know the rest by names, each for itself.
    """
    if not theirs.samples:
        return [], []
    found = [unlike(given, sample, theirs.stops) for sample in theirs.samples]
    first, of_class = theirs.samples[0], found[0]
    agreed = STATED if first.from_gguf else set.intersection(*map(set, found))
    wrong = [
        WrongWeight(shard=READING, label=label, parameter="", problem=why)
        for label, why in of_class.items()
        if label in agreed
    ]
    may_differ = OTHER_RULE if first.from_gguf else OTHER_CLASS
    told = "; ".join(f"{label}: {why}" for label, why in of_class.items() if label not in agreed)
    return wrong, [may_differ.format(first.reader, told)] if told else []


def unlike(
    given: Tokenizer, theirs: TokenizerSample, stops: Sequence[int] | None
) -> dict[str, str]:
    """What a tokenizer reads otherwise than one of transformers, by what it is."""
    found: dict[str, str] = {}
    if given.bos_id != theirs.bos and not (theirs.from_gguf and theirs.bos is None):
        found["BOS token"] = f"it is {given.bos_id}, in transformers {theirs.bos}"
    ours, ends = {*given.eos_ids}, {*(stops or ()), *([] if theirs.eos is None else [theirs.eos])}
    if ends - ours or (stops is not None and ours - ends):
        found["stop tokens"] = f"they are {sorted(ours)}, in transformers {sorted(ends)}"
    for text, around, alone in zip(TEXTS, theirs.texts, theirs.plain, strict=True):
        if other := first_other(given.encode(text), around):
            found["text"] = other
        if other := first_other(given.encode_plain(text), alone):
            found["plain text"] = other
    for messages, prompt, ids in zip(CHATS, theirs.rendered, theirs.chats, strict=True):
        if prompt is None or ids is None:
            continue
        with suppress(CetaneError):  # cetane limits templates
            written = given.render_chat(messages)
            if written != prompt:
                ending = f"{written[-SHOWN:]!r}, in transformers with {prompt[-SHOWN:]!r}"
                found["chat template"] = f"a prompt ends with {ending}"
            elif other := first_other(given.chat(messages), ids):
                found["conversation"] = other
    return found


def first_other(ours: Sequence[int], theirs: Sequence[int]) -> str | None:
    """Where two lists of tokens first differ; None if they are equal."""
    for at, (own, other) in enumerate(zip_longest(ours, theirs)):
        if own != other:
            return f"of {len(ours)} tokens, number {at} is {own}, in transformers {other}"
    return None


def other_config(checkpoint: Checkpoint, theirs: TransformersFiles) -> Iterator[WrongWeight]:
    """The fields of a GGUF file's config that cetane reads otherwise than transformers.

    Where layers differ, transformers has lists, and cetane other fields.
    """
    if theirs.config is None:
        return
    ours = parse_config(checkpoint.config)
    rope = ours.rope_parameters
    rope = rope.get("full_attention", rope)
    stated = {**theirs.config, **theirs.config.get("rope_parameters", {})}
    for name, value in stated.items():
        own = rope.get(name, getattr(ours, name, None))
        judged = name not in NOT_COMPARED and (name in rope or hasattr(ours, name))
        listed = isinstance(value, list) and not isinstance(own, list)
        if judged and not listed and not same(own, value):
            problem = f"it is {own!r}, in transformers {value!r}"
            yield WrongWeight(shard=READING, label=name, parameter="", problem=problem)


def same(ours: Any, theirs: Any) -> bool:
    """Whether two values of a field are equal. GGUF files have numbers in fp32."""
    if isinstance(ours, float) and isinstance(theirs, int | float):
        return abs(ours - theirs) <= 1e-6 * abs(theirs)
    return bool(ours == theirs)


def only_ours(theirs: TransformersFiles, gguf: bool, loader: str) -> str | None:
    """A warning of what transformers did not read; None if it read all. `loader` read the
    reference's weights."""
    read = {
        "config": theirs.config is not None or not gguf,
        "tokenizer": bool(theirs.samples),
        "weights": loader != "cetane",
    }
    left = [name for name, by_transformers in read.items() if not by_transformers]
    if not left:
        return None
    why = f" (transformers: {theirs.error})" if theirs.error and "tokenizer" in left else ""
    return ONLY_OURS.format(", ".join(left)) + why


def refused_chat(given: Tokenizer) -> str | None:
    """A warning of a chat template that refuses a question alone, as `asked` has it; else None."""
    if given.has_chat_template:
        try:
            given.chat(CHATS[0])
        except CetaneError as error:
            return REFUSED_CHAT.format(error.message)
    return None


def as_chance(perplexity: float, vocab: int) -> str | None:
    """A warning of a model that finds the text as hard as one that knows nothing; else None. If
    only cetane read its weights, they may be misread."""
    if not log(max(perplexity, 1.0)) <= CHANCE * log(vocab):
        return AS_CHANCE.format(perplexity, vocab)
    return None
