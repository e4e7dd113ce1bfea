"""Xcode's reports and Core ML's analytics: read, matched to a package, or refused."""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cetane.bundle import Bundle
from cetane.errors import CetaneError
from cetane.kit.analytics import read_analytics
from cetane.mil import load
from cetane.mil.program import Op
from cetane.pipeline.audit import audit
from cetane.pipeline.import_xcode import import_xcode

DAY = "2026-11-20"
BACKEND = {"conv": "ane", "softmax": "classic_cpu", "matmul": "mps_graph"}


@pytest.fixture
def bundle(pair: tuple[Bundle, Bundle], tmp_path: Path) -> Bundle:
    """A bundle of one package."""
    return Bundle(Path(shutil.copytree(pair[0].path, tmp_path / "tiny")))


def ops(bundle: Bundle, shard: str) -> list[Op]:
    return list(load(bundle.shard(shard)).functions["decode"].ops)


@pytest.fixture
def report(bundle: Bundle, tmp_path: Path) -> Callable[..., Path]:
    """`report(shard, ...)`: an .mlperf folder about a shard, in the published form."""

    def written(shard: str, **others: Any) -> Path:
        operations = [
            {"operatorName": f"ios18.{op.kind}", "outputs": [{"name": op.outputs[0].name}],
             "cost": {"weight": 0.01},
             "deviceUsage": {"preferred": {"deviceType": {"neuralEngine" if op.kind != "softmax"
                                                          else "cpu": {}}}}}
            for op in ops(bundle, shard) if op.outputs
        ]  # fmt: skip
        functions = {"decode": {"block": {"operations": operations}}}
        content = {
            "deviceInfo": {"modelName": "Apple M4 Max",
                           "osNameAndVersionWithoutBuildNumber": "macOS 26.1"},
            "computeUnit": 3, "extra": [1],
            "deviceResults": {
                "predict": {"samples": [0.002, 0.001, 0.003], "numOperations": len(operations)},
                "load": {"samples": [0.5]},
                "modelStructure": {"program": {"_0": {"functions": functions}}},
            },
        } | others  # fmt: skip
        folder = tmp_path / "decode.mlperf"
        folder.mkdir()
        (folder / "report.json").write_text(json.dumps(content))
        return folder

    return written


def test_a_performance_report(bundle: Bundle, report: Callable[..., Path]) -> None:
    shard = bundle.plan.shards[0].name
    made = import_xcode(report(shard), bundle.path, DAY)
    assert made.package == shard and made.told.compute_units == "CPU_AND_NE"
    assert (made.told.predict_ms, made.told.load_ms, made.told.compile_ms) == (2.0, 500.0, None)
    places = {op.kind: op.measured for f in made.audit.functions for op in f.ops}
    assert places["softmax"] == "CPU" and places["conv"] == "ANE"
    assert bundle.gates()["residency-measured"]["measured"]["tools"] == "Xcode"


@pytest.mark.parametrize(
    ("machine", "system", "rules", "os"),
    [
        ("iPhone 17 Pro", "iOS 26.1", " (rules of m4-max)", 26),
        ("Apple M4 Max", "macOS 15.5", "", 18),
        ("Apple M3", "macOS 14.2", "", 17),
    ],
)
def test_a_verdict_is_for_the_machine_that_was_measured(
    bundle: Bundle, report: Callable[..., Path], machine: str, system: str, rules: str, os: int
) -> None:
    """Apple's pairs of systems: iOS 17 and macOS 14 came in 2023, iOS 18 and macOS 15 in 2024."""
    info = {"modelName": machine, "osNameAndVersionWithoutBuildNumber": system}
    made = import_xcode(report(bundle.plan.shards[0].name, deviceInfo=info), bundle.path, DAY)
    assert str(made.audit.target) == f"{machine}, {system}{rules}"
    assert made.audit.target.os == os
    assert bundle.gates()["residency"]["target"] == str(made.audit.target)


def test_a_report_of_other_compute_units_is_not_kept(
    bundle: Bundle, report: Callable[..., Path]
) -> None:
    before = bundle.gates()
    made = import_xcode(report(bundle.plan.shards[0].name, computeUnit=0), bundle.path, DAY)
    assert made.told.compute_units == "CPU_ONLY" and made.told.predict_ms == 2.0
    assert made.note is not None and "CPU_ONLY" in made.note
    assert made.audit.basis == "predicted" and not made.rules
    assert bundle.gates() == before


def test_a_read_only_bundle_is_told(
    bundle: Bundle, report: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Bundle, "write_gate", lambda *_: False)
    made = import_xcode(report(bundle.plan.shards[0].name), bundle.path, DAY)
    assert made.note == "the bundle is read-only, so this is not kept"
    assert made.audit.basis == "measured"


@pytest.fixture
def alike(tiny_bundle: Callable[..., Bundle], tmp_path: Path) -> Bundle:
    """A bundle of two chunks whose ops have the same names."""
    made = tiny_bundle(layout={"kind": "chunks", "chunks": 2}, verify=None, prefill=None)
    return Bundle(Path(shutil.copytree(made.path, tmp_path / "alike")))


def test_a_package_of_a_bundle_is_measured_into_the_bundle(alike: Bundle, tmp_path: Path) -> None:
    """The error for alike chunks asks for one package. What it told is kept with the bundle."""
    path = tmp_path / "analytics.mil"
    path.write_text(analytics(ops(alike, "chunk-00")))
    with pytest.raises(CetaneError, match="chunk-00, chunk-01 alike") as error:
        import_xcode(path, alike.path, DAY)
    assert str(alike.shard("chunk-00")) in str(error.value.hint)
    for shard in ("chunk-00", "chunk-01"):
        made = import_xcode(path, alike.shard(shard), DAY)
        assert made.package == shard and made.audit.basis == "measured"
    alike.verify()
    kept = alike.gates()["residency-measured"]["measured"]
    assert kept["packages"].keys() == {"chunk-00", "chunk-01"}
    places = {f.package: {op.measured for op in f.ops} for f in audit(alike.path).audit.functions}
    assert places["chunk-00"] == places["chunk-01"] == {"ANE", "CPU"}


def analytics(listed: list[Op], function: str = "decode") -> str:
    """MIL text with the compiler's remarks, in the form that Core ML's cache has."""
    lines = ["program(1.3)", "{", f"    func {function}<ios18>(tensor<fp16, [1, 64, 1, 1]> x) {{"]
    for op in listed:
        if not op.outputs:
            continue
        chosen = BACKEND.get(op.kind, "ane")
        remark = ', ValidationMessage = dict<string, string>({{"ane", "Unsupported \\"axis\\""}})'
        lines.append(
            f"            tensor<fp16, [1, 64, 1, 1]> {op.outputs[0].name} = {op.kind}(x = x)"
            f'[EstimatedRuntime = dict<string, fp64>({{{{"ane", 1.5e-06}}, {{"{chosen}", 2e-06}}}})'
            f'{remark if chosen != "ane" else ""}, SelectedBackend = string("{chosen}"), '
            f'name = string("{op.name}")];'
        )
    return "\n".join([*lines, "    } -> (y);", "}"])


def test_analytics_of_the_compiler(bundle: Bundle, tmp_path: Path) -> None:
    shard = bundle.plan.shards[0].name
    path = tmp_path / "analytics.mil"
    listed = ops(bundle, shard)
    path.write_text(analytics(listed))
    made = import_xcode(path, bundle.path, DAY)
    assert made.package == shard
    places = {op.kind: op.measured for f in made.audit.functions for op in f.ops}
    assert (places["softmax"], places["matmul"], places["conv"]) == ("CPU", "CPU", "ANE")
    softmax = sum(op.kind == "softmax" for op in listed)
    assert made.told.refusals['softmax: Unsupported "axis"'] == softmax


def test_the_compilers_estimate_is_of_the_chosen_backends(bundle: Bundle, tmp_path: Path) -> None:
    """By hand: 2 us on another backend; on the ANE its last figure, 2 us as well."""
    path = tmp_path / "analytics.mil"
    listed = [op for op in ops(bundle, bundle.plan.shards[0].name) if op.outputs]
    path.write_text(analytics(listed))
    told = import_xcode(path, bundle.path, DAY).told
    assert told.estimated_ms == {"decode": pytest.approx(2e-3 * len(listed))}


@pytest.mark.parametrize("figure", ["nan", "inf", "-1", "0x1p99999", "fast"])
def test_estimates_that_are_no_times(bundle: Bundle, tmp_path: Path, figure: str) -> None:
    path = tmp_path / "analytics.mil"
    path.write_text(analytics(ops(bundle, bundle.plan.shards[0].name)).replace("2e-06", figure)
                    .replace("1.5e-06", figure))  # fmt: skip
    assert import_xcode(path, bundle.path, DAY).told.estimated_ms == {}


@pytest.mark.parametrize("text", ["", "program(1.3)\n{\n}", "x" * 5000, "\0", "func a<b>(" * 999])
def test_other_texts_are_refused(bundle: Bundle, tmp_path: Path, text: str) -> None:
    path = tmp_path / "analytics.mil"
    path.write_text(text)
    with pytest.raises(CetaneError, match=r"not Core ML's analytics.mil"):
        import_xcode(path, bundle.path, DAY)


CHOSEN = 'SelectedBackend = string("ane")'
BEGUN = f"tensor<fp16, [1]> y = conv(x = x)[{CHOSEN}, "
HOSTILE = {
    "messages": BEGUN + "ValidationMessage = dict<string, string>({{" * 20_000,
    "times": BEGUN + "EstimatedRuntime = dict<string, fp64>({{" * 20_000,
    "results": "\n".join([("a" * 300 + "> ") * 7 + "!" * 8000 + CHOSEN] * 40),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_lines_are_read_in_linear_time(tmp_path: Path, what: str) -> None:
    path = tmp_path / "analytics.mil"
    path.write_text(f"{HOSTILE[what]}\n{BEGUN}")
    begun = time.process_time()
    read_analytics(path)
    assert time.process_time() - begun < 0.5


def test_an_op_of_several_results_has_the_name_of_the_first(tmp_path: Path) -> None:
    """So do the ops of a program, to which these are matched."""
    path = tmp_path / "analytics.mil"
    path.write_text(f"tensor<fp16, [1]> a, tensor<fp16, [1]> b = split(x = x)[{CHOSEN}];")
    (op,) = read_analytics(path).functions["main"]
    assert (op.output, op.kind, op.device) == ("a", "split", "ANE")


def test_a_package_that_is_not_there_is_named(bundle: Bundle, tmp_path: Path) -> None:
    path = tmp_path / "analytics.mil"
    text = analytics(ops(bundle, bundle.plan.shards[0].name))
    path.write_text(text.replace("> ", "> of_another_"))
    with pytest.raises(CetaneError, match="not those of any package here"):
        import_xcode(path, bundle.path, DAY)


@pytest.mark.parametrize(
    ("others", "reason"),
    [
        ({"deviceResults": None}, "deviceResults"),
        ({"deviceResults": {"predict": {"samples": [-1.0]}}}, "samples"),
        ({"deviceResults": {"predict": {"samples": ["fast"]}}}, "samples"),
        ({"deviceResults": {}}, "not those of any package"),
    ],
)
def test_other_reports_are_refused(
    bundle: Bundle, report: Callable[..., Path], others: dict[str, Any], reason: str
) -> None:
    with pytest.raises(CetaneError, match=reason):
        import_xcode(report(bundle.plan.shards[0].name, **others), bundle.path, DAY)


def test_a_report_with_a_key_twice_is_refused(bundle: Bundle, report: Callable[..., Path]) -> None:
    folder = report(bundle.plan.shards[0].name)
    text = (folder / "report.json").read_text()
    (folder / "report.json").write_text('{"computeUnit": 0, ' + text.lstrip()[1:])
    with pytest.raises(CetaneError, match="a name appears twice"):
        import_xcode(folder, bundle.path, DAY)


def test_a_folder_that_xcode_did_not_write(bundle: Bundle, tmp_path: Path) -> None:
    with pytest.raises(CetaneError, match=r"no report\.json, so not an \.mlperf folder"):
        import_xcode(tmp_path, bundle.path, DAY)


def test_a_report_that_is_a_link_is_refused(bundle: Bundle, tmp_path: Path) -> None:
    folder = tmp_path / "x.mlperf"
    folder.mkdir()
    (folder / "report.json").symlink_to("/etc/passwd")
    with pytest.raises(CetaneError, match="link"):
        import_xcode(folder, bundle.path, DAY)
