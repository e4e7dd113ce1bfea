"""Chat templates are programs of strangers: none runs for long or fills the memory."""

import pytest

from cetane.checkpoint.chat_template import render
from cetane.errors import CetaneError

MESSAGES = [{"role": "user", "content": "hi"}]
GROWS = (
    "{%% set ns = namespace(s=%s) %%}{%% for a in range(99) %%}{%% set ns.s = %s %%}{%% endfor %%}"
)
GREEDY = {
    "nested loops": "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
    "joined": GROWS % ("'aaaa'", "ns.s ~ ns.s"),
    "added": GROWS % ("'aaaa'", "ns.s + ns.s"),
    "lists of itself": GROWS % ("[1]", "[ns.s, ns.s]") + "{{ ns.s }}",
    "tuples of itself": GROWS % ("(1,)", "(ns.s, ns.s)") + "{{ ns.s }}",
    "dicts of itself": GROWS % ("{}", "dict(a=ns.s, b=ns.s)") + "{{ ns.s }}",
    "powers": GROWS % ("9", "ns.s ** 64"),
    "products": GROWS % ("9999999", "ns.s * ns.s"),
    "repeated": "{{ 'a' * 10 ** 10 }}",
    "centred": "{{ 'a'.center(10 ** 10) }}",
    "formatted": "{{ '{:>9999999999}'.format(1) }}",
    "formatted by %": "{{ '%9999999999d' % 1 }}",
    "replaced": "{{ ('a' * 999999).replace('a', 'b' * 999999) }}",
    "a set block": "{% set x %}{% for i in range(9999) %}{{ 'a' * 9999 }}{% endfor %}{% endset %}",
    "macros": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "recursive loops": "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "brackets": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "a long template": "a" * 1_000_000,
}


@pytest.mark.parametrize("template", GREEDY.values(), ids=GREEDY)
def test_a_greedy_template(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cetane.checkpoint.chat_template.SECONDS", 0.5)
    with pytest.raises(CetaneError, match="chat template"):
        render(template, MESSAGES, True, {})


def test_what_real_templates_do() -> None:
    template = (
        "{%- set ns = namespace(first=true) -%}"
        "{%- for message in messages -%}"
        "{{ '<' + message['role'] + '>' ~ message.content | trim ~ loop.index ~ loop.last }}"
        "{%- endfor -%}"
        "{{ messages | tojson }}{{ ['a', 'b'] | join(', ') }}{{ 'x y'.split(' ')[1] }}"
        "{{ 'aXb'.replace('X', '-') }}{{ messages[::-1] | length }}{{ 7 * 2 }}{{ 'ab' * 2 }}"
    )
    assert render(template, MESSAGES, True, {}) == (
        '<user>hi1True[{"role": "user", "content": "hi"}]a, bya-b114abab'
    )
