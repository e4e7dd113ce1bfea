"""Fuzzers of what comes over a network: requests, and results of a shared store."""

from pathlib import Path

from tests.fuzz.fuzzer import Document

KEY = "ab" * 32


def request() -> Document:
    """Bodies of requests, up to their prompts and grammars."""
    from cetane.server.bodies import parse
    from cetane.server.grammar import grammar_of
    from cetane.server.prompts import for_template
    from cetane.server.requests import ChatRequest, CompletionRequest
    from cetane.server.tools import described, forced_grammar, strict_grammar

    schema = {
        "type": "object", "properties": {"a": {"enum": ["x", "y"]}, "b": {"minimum": 0}},
        "required": ["a"], "$defs": {"c": {"exclusiveMaximum": 2**53 + 1}},
    }  # fmt: skip
    chat = {
        "model": "m", "temperature": 0.5, "seed": 1, "stop": ["\n"], "logit_bias": {"1": -100},
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "x"}]},
            {"role": "assistant", "content": None, "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            ]},
            {"role": "tool", "content": "y", "tool_call_id": "1"},
        ],
        "tools": [{"type": "function", "function": {
            "name": "f", "description": "g", "parameters": schema, "strict": True,
        }}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
    }  # fmt: skip
    plain_chat = {
        "model": "m", "messages": [{"role": "user", "content": "x"}], "stream": True,
        "stream_options": {"include_usage": True}, "logprobs": True, "top_logprobs": 2,
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}},
    }  # fmt: skip
    completion = {
        "model": "m", "prompt": ["x", "y"], "echo": True, "logprobs": 1, "n": 2, "best_of": 1,
        "response_format": {"type": "grammar", "grammar": 'start: "a" | "b"'},
    }  # fmt: skip

    def read(path: Path) -> None:
        body = path.read_bytes()
        if b'"messages"' not in body:
            grammar_of(parse(CompletionRequest, body).response_format)
            return
        asked = parse(ChatRequest, body)
        described(asked.tools)
        for message in asked.messages:
            for_template(message)
        forced_grammar(asked, "<tool_call>")
        strict_grammar(asked, "<tool_call>")
        grammar_of(asked.response_format)

    return Document("body.json", [chat, plain_chat, completion], read)


def stored_result() -> Document:
    """The list of a result's files in a store."""
    from cetane.store.store import LARGEST_LIST, object_path, read_result

    record = {"bytes": 6, "sha256": KEY}
    content = {"schema_version": 1, "key": KEY, "files": {"a.txt": record, "b/c.txt": record}}

    def read(path: Path) -> None:
        with path.open("rb") as file:
            made = read_result(file.read(LARGEST_LIST), KEY)
        assert made.bytes >= 0
        for name, file_record in made.files.items():
            inside = (path.parent / name).resolve().is_relative_to(path.parent.resolve())
            assert inside and object_path(file_record.sha256).isascii(), name

    return Document("result.json", [content], read)
