"""The page: one file that asks for nothing, holds what it should, and takes no name for markup."""

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from tests.report.conftest import HOSTILE
from tests.server.chromium import Chromium

from cetane.cli.output import finite
from cetane.lab.entry import ExperimentReport
from cetane.report import plots
from cetane.report.content.page import BundleReport
from cetane.report.page import level, number, page, plain, size

Report = BundleReport | ExperimentReport
VOID = {"meta", "link", "hr", "br"}
SECTIONS = ["verdicts", "placement", "agreement", "range", "sizes", "developers", "quality",
            "speculation", "predicted", "device", "provenance"]  # fmt: skip
NUMBER = re.compile(r"(?<![\w.])\d+(?:,\d{3})*(?:\.\d+)?(?!\w)")

FOLDED = (
    "[...document.querySelectorAll('details > :not(summary)')]"
    ".filter(one => !one.checkVisibility()).length"
)
"""How many elements one does not see before a click."""


class Parsed(HTMLParser):
    """A page's elements, its texts, and its figures."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[tuple[str, dict[str, str | None]]] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.figures: list[float] = []
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "data":
            self.figures.append(float(dict(attrs)["value"] or "nan"))
        if tag not in VOID:
            self.open.append((tag, dict(attrs)))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()[0] == tag

    def handle_data(self, text: str) -> None:
        inside = {tag for tag, _ in self.open}
        ticks = any("tick" in (attrs.get("class") or "") for _, attrs in self.open)
        if not inside & {"style", "title", "data", "svg"} and not ticks:
            self.texts.append(text)


@pytest.fixture(params=["full", "empty", "run", "planned"])
def report(request: pytest.FixtureRequest) -> Report:
    content: Report = request.getfixturevalue(request.param)
    return content


def values(content: Any) -> tuple[set[float], set[str]]:
    """All numbers and all strings of a JSON document; keys are both."""
    numbers: set[float] = set()
    strings: set[str] = set()
    stack = [content]
    while stack:
        match stack.pop():
            case dict() as table:
                stack += [*table.keys(), *table.values()]
            case list() as items:
                stack += items
            case str() as text:
                strings.add(text)
                if re.fullmatch(r"\d+", text):
                    numbers.add(float(text))
            case bool() | None:
                pass
            case number:
                numbers.add(float(number))
    return numbers, strings


def test_every_figure_is_in_the_json(report: Report) -> None:
    numbers, strings = values(json.loads(json.dumps(finite(report.model_dump(mode="json")))))
    parsed = Parsed(page(report))
    assert set(parsed.figures) <= numbers
    known = {token for text in strings for token in NUMBER.findall(text)}
    for text in parsed.texts:  # whatever is not marked as a figure is quoted
        assert set(NUMBER.findall(text)) <= known | {"1"}, text


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_is_a_dash(value: float) -> None:
    """A damaged file of a gate may hold it."""
    assert plain(value) == number(value) == "–" and level(math.nan) == level(-1)


def test_sizes_have_three_digits() -> None:
    texts = [re.sub("<.*?>", "", size(value)) for value in (999, 999_499, 999_999, 999_600_000)]
    assert [text.replace("\N{NO-BREAK SPACE}", " ") for text in texts] == [
        "999 B", "999 kB", "1 MB", "1 GB",
    ]  # fmt: skip


@pytest.mark.parametrize("name", [r"a $\frac$", "a $b", "a $x$ b"])
def test_names_are_no_formulas(name: str) -> None:
    drawn = plots.curves("x", {name: [(1.0, 2.0)]}, name)
    assert re.findall("<text.*?>(.*?)</text>", drawn).count(name) == 2  # as they are written


def test_a_page_asks_for_nothing(report: Report) -> None:
    text = page(report)
    parsed = Parsed(text)
    for tag, attributes in parsed.elements:
        assert tag not in ("script", "iframe", "object", "embed", "img", "form", "base")
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            if name in ("href", "xlink:href", "src") and tag != "a":
                assert (value or "").startswith(("data:", "#")), (tag, value)
    style = text[text.index("<style>") : text.index("</style>")]
    assert "@import" not in text and "url(" not in style
    assert not re.search(r"url\((?!#)", text)
    assert "default-src 'none'" in text


def test_hostile_texts_are_texts(report: Report) -> None:
    """They are shown as they are, and nothing of them becomes an element or is evaluated."""
    text = page(report)
    assert "<script" not in text
    assert "alert(1)" not in text or "&lt;script&gt;alert(1)" in text
    if "alert(1)" in json.dumps(report.model_dump(mode="json")):
        assert "{{ 7 * 7 }}" in "".join(Parsed(text).texts)


def test_hostile_texts_are_there(full: BundleReport, empty: BundleReport) -> None:
    assert HOSTILE in json.loads(json.dumps(full.model_dump(mode="json")))["speculation"]["bundle"]
    assert empty.recipe == HOSTILE
    assert HOSTILE in " ".join("".join(Parsed(page(empty)).texts).split("\n"))


def test_the_same_content_gives_the_same_page(report: Report) -> None:
    assert page(report) == page(type(report).model_validate_json(report.model_dump_json()))


def test_all_sections_are_there(full: BundleReport, empty: BundleReport) -> None:
    for content in (full, empty):
        parsed = Parsed(page(content))
        assert [a["id"] for tag, a in parsed.elements if tag == "section"] == SECTIONS


def test_the_title_says_which_model_when_and_how_it_was_judged(full: BundleReport) -> None:
    text = page(full)
    title = text[text.index("<title>") : text.index("</title>")]
    for part in (full.title, full.date, "passed"):
        assert part in title
        assert part in text[text.index("<header>") : text.index("</header>")]


def test_a_date_and_a_command_are_two_facts(full: BundleReport) -> None:
    """Nobody knows which command gave a stored verdict."""
    text = " ".join(page(full).split())
    golden = next(verdict for verdict in full.verdicts if verdict.gate == "golden")
    assert f"{golden.date}. To run it again: <code>cetane validate " in text
    assert "Judged while <code>cetane port</code> makes a bundle." in text


def test_tasks_say_how_they_were_asked(full: BundleReport) -> None:
    text = " ".join(re.sub(r"<[^>]+>", "", page(full)).split())
    assert "the first 40 samples of each, after 2 examples, by the chat template." in text
    assert "in the mean. Note: 3 answers had less room." in text


def test_every_large_figure_has_a_limit_a_basis_and_a_direction(full: BundleReport) -> None:
    text = page(full)
    cards = text[text.index('<dl class="key">') : text.index("</dl>")].split("<dt>")[1:]
    assert len(cards) == len(full.figures)
    for card in cards:
        assert re.search(r"limit [≥≤]|no limit set| to <data", card), card
        assert "<b>measured</b>" in card or "<b>predicted</b>" in card
        assert "higher is better" in card or "lower is better" in card


def test_every_cell_of_a_table_that_stacks_has_a_name(report: Report) -> None:
    """On a phone rows stand as blocks, where a cell's heading is its `data-label`."""
    inside, cells = False, []
    for tag, attributes in Parsed(page(report)).elements:
        if tag == "table":
            inside = "rows" in (attributes.get("class") or "")
        if tag == "td" and inside:
            cells.append(attributes)
    assert cells and all("data-label" in attributes for attributes in cells)


def test_no_two_elements_have_one_id(report: Report) -> None:
    ids = [a["id"] for _, a in Parsed(page(report)).elements if "id" in a]
    assert ids and len(ids) == len(set(ids))


def test_pictures_have_words(report: Report) -> None:
    """For those who cannot see them."""
    pictures = [
        attributes
        for tag, attributes in Parsed(page(report)).elements
        if tag == "svg" or attributes.get("role") == "img"
    ]
    assert all(one["role"] == "img" and one["aria-label"] for one in pictures)


def test_a_section_without_data_has_no_picture(empty: BundleReport) -> None:
    parsed = Parsed(page(empty))
    pictures = [a for _, a in parsed.elements if a.get("role") == "img"]
    assert len(pictures) == len(empty.residency.maps) > 0
    for section in ("positions", "quality", "speculation", "predicted", "device"):
        command = getattr(empty, section).command
        assert " ".join(command.split()) in " ".join("".join(parsed.texts).split())


def test_a_printed_page_has_everything(
    full: BundleReport, tmp_path: Path, browser: Chromium
) -> None:
    """Pictures are backgrounds, which browsers leave out unless told, and some figures are folded.
    On paper, the dark scheme's text is pale."""
    path = tmp_path / "page.html"
    path.write_text(page(full), encoding="utf-8")
    browser.open(path.as_uri(), dark=True)
    assert browser.run(FOLDED) > 0
    scheme = {"name": "prefers-color-scheme", "value": "dark"}
    browser.send("Emulation.setEmulatedMedia", media="print", features=[scheme])
    assert browser.run(FOLDED) == 0
    style = "getComputedStyle(document.querySelector('{}')).{}"
    assert browser.run(style.format(".heat i", "printColorAdjust")) == "exact"
    red, green, blue = map(int, re.findall(r"\d+", browser.run(style.format("body", "color"))))
    assert max(red, green, blue) < 64


def test_the_last_block_is_named_below_its_bar(
    full: BundleReport, tmp_path: Path, browser: Chromium
) -> None:
    """Of a model of few layers, the bars end before the page does."""
    path = tmp_path / "page.html"
    path.write_text(page(full), encoding="utf-8")
    browser.open(path.as_uri())
    right = "document.querySelector('{}').getBoundingClientRect().right"
    bar, name = ".columns > i:last-child", ".ends > span:last-child"
    assert abs(browser.run(right.format(bar)) - browser.run(right.format(name))) < 4


def test_plots_take_the_colours_of_the_page(full: BundleReport) -> None:
    text = page(full)
    drawn = text[text.index("<svg") : text.index("</svg>")]
    assert "var(--ink)" in drawn and "var(--s3)" in drawn
    assert not re.search(r"#0000\d\d", drawn)
    assert "<text" in drawn  # not outlines of letters
    assert "metadata" not in drawn


def test_a_sweep_of_fp16_alone_has_no_plot(full: BundleReport) -> None:
    points = [point for point in full.quality.points if point.method == "fp16"]
    quality = full.quality.model_copy(update={"points": tuple(points)})
    assert "<svg" in page(full)
    assert "<svg" not in page(full.model_copy(update={"quality": quality}))


def test_points_that_are_predicted_for_two_chips_say_for_which(full: BundleReport) -> None:
    first, *rest = full.quality.points
    points = (first.model_copy(update={"target": "a13, OS 18"}), *rest)
    text = page(
        full.model_copy(update={"quality": full.quality.model_copy(update={"points": points})})
    )
    assert f"Predictions are for a13, OS 18; {rest[0].target}." in text
    assert ", a13, OS 18</td>" in text and f", {first.target}</td>" not in page(full)


def contrast(a: str, b: str) -> float:
    """WCAG 2.1's ratio of two colours."""

    def luminance(colour: str) -> float:
        channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    first, second = sorted((luminance(a), luminance(b)), reverse=True)
    return (first + 0.05) / (second + 0.05)


def test_texts_can_be_read_in_both_schemes(empty: BundleReport) -> None:
    """Contrast of at least 4.5, as WCAG AA asks."""
    style = page(empty).split("<style>")[1].split("</style>")[0]
    light, dark = style.split("prefers-color-scheme: dark")
    for scheme in (light, dark):
        colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", scheme))
        for text in ("ink", "soft", "good", "bad", "idle"):
            for ground in ("paper", "card"):
                assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
        for text in ("good", "bad", "idle"):
            assert contrast(colours[text], colours[f"{text}-wash"]) >= 4.5, text
        for ground in ("soft", "ink"):
            assert contrast(colours[ground], colours["track"]) >= 4.5, ground
