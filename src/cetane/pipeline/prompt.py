"""Prompts: a text, token ids or a conversation, as the token ids that a model reads."""

from collections.abc import Mapping, Sequence
from numbers import Integral

from cetane.checkpoint import Tokenizer
from cetane.checkpoint.tokenizers_library import interruptible
from cetane.errors import CetaneError

Message = Mapping[str, str]
"""A turn of a conversation: its `role` (system, user, assistant) and its `content`."""
Prompt = str | Sequence[int] | Sequence[Message]
"""A text to continue, token ids, or a conversation to answer."""
SHORTER = "port with a larger --context, or ask something shorter"


class TooLong(CetaneError):
    """A prompt does not fit into the context."""


def prompt_ids(prompt: Prompt, tokenizer: Tokenizer, context: int) -> list[int]:
    """The token ids of a prompt, for a model of `context` tokens. `LanguageModel.ids` tells what it
    refuses."""
    if isinstance(prompt, str):
        return encoded(prompt, tokenizer, context, special=True)
    tokens = [item for item in prompt if isinstance(item, Integral)]
    if len(tokens) == len(prompt):
        return [int(token) for token in tokens]
    messages = [dict(item) for item in prompt if isinstance(item, Mapping)]
    if len(messages) < len(prompt):
        raise CetaneError(
            "a prompt is a text, a list of token ids, or a list of messages",
            "a list of texts is several prompts: ask them one by one",
        )
    if tokenizer.has_chat_template:
        if not all(map(is_message, messages)):
            raise CetaneError(
                "a message has no role or no content",
                'write {"role": "user", "content": "..."}',
            )
        # The template writes the special tokens itself.
        return encoded(tokenizer.render_chat(messages), tokenizer, context, special=False)
    texts = [message.get("content") for message in messages]
    if not all(isinstance(text, str) for text in texts):
        raise CetaneError(
            "a message has no text",
            "without a chat template, a message is {'role': ..., 'content': TEXT}",
        )
    return encoded("\n".join(map(str, texts)), tokenizer, context, special=True)


def encoded(text: str, tokenizer: Tokenizer, context: int, special: bool) -> list[int]:
    """The tokens of a text, with special tokens around them or without.

    A template can make a text of megabytes, and a tokenizer can take quadratic time for it. So
    the text's bytes are counted first, and Ctrl-C ends the wait.
    """
    size, most = len(text.encode(errors="replace")), context * tokenizer.longest
    if size > most:
        raise TooLong(f"the prompt has {size} bytes, the context holds at most {most}", SHORTER)
    return interruptible(lambda: tokenizer.encode_aside(text, special))


def is_message(message: Mapping[str, object]) -> bool:
    """Whether a chat template can write a message. Calls of tools need no content."""
    content = message.get("content")
    said = isinstance(content, str | list) or "tool_calls" in message
    return isinstance(message.get("role"), str) and said
