"""The decision log: from files alone, always the same, and in step with what is committed."""

import re
from html.parser import HTMLParser
from pathlib import Path

from markdown_it import MarkdownIt
from tests.lab.test_journal import intent, outcome

from cetane.lab.document import cell, markdown
from cetane.lab.experiment import ReportedFigure
from cetane.lab.journal import ArmOutcome, Figure, GateOutcome, Journal, Verdict
from cetane.lab.library import load_experiments, shipped_experiments

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "decision-log.md"


def filled(journal: Journal) -> None:
    before = Figure(value=2e6, unit="B")
    arms = {
        "baseline": ArmOutcome(artefact="b" * 64, metrics={"weight_bytes": before}),
        "candidate": ArmOutcome(
            artefact="c" * 64,
            metrics={
                "weight_bytes": Figure(value=1e6, unit="B"),
                "predicted_ms": Figure(value=9.0, low=8.0, high=10.5, unit="ms", kind="predicted",
                                       note="a chip"),
            },
            texts={"smoke": "one|two\nthree"},
            curves={"recall": ((1.0, 1.0), (64.0, 0.5))},
        ),
    }  # fmt: skip
    gate = GateOutcome(metric="weight_bytes", arm="ratio", most=0.6, value=0.5, passed=True)
    journal.append(intent("r1", "tiny"))
    journal.append(outcome("r1", "tiny", arms=arms, gates=(gate,), surprise="smaller than 1"))


def test_the_page_says_what_the_files_say(lab: Path, journal: Journal) -> None:
    before = markdown(load_experiments(lab), journal)
    assert "| Tiny (`tiny`) | Measured | Measured | not run |" in before
    filled(journal)
    page = markdown(load_experiments(lab), journal)
    for part in (
        "### Tiny — Measured",
        "| weight_bytes | 2 MB | 1 MB | 0.5 | measured |",
        "| predicted_ms |  | 9 (8 to 10.5) ms |  | predicted, a chip |",
        "Gate: weight_bytes to the baseline's at most 0.6: 0.5, pass.",
        "**Surprise.** smaller than 1",
        "smoke, candidate: `one¦two⏎three`",
        "recall, candidate: 1: 1, 64: 0.5",
        "| size |  | half | nobody |",
        "bundles baseline bbbbbbbbbbbb, candidate cccccccccccc",
    ):
        assert part in page
    journal.append(intent("r2", "tiny"))  # a run that was killed hides nothing
    earlier = "weight_bytes 0.5; figures of an earlier definition"
    assert f"| Measured | interrupted | {earlier} |" in markdown(load_experiments(lab), journal)
    journal.append(
        Verdict(experiment="tiny", at="2999-05-01T00:00:00", status="Rejected", reason="0.5",
                obituary="No."),
    )  # fmt: skip
    page = markdown(load_experiments(lab), journal)
    assert "### Tiny — Rejected" in page and "**Verdict (2999-05-01).** Rejected: 0.5" in page
    assert "**Obituary.** No." in page


def test_the_table_and_the_detail_agree_about_the_definition(lab: Path, journal: Journal) -> None:
    filled(journal)
    told = "figures of an earlier definition"
    assert markdown(load_experiments(lab), journal).count(told) == 2
    one = load_experiments(lab)["tiny"].model_copy(update={"gates": ()})
    hashes = {"experiment_sha256": one.sha256, "recipes": one.recipes_sha256}
    journal.append(intent("r2", "tiny").model_copy(update=hashes))
    journal.append(outcome("r2", "tiny"))
    assert told not in markdown({"tiny": one}, journal)


def test_a_verdict_that_a_later_run_may_contradict(lab: Path, journal: Journal) -> None:
    verdict = Verdict(experiment="tiny", at="2026-05-01T00:00:00", status="Measured", reason="0.5")
    journal.append(verdict)
    assert "**Verdict (2026-05-01).** Measured" in markdown(load_experiments(lab), journal)
    filled(journal)
    page = markdown(load_experiments(lab), journal)
    assert "**Verdict (2026-05-01, before the last run).** Measured" in page


def test_the_status_in_the_words_of_the_original(lab: Path, journal: Journal) -> None:
    path = lab / "tiny.toml"
    path.write_text(path.read_text().replace("\ndate", '\noriginal = "In training"\ndate'))
    page = markdown(load_experiments(lab), journal)
    assert "| Tiny (`tiny`) | In training | Measured | not run |" in page
    assert "`tiny`; original 2026-04-13: In training." in page


class Tags(HTMLParser):
    """The names of the elements of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.names.add(tag)


def test_hostile_texts_are_texts(lab: Path, journal: Journal) -> None:
    """CommonMark is the judge: it lets HTML of a page through."""
    hostile = "a\x1b[31m\u202e\n# b <script>x</script> `<img src=x>` \\` <iframe> ` < 1 <!-- c"
    one = load_experiments(lab)["tiny"]
    words = {"title": hostile, "hypothesis": hostile, "lesson": hostile, "original": hostile}
    arm = ArmOutcome(texts={hostile: hostile}, curves={hostile: ((1, 2),)},
                     metrics={"kl": Figure(value=1, unit=hostile, note=hostile)})  # fmt: skip
    journal.append(intent("r1", "tiny"))
    journal.append(outcome("r1", "tiny", arms={"baseline": arm, "candidate": arm}))
    page = markdown({"tiny": one.model_copy(update=words)}, journal)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\u202e]", page)
    shown = MarkdownIt("commonmark").render(page)
    assert not {"script", "img", "iframe"} & Tags(shown).names
    assert "<!--" not in shown and "&lt;script&gt;" in shown and " &lt; 1 " in shown


def test_texts_that_would_break_a_table_or_link_to_a_script(lab: Path, journal: Journal) -> None:
    hostile = "a | [b](javascript:1) [c](an-app:1)\n[d](https://e.org)"
    report = ReportedFigure(what=hostile, candidate="|x|", source=hostile)
    one = load_experiments(lab)["tiny"].model_copy(
        update={"title": hostile, "lesson": hostile, "original": hostile, "reported": (report,)}
    )
    arm = ArmOutcome(metrics={"kl": Figure(value=1, unit="|", note=hostile)})
    journal.append(intent("r1", "tiny"))
    journal.append(outcome("r1", "tiny", arms={"baseline": arm, "candidate": arm}))
    shown = MarkdownIt("commonmark").enable("table").render(markdown({"tiny": one}, journal))
    assert set(re.findall('href="([^"]*)"', shown)) == {"https://e.org"}
    assert "<td>|x|</td>" in shown
    titles = [row for row in re.findall("<td>(.*?)</td>", shown) if "(<code>tiny</code>)" in row]
    assert len(titles) == 1 and titles[0].startswith("a | [b](javascript:1)")


def test_it_is_always_the_same(lab: Path, journal: Journal) -> None:
    filled(journal)
    first = markdown(load_experiments(lab), journal)
    assert first == markdown(load_experiments(lab), Journal(journal.path))


def test_figures_for_people() -> None:
    assert cell(None) == "" and cell(Figure(value=None)) == "none"
    assert cell(Figure(value=0.98765, unit="share")) == "0.98765"
    assert cell(Figure(value=1.5, low=1.0, high=2.0, unit="ms")) == "1.5 (1 to 2) ms"


def test_the_committed_page_is_the_one_that_is_generated() -> None:
    """`cetane lab report -o docs/reference/decision-log.md` makes it, after a run or a change."""
    folder = shipped_experiments()
    page = markdown(load_experiments(folder), Journal(folder / "journal.jsonl"))
    assert PAGE.read_text(encoding="utf-8") == page
