"""Chat templates are programs of strangers: none runs for long or fills the memory."""

import json
import time
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from cetane.checkpoint.chat_template import render
from cetane.errors import CetaneError

MESSAGES = [{"role": "user", "content": "hi"}]
GROWS = (
    "{%% set ns = namespace(s=%s) %%}{%% for a in range(99) %%}{%% set ns.s = %s %%}{%% endfor %%}"
)
SAME_HASH = "range(0, 99999 * (2 ** 61 - 1), 2 ** 61 - 1)|groupby('real')"
"""Pairs whose first numbers Python's dict keeps in one place."""
GREEDY = {
    "nested loops": "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
    "joined": GROWS % ("'aaaa'", "ns.s ~ ns.s"),
    "added": GROWS % ("'aaaa'", "ns.s + ns.s"),
    "lists of itself": GROWS % ("[1]", "[ns.s, ns.s]") + "{{ ns.s }}",
    "tuples of itself": GROWS % ("(1,)", "(ns.s, ns.s)") + "{{ ns.s }}",
    "dicts of itself": GROWS % ("{}", "dict(a=ns.s, b=ns.s)") + "{{ ns.s }}",
    "powers": GROWS % ("9", "ns.s ** 64"),
    "products": GROWS % ("9999999", "ns.s * ns.s"),
    "differences": GROWS % ("2 ** 2040", "ns.s - -ns.s"),
    "quotients": "{{ 2 ** 2047 * 2 ** 2047 // 2 ** 2047 > 0 }}",
    "remainders": "{{ 2 ** 2047 * 2 ** 2047 % 2 ** 2047 == 0 }}",
    "numbers of texts": "{{ ('f' * 9999)|int(base=16) > 0 }}",
    "numbers that are written": "{{ 0x" + "f" * 9999 + " > 0 }}",
    "sums": "{{ ([2 ** 2047 * 2 ** 2047] * 9999)|sum > 0 }}",
    "repeated": "{{ 'a' * 10 ** 10 }}",
    "centred": "{{ 'a'.center(10 ** 10) }}",
    "formatted": "{{ '{:>9999999999}'.format(1) }}",
    "formatted with a name": "{{ '{x:>9999999999}'.format(x=1) }}",
    "formatted with a width": "{{ '{:{}}'.format(1, 9999999999) }}",
    "formatted many times": "{{ ('{0}' * 999999).format('a' * 999999) }}",
    "formatted with attributes": "{{ '{0.__class__}'.format(1) }}",
    "formatted with items": "{{ '{0[0]}'.format([1]) }}",
    "marked and formatted": "{{ ('{:>9999999999}'|safe).format(1) }}",
    "formatted by %": "{{ '%9999999999d' % 1 }}",
    "replaced": "{{ ('a' * 999999).replace('a', 'b' * 999999) }}",
    "a set block": "{% set x %}{% for i in range(9999) %}{{ 'a' * 9999 }}{% endfor %}{% endset %}",
    "macros": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "recursive loops": "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "deep JSON": (
        GROWS % ("range(1999)|list", "[ns.s]")
        + GROWS % ("ns.s", "[ns.s]")
        + "{{ ns.s|tojson(indent=16)|length }}"
    ),
    "bytes": "{{ ('a'.encode() * 600000000)|length }}",
    "bytes that are kept": "{% set x = ('a'.encode() * 1400000000) %}ok",
    "bytes of a number": "{{ (1).to_bytes(200000000, 'big')|length }}",
    "bytes, padded": "{{ ''.encode().ljust(400000000)|length }}",
    "bytes, replaced": (
        "{{ ('a' * 30000).encode().replace('a'.encode(), ('b' * 30000).encode())|length }}"
    ),
    "methods by filters": "{{ ('a'|attr('ljust'))(10 ** 10) }}",
    "methods of marked texts": "{{ ('a'|safe).ljust(10 ** 10) }}",
    "translated": "{{ ('a' * 35000).translate({97: 'b' * 35000})|length }}",
    "mapped": "{{ range(99999)|map('string')|map('replace', '1', 'b' * 20000)|list|length }}",
    "selected": "{{ range(3000)|map('string')|select('in', 'b' * 4000000)|list|length }}",
    "selected from a list": (
        "{{ range(3000)|map('string')|list|reject('in', 'b' * 4000000)|list|length }}"
    ),
    "a list of letters": "{{ ('\u4e2d' * 4000000)|list|length }}",
    "summed": "{{ range(99999)|map('string')|map('list')|sum(start=[])|length }}",
    "escaped": "{{ ('&' * 4000000)|forceescape|length }}",
    "sought from the right": "{{ ('a' * 2000000).rfind('ab' ~ 'a' * 1000000) }}",
    "sought by index": "{{ ('a' * 2000000).rindex('ab' ~ 'a' * 1000000) }}",
    "split from the right": "{{ ('a' * 2000000).rsplit(sep='ab' ~ 'a' * 1000000) }}",
    "parted from the right": "{{ ('a' * 2000000).rpartition('ab' ~ 'a' * 1000000) }}",
    "stripped": "{{ ('b' * 2000000).strip('a' * 2000000 ~ 'b') }}",
    "stripped on the left": "{{ ('b' * 2000000).lstrip('a' * 2000000 ~ 'b') }}",
    "stripped on the right": "{{ ('b' * 2000000).rstrip('a' * 2000000 ~ 'b') }}",
    "a marked text, stripped": "{{ (('b' * 2000000)|safe).strip('a' * 2000000 ~ 'b') }}",
    "trimmed": "{{ ('b' * 2000000)|trim('a' * 2000000 ~ 'b') }}",
    "trimmed by map": "{{ ['b' * 2000000]|map('trim', 'a' * 2000000 ~ 'b')|list }}",
    "keys of one hash": f"{{{{ dict({SAME_HASH})|length }}}}",
    "names of one hash": f"{{% set ns = namespace({SAME_HASH}) %}}",
    "items, compared": (
        "{% set d = dict(range(30000)|groupby('real')) %}"
        "{{ [d.items()] * 100000 == [d.items()] * 100000 }}"
    ),
    "keys, subtracted": (
        "{% set d = dict(range(30000)|groupby('real')) %}"
        "{{ [d.keys() - []] * 100000 == [d.keys() - []] * 100000 }}"
    ),
    "indented": "{{ 'a\nb'|indent(10 ** 10) }}",
    "indented lines": "{{ ('a\n' * 9999)|indent('b' * 9999) }}",
    "indented JSON": "{{ [1]|tojson(indent=10 ** 10) }}",
    "JSON indented by a text": "{{ [1]|tojson(indent='a' * 129) }}",
    "separated JSON": "{{ [1]|tojson(separators=('a' * 129, ':')) }}",
    "dates": "{{ strftime_now('%Y' * 65) }}",
    "many names": "".join(f"{{% if x %}}{{% set a{n} = 1 %}}{{% endif %}}" for n in range(600)),
    "many macros": "".join(f"{{% macro a{n}() %}}{{% endmacro %}}" for n in range(600)),
    "many imports": "{% if x %}{% from 'x' import a, b %}{% endif %}",
    "a long template": "a" * 1_000_000,
}


@pytest.mark.parametrize("template", GREEDY.values(), ids=GREEDY)
def test_a_greedy_template(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cetane.checkpoint.template_limits.SECONDS", 0.5)
    with pytest.raises(CetaneError, match="chat template"):
        render(template, MESSAGES, True, {})


BRANCHED = {
    "brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "conditions": "{% if x %}" * 1000 + "{% endif %}" * 1000,
    "branches": "{% if x %}" + "{% elif x %}" * 8000 + "{% endif %}",
}


@pytest.mark.parametrize("template", BRANCHED.values(), ids=BRANCHED)
def test_a_template_that_no_parser_takes(template: str) -> None:
    """The reason of 8,000 branches was the one word MemoryError."""
    with pytest.raises(CetaneError, match="too deeply nested, or an if has too many branches"):
        render(template, MESSAGES, True, {})


KEPT = {
    "slices": "s[{n}:]",
    "sums": "s + '{n}'",
    "joined": "s ~ {n}",
    "products": "'a' * (4000000 + {n})",
    "filters": "s|upper",
    "trimmed": "(s ~ ' ')|trim",
    "indented": "s|indent",
    "JSON": "s|tojson",
    "methods": "s.upper()",
    "replaced": "s.replace('b', '{n}') ~ ''",
    "formatted": "'{{}}{n}'.format(s)",
    "macros": "m({n})",
}


@pytest.mark.parametrize("made", KEPT.values(), ids=KEPT)
def test_texts_that_are_kept(made: str) -> None:
    """Each is within its limit, and 50 take 200 MB. A variable holds each."""
    begin = (
        "{% set s = 'a' * 4000000 %}{% set ns = namespace() %}"
        "{% macro m(n) %}{{ s }}{{ n }}{% endmacro %}"
    )
    kept = "".join(f"{{% set ns.a{n} = {made.format(n=n)} %}}" for n in range(50))
    with pytest.raises(CetaneError, match="all texts that it makes"):
        render(begin + kept, MESSAGES, True, {})
    assert render(begin + "ok", MESSAGES, True, {}) == "ok", "the next rendering begins anew"


def test_set_blocks_that_are_kept() -> None:
    begin = "{% set s = 'a' * 4000000 %}{% set ns = namespace() %}"
    kept = "".join(f"{{% set ns.a{n} %}}{{{{ s }}}}{n}{{% endset %}}" for n in range(50))
    with pytest.raises(CetaneError, match="all texts that it makes"):
        render(begin + kept, MESSAGES, True, {})


def test_a_long_conversation_is_within_limits() -> None:
    """A text that grows with each message, as some templates keep it: 400,000 characters."""
    template = (
        "{% set ns = namespace(t='') %}{% for m in messages %}"
        "{% set ns.t = ns.t + m.content|trim %}{% endfor %}{{ ns.t }}"
    )
    messages = [{"role": "user", "content": "a" * 2000}] * 200
    assert render(template, messages, True, {}) == "a" * 400_000


@pytest.mark.parametrize(
    "chain", ["x" + "|upper" * 190, "not " * 190 + "x", "x" + " and x" * 190, "[]" + "|list" * 190]
)
def test_a_deep_expression_compiles_soon(chain: str) -> None:
    """Nothing looks at the clock meanwhile. Jinja's own optimizer takes cubic time."""
    started = time.process_time()
    render(f"{{{{ {chain} }}}}", MESSAGES, True, {})
    assert time.process_time() - started < 1


def test_what_real_templates_do() -> None:
    template = (
        "{%- set ns = namespace(first=true) -%}"
        "{%- for message in messages -%}"
        "{{ '<' + message['role'] + '>' ~ message.content | trim ~ loop.index ~ loop.last }}"
        "{%- endfor -%}"
        "{{ messages | tojson }}{{ ['a', 'b'] | join(', ') }}{{ 'x y'.split(' ')[1] }}"
        "{{ 'aXb'.replace('X', '-') }}{{ messages[::-1] | length }}{{ 7 * 2 }}{{ 'ab' * 2 }}"
        "{{ messages | selectattr('role', 'eq', 'user') | map(attribute='content') | first }}"
        "{{ none | select | list }}{{ [2, 1] | sort }}{{ [1, 2] | sum }}"
        "{{ {'a': 1}.items() | list }}"
        "{{ 'a</b>c'.split('</b>')[-1].lstrip('\\n') }}{{ 1.55 | round(1, 'floor') }}"
        "{{ 1.5 | round(10 ** 9, 'ceil') }}{{ 15 | round(-1) }}"
        "{{ 5 | round(-(10 ** 9), 'floor') }}{{ 5 | round(-(10 ** 9)) }}"
        "{{ dict([('a', 1)], b=2) }}{{ dict({'c': 3}) }}{{ ' x\\n' | trim }}{{ 5 | trim }}"
        "{{ 'a|b'.rsplit('|', 1)[1] }}{{ [1] | tojson(separators=(',', ':')) }}"
    )
    assert render(template, MESSAGES, True, {}) == (
        '<user>hi1True[{"role": "user", "content": "hi"}]a, bya-b114abab'
        "hi[][1, 2]3[('a', 1)]c1.51.5200.00{'a': 1, 'b': 2}{'c': 3}x5b[1]"
    )


SAME = [
    "{{ 'a\nb\n'|indent(2) }}",
    "{{ ''|indent(2, true) }}|{{ ''|indent }}|{{ '\n'|indent(2, true, true) }}",
    "{{ 'a\n\nb\n\n'|indent(width=3, first=true) }}|{{ 'a\n\nb'|indent(2, true, true) }}",
    "{{ 'a\rb\fc'|indent('--', true) }}|{{ 'a\nb'|indent(100) }}|{{ 'a\nb'|indent(0) }}",
    "{{ tools|join('-', attribute='function.name') }}|{{ [['x'], ['y']]|join(',', attribute=0) }}",
    "{{ messages|join(attribute='role') }}|{{ [{}]|join(attribute='role') }}",
    "{{ tools|tojson(indent='\t') }}|{{ tools|tojson(indent='2') }}|{{ tools|tojson(indent=20) }}",
    "{{ tools|tojson(indent=0) }}|{{ tools|tojson(indent='') }}|{{ [1, 2]|tojson(indent=-1) }}",
    "{{ [1, 2]|tojson(separators=['-' * 100, ':']) }}",
    "{{ '<{}>{}{{}}'.format('a', [1, none]) }}|{{ '{1}{0}'.format(1, 2) }}|{{ '{}'.format(x) }}",
    "{{ '{name} is {0}'.format(1, name='b') }}|{{ ('{}'|string).format('&') }}",
    "{{ strftime_now('%A, the %d of %B in the year %Y, week %W, day %j of it, century %C') }}",
]


@pytest.mark.parametrize("template", SAME)
def test_as_transformers_renders_it(template: str) -> None:
    tools = [{"type": "function", "function": {"name": name, "n": [1, {}]}} for name in "fg"]
    wanted, _ = render_jinja_template([MESSAGES], tools=tools, chat_template=template)
    assert render(template, MESSAGES, False, {}, tools) == wanted[0]


@pytest.mark.parametrize("indent", [None, 4])
def test_json_is_that_of_python(indent: int | None) -> None:
    value: dict[str, Any] = {"a": [1, 2.5, {"b": None}], "ü": "<'\"\n>", "empty": []}
    found = render(f"{{{{ messages[0]|tojson(indent={indent or 'none'}) }}}}", [value], True, {})
    assert found == json.dumps(value, ensure_ascii=False, indent=indent)
