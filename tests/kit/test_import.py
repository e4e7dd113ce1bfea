"""What comes back from a Mac: it is kept if it is the bundle's, and refused by name if not."""

import copy
import json
import shlex
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from cetane.bundle import Bundle
from cetane.cli.import_ import show_kit
from cetane.errors import CetaneError
from cetane.gates.residency.audit import audit as examine
from cetane.gates.residency.store import MEASURED, InBundle
from cetane.gates.residency.target import Target
from cetane.kit import expectation
from cetane.kit.device import DEVICE, DeviceResult
from cetane.kit.expectation import expected_of
from cetane.kit.measurements import read_measurements
from cetane.kit.plausible import check_turns
from cetane.mil import load
from cetane.mil.program import Op
from cetane.perf.evidence import read
from cetane.pipeline.audit import audit
from cetane.pipeline.import_kit import evidence_file, import_kit

Content = dict[str, Any]
SPREAD = {"median_ms": 2.0, "p95_ms": 2.5, "min_ms": 1.9, "count": 5}
Write = Callable[..., Path]


@pytest.fixture
def bundle(pair: tuple[Bundle, Bundle], tmp_path: Path) -> Bundle:
    """A copy of the first bundle."""
    return Bundle(Path(shutil.copytree(pair[0].path, tmp_path / "tiny-A")))


def imported(path: Path, bundle: Bundle) -> DeviceResult:
    (outcome,) = import_kit(path, [bundle.path]).outcomes
    return outcome


def test_a_macs_record_becomes_gates_residency_and_evidence(write: Write, bundle: Bundle) -> None:
    outcome = imported(write(), bundle)
    assert outcome.passed and outcome.device and outcome.chip == "m4-max"
    assert (outcome.positions, outcome.figures.decode_ms, outcome.figures.turns) == (25, 4.0, 2)
    assert outcome.figures.joules_per_token == 0.02 and outcome.caveats
    gates = bundle.gates()
    assert gates[DEVICE]["passed"] and gates[DEVICE]["machine"].startswith("Apple M4 Max")
    assert gates[MEASURED]["measured"]["machine"] == "Apple M4 Max"
    again = audit(bundle.path)  # without a word about the file
    assert again.audit.basis != "predicted"
    places = {op.kind: op.measured for f in again.audit.functions for op in f.ops}
    assert places["softmax"] == "CPU" and places["conv"] == "ANE"


def test_residency_speaks_of_draft_heads_too(
    write: Write, pair: tuple[Bundle, Bundle], bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kit has none of them, but the verdict that an import stores names them. The other bundle's
    package stands in for one: its rules are of int8, which the bundle's own shard has not."""
    only = rules(pair[1]) - rules(bundle)
    assert only
    packages = {"model": bundle.shard("model"), "medusa": pair[1].shard("model")}
    monkeypatch.setattr(InBundle, "packages", packages)
    imported(write(), bundle)
    assert only <= bundle.gates()["residency"]["findings"].keys()


def rules(bundle: Bundle) -> set[str]:
    """The rules that apply to the functions of a bundle's shard."""
    examined = examine({"model": load(bundle.shard("model"))}, Target())
    return {finding.rule for function in examined.functions for finding in function.findings}


@pytest.mark.parametrize(
    ("chip", "system", "rules"),
    [("Apple M4 Max", "macOS 15.5", ""), ("Apple M9", "macOS 26.1", " (rules of m4-max)")],
)
def test_residency_is_measured_for_that_mac(
    write: Write, bundle: Bundle, chip: str, system: str, rules: str
) -> None:
    imported(write(lambda c: c["machine"].update(chip=chip, system=system)), bundle)
    assert bundle.gates()["residency"]["target"] == f"{chip}, {system} (25B78){rules}"


def test_rules_show_where_they_were_wrong(write: Write, bundle: Bundle) -> None:
    """Programs this small are predicted on the CPU; the made-up Mac ran all but softmax on the
    ANE."""
    ops = [op for op in load(bundle.shard("model")).functions["decode"].ops if is_compute(op)]
    softmax = sum(op.kind == "softmax" for op in ops)
    (rule,) = imported(write(), bundle).rules
    assert (rule.rule, rule.predicted) == ("tiny-program", "CPU")
    assert (rule.ops, rule.wrong) == (len(ops), len(ops) - softmax)
    assert rule.measured == {"ANE": rule.wrong}
    assert rule.narrow == "it held only for kind softmax"


def is_compute(op: Op) -> bool:
    return op.kind != "const" and not op.kind.startswith("constexpr")


def test_the_cost_model_shows_by_how_much_it_was_wrong(write: Write, bundle: Bundle) -> None:
    (step,) = imported(write(), bundle).compared
    assert step.mode == "decode" and step.measured_ms == 4.0
    assert step.ratio == pytest.approx(4.0 / step.predicted_ms)


def test_figures_become_rows_that_the_fit_reads(write: Write, bundle: Bundle) -> None:
    outcome = imported(write(), bundle)
    rows, skipped = read([evidence_file(bundle)])
    assert not skipped and len(rows) == outcome.rows == 2
    assert {(row.kind, row.ms, row.chip.id) for row in rows} == {
        ("step", 4.0, "m4-max"), ("part", 2.0, "m4-max"),
    }  # fmt: skip
    weights = sum(n for row in rows for work in row.works for n in work.weights.values()) / 2
    assert weights == pytest.approx(bundle.plan.weight_bytes / 2, rel=0.02)  # fp16


def test_without_turns_loads_and_energy_are_kept(write: Write, bundle: Bundle) -> None:
    """As with --rounds 0."""
    found = imported(write(lambda content: content.update(turns=[])), bundle).figures
    assert (found.load_ms, found.load_again_ms, found.joules_per_token) == (40.0, 9.0, 0.02)
    assert (found.turns, found.decode_ms) == (0, None)


def test_two_bundles_are_compared_turn_by_turn(
    write: Write, pair: tuple[Bundle, Bundle], tmp_path: Path
) -> None:
    copies = [shutil.copytree(one.path, tmp_path / f"b{n}") for n, one in enumerate(pair)]
    made = import_kit(write(), copies)
    assert made.ratios == {"decode_ms": 0.75, "first_token_ms": 1.0}
    assert [outcome.figures.decode_ms for outcome in made.outcomes] == [4.0, 3.0]


def test_the_printed_commands_fit_each_bundles_rows(
    write: Write, pair: tuple[Bundle, Bundle], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copies = [Path(shutil.copytree(one.path, tmp_path / f"b {n}")) for n, one in enumerate(pair)]
    show_kit(copies, import_kit(write(), copies))
    lines = [line for line in capsys.readouterr().out.splitlines() if "perf.fit" in line]
    commands = [shlex.split(line.partition(": ")[2]) for line in lines]
    assert [command[:3] for command in commands] == [["python", "-m", "cetane.perf.fit"]] * 2
    files = [Path(command[3]) for command in commands]
    assert files == [evidence_file(Bundle(path)) for path in copies]
    assert len(read(files)[0]) == 4


@pytest.mark.parametrize(
    "machine",
    [
        {"mac": False, "chip": "x86_64", "system": "Linux"},
        {"virtual": True},
        {"chip": "Intel(R) Core(TM) i9-9880H CPU @ 2.30GHz", "model": "MacBookPro16,1"},
    ],
)
def test_another_machines_record_is_judged_and_not_kept(
    write: Write, bundle: Bundle, machine: Content
) -> None:
    outcome = imported(write(lambda content: content["machine"].update(machine)), bundle)
    assert outcome.passed and not outcome.device and not outcome.rows
    assert not {DEVICE, MEASURED} & set(bundle.gates())
    assert "not kept" in outcome.notes[-1] and not outcome.compared


@pytest.mark.parametrize("units", ["CPU_ONLY", "CPU_AND_GPU", "ALL"])
def test_a_record_of_other_compute_units_leaves_the_neural_engines_alone(
    write: Write, bundle: Bundle, units: str
) -> None:
    def on_the_processor(content: Content) -> None:
        content["options"]["compute_units"] = units
        for op in function(content)["plan"]:
            op["device"] = op["device"] and "CPU"
        for one in content["turns"]:
            one["decode"] = {"median_ms": 9.0, "p95_ms": 9.0, "min_ms": 1.0, "count": 8}
            one["decode_tok_s"] = 125.0

    imported(write(), bundle)
    before = {name: bundle.gates()[name] for name in (DEVICE, MEASURED, "residency")}
    outcome = imported(write(on_the_processor), bundle)
    assert outcome.passed and outcome.figures.decode_ms == 9.0
    assert not outcome.rules and not outcome.measured_ops and not outcome.rows
    assert outcome.notes == (f"it ran on {units}, not on CPU_AND_NE, so this is not kept",)
    assert {name: bundle.gates()[name] for name in before} == before


def test_a_read_only_bundle_is_told(
    write: Write, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Bundle, "write_gate", lambda *_: False)
    outcome = imported(write(), bundle)
    assert outcome.passed and not outcome.rows
    assert outcome.notes[-1] == "the bundle is read-only, so this is not kept"
    assert not evidence_file(bundle).exists()


def test_a_device_that_computes_something_else_fails(write: Write, bundle: Bundle) -> None:
    def wrong(content: Content) -> None:
        rows = content["bundles"]["A"]["probes"]["text"]
        row = next(row for row in rows if row["margin"] > 0.1)
        row["top"] = [*row["top"][1:], [0, -100.0]]

    outcome = imported(write(wrong), bundle)
    assert not outcome.passed
    assert [c.name for c in outcome.checks if not c.passed] == ["same token where decided, share"]
    assert bundle.gates()[DEVICE]["passed"] is False


def test_times_of_a_red_gate_are_no_evidence(write: Write, bundle: Bundle) -> None:
    outcome = imported(write(erring(0.02)), bundle)
    assert not outcome.passed and not outcome.rows and not evidence_file(bundle).exists()
    assert outcome.notes == ("the gate failed, so the times are no evidence for the cost model",)


def test_a_device_with_nan_fails(write: Write, bundle: Bundle) -> None:
    def nan(content: Content) -> None:
        row = content["bundles"]["A"]["probes"]["text"][3]
        for name in ("top", "cosine", "kl", "largest_error"):
            del row[name]
        row["finite"] = False

    assert not imported(write(nan), bundle).passed


def function(content: Content) -> Content:
    result: Content = content["bundles"]["A"]["functions"]["model/decode"]
    return result


def turn(content: Content) -> Content:
    result: Content = content["turns"][0]
    return result


def put(where: Callable[[Content], Content], **values: Any) -> Callable[[Content], None]:
    return lambda content: where(content).update(values)


def died(content: Content) -> None:
    function(content).pop("predict")


def predicted(**values: Any) -> Callable[[Content], None]:
    return put(lambda content: function(content)["predict"], **values)


def erring(error: float | None) -> Callable[[Content], None]:
    return put(lambda content: function(content)["predict"]["errors"], logits_0=error)


@pytest.mark.parametrize(
    ("change", "check"),
    [
        (put(lambda content: content, finished=False), "finished"),
        (died, "called functions"),
        (predicted(finite=False), "finite functions, share"),
        (predicted(errors={}), "largest error of an output"),
        (erring(None), "largest error of an output"),
        (erring(0.02), "largest error of an output"),
        (put(lambda content: content["bundles"]["A"], probes={}), "probed positions"),
    ],
)
def test_what_a_device_did_not_compute_fails(
    write: Write, bundle: Bundle, change: Callable[[Content], None], check: str
) -> None:
    outcome = imported(write(change), bundle)
    assert not outcome.passed
    assert check in [one.name for one in outcome.checks if not one.passed]


def test_a_probe_that_hung_fails(write: Write, bundle: Bundle) -> None:
    """The kit asks for one more probe than the record has."""
    outcome = imported(write(lambda c: c["bundles"]["A"]["probes"].pop("late")), bundle)
    assert [(c.name, c.value, c.limit) for c in outcome.checks if not c.passed] == [
        ("probed positions", 13, 25)
    ]


def test_a_kit_that_compares_nothing_of_a_function_fails(
    write: Write, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the device computed there, nobody looked."""
    nothing = expected_of(bundle).model_copy(update={"functions": {"model/decode": ()}})
    monkeypatch.setattr("cetane.pipeline.import_kit.expected_of", lambda _: nothing)
    outcome = imported(write(predicted(errors={})), bundle)
    assert [(c.name, c.value, c.limit) for c in outcome.checks if not c.passed] == [
        ("functions without a compared output", 1, 0)
    ]


def without_positions(kept: Content) -> None:
    kept["positions"] = {}


def with_one_position(kept: Content) -> None:
    kept["positions"]["text"] = kept["positions"]["text"][:1]


def without_functions(kept: Content) -> None:
    kept["functions"] = {}


def with_one_output(kept: Content) -> None:
    kept["functions"]["model/decode"] = kept["functions"]["model/decode"][:1]


@pytest.mark.parametrize(
    "weaken", [without_positions, with_one_position, without_functions, with_one_output]
)
def test_a_kits_gate_that_leaves_something_out_is_computed_again(
    bundle: Bundle, weaken: Callable[[Content], None]
) -> None:
    """No manifest lists the file, so whoever hands on a bundle can write it."""
    whole = bundle.gates()["kit"]
    weak = copy.deepcopy(whole)
    weaken(weak)
    bundle.write_gate("kit", weak)
    assert expected_of(bundle).model_dump(mode="json") == whole


def test_without_the_kits_gate_it_is_computed_again(write: Write, bundle: Bundle) -> None:
    kept = bundle.gates()["kit"]
    assert kept["functions"]["model/decode"]
    (bundle.path / "gates" / "kit.json").unlink()
    assert expected_of(bundle).model_dump(mode="json") == kept
    assert imported(write(), bundle).passed


def test_the_kits_own_gate_serves(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is computed for it: a late probe may take minutes."""
    monkeypatch.delattr(expectation, "expected_probes")
    monkeypatch.delattr(expectation, "function_calls")
    assert expected_of(bundle).model_dump(mode="json") == bundle.gates()["kit"]


def test_a_changed_file_is_refused(write: Write, bundle: Bundle) -> None:
    path = write()
    path.write_text(path.read_text().replace('"median_ms": 4.0', '"median_ms": 3.9'))
    with pytest.raises(CetaneError, match="changed after it was written"):
        imported(path, bundle)
    assert DEVICE not in bundle.gates()


def test_another_bundles_file_is_refused(write: Write, bundle: Bundle) -> None:
    def other(content: Content) -> None:
        for one in content["bundles"].values():
            one["digest"] = "0" * 64

    with pytest.raises(CetaneError, match=r"another bundle: tiny-A \(000000000000\)"):
        imported(write(other), bundle)


BEYOND = {
    "min_ms": 1e-7, "median_ms": 1e-7, "p95_ms": 1e-7, "count": 9, "first_ms": 1.0, "finite": True,
    "errors": {},
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (put(function, predict=BEYOND), "GB/s, beyond reason"),
        (put(function, load_ms=-1.0), "load_ms"),
        (put(function, load_ms=1e12), "load_ms"),
        (put(function, tokens=4), "not of the bundle's function"),
        (put(function, shard="other"), "no such function"),
        (put(function, more=1), "unknown key"),
        (put(function, plan=[{"output": "x", "kind": "conv", "device": "ANE"}]), "ops that the"),
        (put(function, plan=[{"output": "x", "kind": "conv", "device": "TPU"}]), "device"),
        (put(turn, decode_tok_s=1e6), "than the fastest step allows"),
        (put(turn, prefill_tok_s=9.0), "rate of prefill"),
        (put(turn, decode_tok_s=0.25), "tokens a second are not those of the steps' times"),
        (put(turn, decode={"median_ms": 4e-3, "p95_ms": 4e-3, "min_ms": 4e-3, "count": 8}),
         "tokens a second are not those of the steps' times"),
        (put(turn, shard_ms={"model": 3.5, "head": 3.5}), "shards take longer than the steps"),
        (predicted(median_ms=2e3, p95_ms=2e3, min_ms=2e3),
         "a decode step takes 4.8 ms, and its functions alone 2000 ms"),
        (put(turn, tokens=[10**6]), "beyond the vocabulary"),
        (put(turn, prompt_tokens=10**6, first_token_ms=1.0, prefill_tok_s=1e9),
         "1,000,000 tokens, and the bundle's context has 32"),
        (put(turn, first_token_ms=1e-3, prefill_tok_s=2e7),
         "the prompt takes 0.001 ms, and its functions alone 38 ms"),
        (put(turn, verify=SPREAD, verify_tokens=999), "calls of 999 tokens, and the bundle none"),
        (put(turn, verify_tokens=4), "a verifying call needs its tokens and its times"),
        (put(lambda c: c, begun="x"), "begun"),
        (put(lambda c: c, begun=""), "begun"),
        (put(lambda c: c, written="yesterday"), "written"),
        (put(turn, decode={"median_ms": 3, "p95_ms": 2, "min_ms": 1, "count": 2}), "not in order"),
        (put(lambda c: c["energy"][0], watts={"cpu": 1e5}), "watts"),
        (put(lambda c: c["energy"][0], tokens=1), "not its watts times the time"),
        (put(lambda c: c["bundles"]["A"]["probes"]["text"][0], expected=7), "other tokens"),
        (put(lambda c: c["bundles"]["A"]["probes"]["text"][0], cosine=1.5), "cosine"),
        (put(lambda c: c, schema_version=9), "schema 9, not 1"),
        (put(lambda c: c, turns="none"), "turns"),
        (put(turn, prompt_tokens=True), "prompt_tokens: Input should be a valid integer"),
        (put(turn, verify_tokens=-1), "verify_tokens"),
        (put(function, load_ms="40"), "load_ms: Input should be a valid number"),
        (put(lambda c: c["machine"], mac=1), "mac: Input should be a valid boolean"),
        (put(turn, bundle="C"), "turns.0.bundle"),
        (put(lambda c: c["energy"][0], bundle="a"), "energy.0.bundle"),
        (lambda c: c["bundles"].pop("B"), "figures of B, and no such bundle"),
        (lambda c: c["bundles"].update(C=c["bundles"].pop("B")), "bundles.C"),
        (put(lambda c: c["machine"], chip="x" * 5000), "chip"),
    ],
)  # fmt: skip
def test_figures_beyond_reason_and_wrong_forms_are_refused_by_name(
    write: Write, bundle: Bundle, change: Callable[[Content], None], reason: str
) -> None:
    with pytest.raises(CetaneError, match=reason):
        imported(write(change), bundle)
    assert not {DEVICE, MEASURED} & set(bundle.gates())


def test_verifying_calls_are_as_wide_as_the_bundles(write: Write, bundle: Bundle) -> None:
    content = read_measurements(write(put(turn, verify=SPREAD, verify_tokens=4)))
    recorded, plan = content.bundles["A"], bundle.plan
    for width in (4, 8):
        mode = plan.modes["decode"].model_copy(update={"tokens": width})
        wider = plan.model_copy(update={"modes": plan.modes | {"verify": mode}})
        refused = pytest.raises(CetaneError, match="calls of 4 tokens") if width == 8 else None
        with refused or nullcontext():
            check_turns(content.turns[:1], recorded, wider)


def test_words_of_a_record_are_safe_for_a_terminal(write: Write, bundle: Bundle) -> None:
    def hostile(content: Content) -> None:
        content["machine"]["chip"] = "Apple M4\x1b[2J"
        function(content)["refusals"] = ["no\x1b]0;title\x07", "\u202etxt"]
        content["faults"] = [
            {"job": "A/x", "phase": "", "kind": "died", "detail": "\x1b[8m\nline", "at": "now"}
        ]

    outcome = imported(write(hostile), bundle)
    said = (outcome.machine, *outcome.refusals, *outcome.faults, *outcome.notes)
    assert len(said) >= 4 and all(text.isprintable() for text in said)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"kit": 1, "kit": 2}', "[" * 100_000, '{"kit": NaN}', "\0" * 100]
)
def test_other_files_are_refused(tmp_path: Path, bundle: Bundle, text: str) -> None:
    path = tmp_path / "measurements.json"
    path.write_text(text)
    with pytest.raises(CetaneError):
        imported(path, bundle)


def test_without_a_bundle_it_says_what_was_measured(write: Write) -> None:
    with pytest.raises(CetaneError, match="measured tiny-A tiny-B"):
        import_kit(write(), [])


def test_a_row_of_evidence_must_be_of_numbers(write: Write, bundle: Bundle, tmp_path: Path) -> None:
    imported(write(), bundle)
    text = evidence_file(bundle).read_text()
    for wrong in (text.replace(",4.0,", ",-4.0,"), text.replace('""calls"": 1', '""calls"": -1')):
        path = tmp_path / "wrong.csv"
        path.write_text(wrong)
        assert wrong != text
        with pytest.raises(CetaneError, match="not a positive number"):
            read([path])


def test_the_record_of_the_outcome_is_json(write: Write, bundle: Bundle) -> None:
    content = imported(write(), bundle).model_dump_json()
    assert json.loads(content)["figures"]["decode_ms"] == 4.0
