"""From requests to asks: every choice with its options, as this model can honour them."""

from collections.abc import Mapping, Sequence

from cetane.errors import CetaneError
from cetane.pipeline.completion import Sampling
from cetane.server.errors import ApiError, unsupported
from cetane.server.grammar import GrammarConstraint, grammar_of
from cetane.server.grammar_trial import check_compiles
from cetane.server.prompts import chat_ids, check_prompt, completion_prompts
from cetane.server.requests import ChatRequest, CompletionRequest, GenerationRequest
from cetane.server.served import Served
from cetane.server.settings import Settings
from cetane.server.tools import forced_grammar, strict_grammar
from cetane.server.writing import Ask
from cetane.validation import MOST_DIGITS

COMPLETION = 16
"""The most tokens of a completion whose request says none, as in OpenAI's API."""


def chat_asks(request: ChatRequest, served: Served, settings: Settings) -> list[Ask]:
    """The asks of a chat request, one for each choice. Raises ApiError."""
    check_count(request.n, settings)
    ids = chat_ids(request, served)
    top = (request.top_logprobs or 0) if request.logprobs else None
    most = request.max_completion_tokens or request.max_tokens
    return asks(request, served, settings, [ids], most, top, chat_grammar(request, served))


def completion_asks(request: CompletionRequest, served: Served, settings: Settings) -> list[Ask]:
    """The asks of a request for completions: for every prompt, one for each choice. Raises
    ApiError."""
    prompts = completion_prompts(request, served, settings)
    check_count(request.n, settings)
    grammar = grammar_of(request.response_format)
    most = request.max_tokens
    if most is None:  # nobody asked for the default, so a lower limit shortens it
        most = min(COMPLETION, settings.max_tokens or COMPLETION)
    return asks(request, served, settings, prompts, most, request.logprobs, grammar)


def check_count(count: int, settings: Settings) -> None:
    """Raise ApiError for more answers to a prompt than the server gives."""
    if count > settings.choices:
        raise ApiError(400, f"n: at most {settings.choices}", "n", "invalid_value")


def asks(
    request: GenerationRequest,
    served: Served,
    settings: Settings,
    prompts: Sequence[Sequence[int]],
    most: int | None,
    top: int | None,
    grammar: str | None,
) -> list[Ask]:
    """The asks for prompts, one for each choice.

    `most` are the most tokens of an answer, and `top` the likeliest tokens in each score. Raises
    ApiError for a request that this model cannot honour.
    """
    continues = isinstance(request, CompletionRequest)
    limit = settings.max_tokens or served.context
    if most is not None and most > limit and settings.max_tokens is not None:
        raise ApiError(400, f"max_tokens: at most {limit} here", "max_tokens", "invalid_value")
    most = limit if most is None else min(most, limit)
    check_choices(request, served, top, grammar)
    for ids in prompts:
        check_prompt(ids, served, "prompt" if continues else "messages")
    bias = token_biases(request, served)
    constraint = None if grammar is None else compiled(grammar, served, request)  # may be slow
    stop_tokens = served.tokenizer.special_ids(request.stops)
    return [
        Ask(
            ids,
            most,
            sampling(request, bias, number),
            stops=request.stops,
            top=top,
            echo=isinstance(request, CompletionRequest) and request.echo,
            grammar=constraint,
            adapter=served.adapters[request.model],
            stop_tokens=stop_tokens,
            continues=continues,
        )
        for ids in map(tuple, prompts)
        for number in range(request.n)
    ]


def check_choices(
    request: GenerationRequest, served: Served, top: int | None, grammar: str | None
) -> None:
    """Raise ApiError if a head that gives only its choice cannot do what is asked."""
    if not served.chooses:
        return
    reason = "this model gives only its likeliest token"
    if request.temperature:
        raise unsupported("temperature", f"{reason}; send 0")
    if top is not None:
        raise unsupported("logprobs", reason)
    for name in ("logit_bias", "presence_penalty", "frequency_penalty"):
        if getattr(request, name):
            raise unsupported(name, reason)
    if grammar is not None:
        asked = "tool_choice" if request.response_format is None else "response_format"
        raise unsupported(asked, reason)


def token_biases(request: GenerationRequest, served: Served) -> dict[int, float]:
    """The bias of every token that has one. All answers of a request share it, since it may name
    the whole vocabulary."""
    bias: dict[int, float] = {}
    for text, value in request.logit_bias.items():
        digits = text.isascii() and text.isdigit() and len(text) <= MOST_DIGITS
        if not (digits and int(text) < served.plan.vocab):
            raise ApiError(400, f"logit_bias: no token {text!r}", "logit_bias", "invalid_value")
        bias[int(text)] = value
    return bias


def sampling(request: GenerationRequest, bias: Mapping[int, float], number: int) -> Sampling:
    """The sampling of one choice; choices after the first have seeds of their own."""
    seed = None if request.seed is None else (request.seed + number) % 2**64  # numpy's have no sign
    return Sampling(
        temperature=request.temperature, top_k=request.top_k, top_p=request.top_p,
        min_p=request.min_p, seed=seed, presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty, logit_bias=bias,
    )  # fmt: skip


def compiled(grammar: str, served: Served, request: GenerationRequest) -> GrammarConstraint:
    """The constraint of a grammar for this model. Raises ApiError if the model takes none, or if
    the grammar is beyond the limits of its trial."""
    param = "response_format" if request.response_format is not None else "tools"
    try:
        grammars = served.grammars
    except CetaneError as error:
        raise unsupported(param, error.message) from error
    try:
        check_compiles(grammar)
    except CetaneError as error:
        raise ApiError(400, f"{param}: {error.message}", param, "invalid_value") from error
    return grammars.constraint(grammar, param)


def chat_grammar(request: ChatRequest, served: Served) -> str | None:
    """The grammar that a chat request asks for; None if it asks for none.

    Many clients mark every tool as `strict`. So a model that takes no grammar ignores the mark.
    """
    template = served.tokenizer.template_for(request.tools) or ""
    asked = forced_grammar(request, template) or grammar_of(request.response_format)
    if asked is None and served.constrains:
        return strict_grammar(request, template)
    return asked
