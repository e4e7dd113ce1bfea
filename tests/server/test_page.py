"""The chat page in Chromium: a conversation by keyboard, at two sizes, in light and dark."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from markdown_it import MarkdownIt
from PIL import Image
from tests.server.chromium import Chromium

TURNS = "[...document.querySelectorAll('.turn .body')].map(one => one.textContent)"
IDLE = "document.getElementById('send').getAttribute('aria-label') === 'Send'"
FOCUS = "document.activeElement.id || document.activeElement.getAttribute('aria-label')"


def ask(browser: Chromium, text: str) -> None:
    browser.run("document.getElementById('ask').focus()")
    browser.type(text)
    browser.press("Enter", 13, text="\r")


def test_a_conversation(browser: Chromium, url: str) -> None:
    browser.open(url)
    browser.until("document.querySelector('#model option')")
    browser.run("localStorage.setItem('cetane.settings', '{\"max_tokens\": 12, \"seed\": 5}')")
    browser.open(url)
    browser.until("document.querySelector('#model option')")
    assert browser.run(FOCUS) == "ask"  # the keyboard alone is enough
    browser.type("what is <b>cetane</b>?")
    browser.press("Enter", 13, text="\r")
    browser.until(f"{TURNS}.length === 2 && {IDLE}")
    question, answer = browser.run(TURNS)
    assert question == "what is <b>cetane</b>?" and answer
    assert "12 tokens" in browser.run("document.querySelector('.facts').textContent")
    ask(browser, "and its rating")
    browser.until(f"{TURNS}.length === 4 && {IDLE}")
    assert browser.run(TURNS)[:2] == [question, answer]

    browser.run("document.querySelectorAll('[aria-label=\"Write again\"]')[1].click()")
    browser.until(f"{TURNS}.length === 4 && {IDLE}")
    browser.run("document.querySelector('[aria-label=Edit]').click()")
    assert browser.run(FOCUS) == "Edit your message"
    browser.run("document.activeElement.select()")
    browser.type("something else")
    browser.run("document.querySelector('.editor .primary').click()")
    browser.until(f"{TURNS}.length === 2 && {IDLE}")
    assert browser.run(TURNS)[0] == "something else"

    browser.run("document.getElementById('new').click()")
    assert browser.run(TURNS) == []
    browser.open(url)  # conversations are still there
    browser.until("document.querySelector('#list button')")
    browser.run("document.querySelector('#list button').click()")
    assert browser.run(TURNS)[0] == "something else"
    nothing_to_say(browser, url)


def test_two_tabs_keep_the_conversations_of_both(browser: Chromium, url: str) -> None:
    browser.open(url)
    browser.until("document.querySelector('#model option')")
    with browser.tab(url):
        browser.until("document.querySelector('#model option')")
        ask(browser, "in another tab")
        browser.until(f"{TURNS}.length === 2 && {IDLE}")
    ask(browser, "in this tab")
    browser.until(f"{TURNS}.length === 2 && {IDLE}")
    titles = "JSON.parse(localStorage.getItem('cetane.talks')).map(one => one.title)"
    assert browser.run(titles)[:2] == ["in this tab", "in another tab"]
    names = "[...document.querySelectorAll('#list li')].map(one => one.textContent)"
    assert browser.run(names)[:2] == ["in this tab", "in another tab"]


def test_stop(browser: Chromium, url: str) -> None:
    browser.open(url)
    browser.until("document.querySelector('#model option')")
    # With a temperature, an answer may end after some tokens: the likeliest ones never end here.
    browser.run("Object.assign(settings, {max_tokens: 900, temperature: 0})")
    # The page itself presses Escape at the first word: from here an answer may be over by then.
    browser.run("""
        new MutationObserver((_, watch) => {
          if (!document.querySelector('.cursor')?.textContent) return;
          watch.disconnect();
          const pressed = new KeyboardEvent('keydown', {key: 'Escape', bubbles: true});
          document.activeElement.dispatchEvent(pressed);
        }).observe(document.body, {childList: true, subtree: true, characterData: true})
    """)
    ask(browser, "a long answer")
    browser.until(f"document.querySelector('.facts') && {IDLE}")
    assert "stopped" in browser.run("[...document.querySelectorAll('.facts')].pop().textContent")
    browser.run("Object.assign(settings, {max_tokens: 12, temperature: DEFAULTS.temperature})")


def test_markdown_makes_no_tags_of_text(browser: Chromium, url: str) -> None:
    browser.open(url)
    browser.until("document.querySelector('#model option')")  # the page draws its log again then
    text = (
        "# T\\n<img src=x onerror=alert(1)> **b** `c<d`\\n\\n- one\\n  - two\\n\\n```js\\n<x>\\n```"
    )
    browser.run(f"document.getElementById('log').replaceChildren(markdown('{text}'))")
    tags = "[...document.querySelectorAll('#log *')].map(one => one.tagName).join(' ')"
    assert browser.run(tags) == "H2 P STRONG CODE UL LI UL LI DIV DIV SPAN BUTTON PRE CODE"
    assert "<img src=x" in browser.run("document.getElementById('log').textContent")


LISTS = {
    "rows and code in items": """\
- **Install** it:
  - on Linux:
    ```bash
    apt install foo

      indented
    ```
  - on a Mac:
    use the package
    from the site
- Then run:
  ```bash
  foo --init
  foo --start
  ```""",
    "items apart, with paragraphs": """\
1. First
   - point one

     a second paragraph

2. Second

Then

7. Seventh""",
    "other kinds within": """\
- a
    - wide

      > quoted
      > twice
- - at once
  1. numbered
  2. twice

***
- after a rule
1. another kind
* * *
- last""",
}


@pytest.mark.parametrize("name", LISTS)
def test_lists_are_those_of_commonmark(browser: Chromium, url: str, name: str) -> None:
    browser.open(url)
    theirs = MarkdownIt("commonmark").render(LISTS[name])
    outline = """(node) => [...node.childNodes].map(function walk(one) {
        if (one.nodeType === Node.TEXT_NODE) return one.data.split(/\\s+/).join(' ').trim();
        if (one.tagName === 'PRE') return `PRE[${one.textContent.trimEnd()}]`;
        if (one.querySelector(':scope > button')) return '';  // the bar above a block of code
        const inner = [...one.childNodes].map(walk).filter(Boolean).join(' ');
        return /^(UL|OL|LI|BLOCKQUOTE|HR)$/.test(one.tagName) ? `${one.tagName}[${inner}]` : inner;
    }).filter(Boolean).join(' ')"""
    ours = browser.run(f"({outline})(markdown({json.dumps(LISTS[name])}))")
    assert ours == browser.run(
        f"(({outline})(new DOMParser().parseFromString({json.dumps(theirs)}, 'text/html').body))"
    )
    assert "LI[" in ours


def test_links_with_parentheses_and_cells_with_bars(browser: Chromium, url: str) -> None:
    browser.open(url)
    text = "[a](https://x.org/A_(b)) ([c](https://x.org/d))\n\n|p|q|\n|-|-|\n|x \\| y|`1\\|2`|\n"
    truth = MarkdownIt("commonmark").enable("table").render(text)
    for query, part in (("a", "href"), ("th, td", "textContent"), ("p", "textContent")):
        found = f"[...where.querySelectorAll('{query}')].map(one => one.{part})"
        ours = browser.run(f"(where => {found})(markdown({json.dumps(text)}))")
        parsed = f"new DOMParser().parseFromString({json.dumps(truth)}, 'text/html')"
        assert ours == browser.run(f"(where => {found})({parsed})") != []


@pytest.mark.parametrize("repeated", ["> ", ">", "- - a\n  ", "- ", "1. ", "**a *b ~~c "])
def test_an_answer_that_repeats_itself(browser: Chromium, url: str, repeated: str) -> None:
    """It is shown whole, and the browser's stack stays small."""
    browser.open(url)
    browser.until("document.querySelector('#model option')")
    text = repeated * 8000 + "end"
    turns = [{"role": "user", "content": "x"}, {"role": "assistant", "content": text}]
    browser.run(f"talk.turns = {json.dumps(turns)}; showTurns()")
    assert browser.run(TURNS)[1].endswith("end")


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("dark", [False, True])
def test_sizes_and_schemes(
    browser: Chromium, url: str, tmp_path: Path, width: int, dark: bool
) -> None:
    browser.open(url, width, 844, dark)
    browser.until("document.querySelector('#model option')")
    picture = browser.picture(tmp_path / "page.png")
    image = np.asarray(Image.open(io.BytesIO(picture)).convert("L"))
    assert image.shape == (844, width)
    assert (np.median(image) < 60) == dark
    assert image.std() > 5
    assert browser.run("document.documentElement.scrollWidth") == width
    unnamed = "[...document.querySelectorAll('button, input, textarea, select')].filter(one => "
    unnamed += "!one.textContent.trim() && !one.getAttribute('aria-label') && !one.labels?.length)"
    assert browser.run(f"{unnamed}.length") == 0
    nothing_to_say(browser, url)


def nothing_to_say(browser: Chromium, url: str) -> None:
    """No message in the console, and no request to elsewhere."""
    loud = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
    assert [event for event in browser.events if event.get("method") in loud] == []
    requests: list[Any] = [
        event["params"]["request"]["url"]
        for event in browser.events
        if event.get("method") == "Network.requestWillBeSent"
    ]
    assert requests and all(one.startswith((url, "data:")) for one in requests)
