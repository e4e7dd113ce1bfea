"""Tables and help on a terminal: nothing is cut, whatever its width."""

import io
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from rich.console import Console
from rich.text import Text
from tests.conftest import build_tokenizer
from typer.testing import CliRunner

from cetane.checkpoint import Tokenizer
from cetane.cli import fail, output
from cetane.cli.app import COMMANDS, app
from cetane.gates.residency.target import DEFAULT_OS
from cetane.hardware.chips import DEFAULT_CHIP
from cetane.mil.comparison import TOLERANCE

COLUMNS = ["drafter", "plain", "call", "drafted calls", "accepted", "by calls", "verdict"]
ROW = ["union", 12.25, 3.5, 48, 0.91, 1.021, "pays"]


@pytest.fixture(params=range(40, 100, 3))
def written(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[io.StringIO]:
    file = io.StringIO()
    monkeypatch.setattr(output, "console", Console(file=file, width=request.param))
    yield file


def test_every_cell_is_whole(written: io.StringIO) -> None:
    output.table("what it gained", COLUMNS, [ROW, ROW])
    text = written.getvalue()
    for cell in ROW:
        assert text.count(str(cell)) >= 2, text
    assert max(map(len, text.splitlines())) <= output.console.width


def test_a_long_word_beside_a_long_text_is_whole(written: io.StringIO) -> None:
    """The text gives way."""
    path, text = "/home/someone/cache", "some words that may be in lines of their own"
    output.table("what", ["state", "what", "has"], [["ok", text, f"63.5 GB free, {path}"]])
    assert path in written.getvalue()
    assert max(map(len, written.getvalue().splitlines())) <= output.console.width


def test_columns_stand_closer_before_they_become_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """The points of a sweep are 88 columns wide, and fit 80."""
    columns = ["point", "MB", "bits", "ppl", "KL", "top-1", "smoke", "tok/s"]
    row = ["palette4-kmeans-group8+gptq", "141.5", "16.00", "413.66", "0.0000", "100.0%", "2/2",
           "1204"]  # fmt: skip
    for width in (88, 80):
        file = io.StringIO()
        monkeypatch.setattr(output, "console", Console(file=file, width=width))
        output.table("points", columns, [row])
        lines = file.getvalue().splitlines()
        assert max(map(len, lines)) <= width
        assert row in [line.split() for line in lines]


def test_a_sentence_ends_its_lines_between_words(written: io.StringIO) -> None:
    sentence = "  a verifying call takes 1.02 decode steps, so it pays if 2% of drafts are accepted"
    output.say_wrapped(sentence)
    lines = written.getvalue().splitlines()
    assert max(map(len, lines)) <= output.console.width
    assert " ".join(line.strip() for line in lines) == sentence.strip()
    assert all(line.startswith("    ") for line in lines[1:])


def test_one_thing_is_no_plural() -> None:
    assert [output.several(count, "package") for count in (0, 1, 2)] == [
        "0 packages", "1 package", "2 packages",
    ]  # fmt: skip


@pytest.mark.parametrize("terminal", [True, False])
def test_a_warning_ends_its_lines_between_words(
    terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal; a log has it on one line."""
    file = io.StringIO()
    monkeypatch.setattr(
        output, "errors", Console(file=file, width=80, force_terminal=terminal, color_system=None)
    )
    warning = "100.0% of the weights are read off the ANE, at most 1% may be, on this old chip"
    output.show_warnings([warning])
    lines = file.getvalue().splitlines()
    assert len(lines) == (2 if terminal else 1)
    assert " ".join(line.strip() for line in lines) == f"warning: {warning}"


def test_a_title_has_something_below_it(written: io.StringIO) -> None:
    output.facts({"verdict": "", "next": None}, title="what follows")
    assert written.getvalue() == ""


def test_a_path_with_spaces_is_whole(written: io.StringIO) -> None:
    """It can be copied from the terminal."""
    path = output.Unbroken("/Users/me/My Models/a folder of some name/model")
    output.facts({"source": path, "recipe": "a long text of many words " * 5}, "checkpoint")
    output.table("leftovers", ["path", "size", "why"], [[path, "2 MB", "left by a conversion"]])
    assert written.getvalue().count(path) == 2


@pytest.mark.parametrize("columns", [80, 60])
@pytest.mark.parametrize("name", COMMANDS)
def test_help_names_every_option_in_few_columns(name: str, columns: int) -> None:
    group: typer.core.TyperGroup = typer.main.get_command(app)  # type: ignore[assignment]
    command = group.get_command(None, name)
    text = CliRunner().invoke(app, [name, "--help"], terminal_width=columns).output
    assert max(map(len, text.splitlines())) <= columns
    for param in command.params:
        for option in (*param.opts, *param.secondary_opts):
            assert option in text or not option.startswith("-")


def test_help_has_a_line_for_each_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a screen shows all commands at once."""
    monkeypatch.setenv("COLUMNS", "80")
    written = CliRunner().invoke(app, ["--help"]).output
    lines = [line.strip("\u2502 ") for line in written.splitlines() if line[:1] == "\u2502"]
    assert [line.split()[0] for line in lines] == ["--version", "--help", *COMMANDS]


@pytest.mark.parametrize(("name", "options"), [("validate", 3), ("export", 2)])
def test_help_of_a_finished_bundle_asks_only_what_has_moved(name: str, options: int) -> None:
    """Neither command adds an adapter to a bundle."""
    text = " ".join(CliRunner().invoke(app, [name, "--help"]).output.split())
    assert text.count("if it has moved since the build") == options
    assert "peft" not in text


def test_help_states_the_defaults_that_commands_take() -> None:
    """Those that are constants of modules which the help does not import."""
    audit, sweep, diff = (
        CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "200"}).output
        for name in ("audit", "sweep", "diff")
    )
    assert f"else {DEFAULT_CHIP})" in audit and f"else {DEFAULT_OS:g})" in audit
    assert f"({DEFAULT_CHIP})" in sweep and f"({DEFAULT_OS:g})" in sweep
    assert f"({TOLERANCE:g})" in diff


def test_a_silent_job_tells_its_title(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a terminal, and only if it takes long and has told nothing else."""
    file = io.StringIO()
    monkeypatch.setattr(output, "errors", Console(file=file, width=80))
    monkeypatch.setattr(output, "FIRST_LINE_AFTER", 0.05)
    with output.progress("quick"):
        pass
    with output.progress("told") as update:
        update("a part", 1, 2)
        time.sleep(0.2)
    with output.progress("silent"):
        time.sleep(0.2)
    assert file.getvalue() == "told: a part (1/2)\nsilent\n"


@pytest.mark.parametrize("terminal", [False, True])
def test_what_cetane_logs_during_a_job_stays(
    terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal too, where a bar takes the place of what it said before."""
    file = io.StringIO()
    log = logging.getLogger("cetane.build")
    monkeypatch.setattr(output, "errors", Console(file=file, width=30, force_terminal=terminal))
    with output.progress("port") as update:
        log.info("an earlier build left %d parts, and others are still to make\x1b[2J", 3)
        update("a part", 1, 2)
    log.info("not of a job")
    text = Text.from_ansi(file.getvalue()).plain
    told = r"an earlier build left 3 parts, and others are still to make\x1b[2J"
    assert told in " ".join(text.split()) and "not of a job" not in text


@pytest.mark.parametrize("kept", [True, False])
def test_a_first_run_says_that_it_compiles(kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr("cetane.mil.fast.compiled.is_kept", lambda: kept)
    for backend in ("portable", "coreml"):
        output.tell_kernels(lambda what, *_: told.append(what), backend)
    assert told == ([] if kept else ["compiling, once on this machine"])


REFUSAL = "{{ raise_exception('no') }}"
IDS = ",".join(map(str, build_tokenizer()("Once upon a time").input_ids))


@pytest.mark.parametrize(
    ("template", "remark", "how"),
    [
        (None, "", "'Once upon a time'"),
        ("{{ messages[0].content }}", "", "--chat"),
        ("{% if messages[0].role != 'system' %}" + REFUSAL + "{% endif %}", "/system", "--chat"),
        (
            "{% if messages[0].content is string %}" + REFUSAL + "{% endif %}",
            "tokens",
            f"--prompt-ids {IDS}",
        ),
    ],
    ids=["base", "chat", "system", "parts"],
)
def test_a_bundle_is_run_as_its_model_can(
    template: str | None, remark: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = build_tokenizer().backend_tokenizer
    tokenizer = Tokenizer(backend, {}, (), template)
    monkeypatch.setattr("cetane.bundle.Bundle", lambda _: SimpleNamespace(tokenizer=tokenizer))
    file = io.StringIO()
    monkeypatch.setattr(output, "console", Console(file=file))
    output.say_next_run(Path("tiny"))
    *remarks, last = file.getvalue().splitlines()
    assert last == f"next: cetane run tiny {how}"
    assert remark in "".join(remarks) and bool(remarks) == bool(remark)


@pytest.mark.parametrize(("count", "told"), [(400, "0.000 MB"), (34_000, "0.034 MB"),
                                             (1_250_000, "1.2 MB")])  # fmt: skip
def test_a_tiny_model_has_a_size_too(count: int, told: str) -> None:
    assert output.megabytes(count) == told


HOSTILE = "a\x1b[2Jb\x1b]0;owned\x07\u202ec"


def test_a_stranger_moves_no_cursor(written: io.StringIO) -> None:
    """Names of tensors, models and recipes come from files of others."""
    output.say(HOSTILE)
    output.facts({"source": HOSTILE}, HOSTILE)
    output.table(HOSTILE, ["name", "shape"], [[HOSTILE, "2x2"]])
    text = written.getvalue()
    assert text.count(r"a\x1b[2Jb\x1b]0;owned\x07\u202ec") == 5
    assert text.replace("\n", "").isprintable()


def test_a_name_between_colons_stays(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """rich made an emoji of `:dog:`, so the path that was printed did not exist."""
    monkeypatch.setattr(output.console, "width", 80)
    output.say("wrote a:dog:b")
    output.table("of a:dog:b", ["name"], [["a:dog:b"]])
    output.warn("a:dog:b is old")
    assert fail("a:dog:b is missing", "give a:dog:b") == 2
    out, err = capsys.readouterr()
    assert (out.count("a:dog:b"), err.count("a:dog:b")) == (3, 3)
