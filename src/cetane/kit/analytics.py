"""Core ML's `analytics.mil`: MIL text in which every op has the compiler's choice of a backend.

The file lies in Core ML's cache. Beside the backend an op has estimated seconds by backend, and
reasons for refusals. Apple does not document this form. It is read here as Anemll's
`analyze_coreml_ops.py` (3a31f6b0) does.
"""

import re
from collections import Counter, defaultdict
from pathlib import Path

from cetane.errors import CetaneError
from cetane.files import read_text
from cetane.gates.residency.measured import Device, MeasuredOp
from cetane.kit.measurements import one_line
from cetane.kit.package_report import NO_MACHINE, NO_SYSTEM, PackageReport

BACKENDS: dict[str, Device] = {
    "ane": "ANE", "bnns": "CPU", "classic_cpu": "CPU", "mps_graph": "GPU",
}  # fmt: skip
FUNCTION = re.compile(r"^\s*func\s+([\w.@-]{1,255})\s*<")
NAME = re.compile(r">\s+([\w.@/-]{1,1000})")
KIND = re.compile(r"\w{1,100}")
BACKEND = re.compile(r'SelectedBackend = string\("(\w{1,40})"\)')
RUNTIME = re.compile(r'"(\w{1,40})", ([0-9a-fA-FxXpP.+-]{1,40})')
MESSAGE = re.compile(r'"(\w{1,40})", "((?:[^"\\]|\\.){1,1000})"')
LONGEST_LINE = 1 << 20
"""Characters of the longest line that is searched."""


def read_analytics(path: Path) -> PackageReport:
    """An `analytics.mil`. Raises CetaneError for a file without a chosen backend."""
    functions: dict[str, list[MeasuredOp]] = {}
    estimated: dict[str, float] = defaultdict(float)
    reasons: Counter[str] = Counter()
    name = "main"
    for line in read_text(path).splitlines():
        if len(line) > LONGEST_LINE:
            raise CetaneError(f"{path}: a line of {len(line):,} characters, which no op has")
        if begun := FUNCTION.match(line):
            name = begun[1]
            continue
        op = op_of(line)
        if op is None:
            continue
        functions.setdefault(name, []).append(op)
        if op.cost is not None:
            estimated[name] += 1e3 * op.cost
        if (reason := messages(line).get("ane")) is not None:
            reasons[f"{op.kind}: {reason}"] += 1
    if not functions:
        raise CetaneError(
            f"{path}: no op with a SelectedBackend, so not Core ML's analytics.mil",
            "it lies in com.apple.e5rt.e5bundlecache, under ~/Library/Caches",
        )
    return PackageReport(
        machine=NO_MACHINE,
        system=NO_SYSTEM,
        compute_units="CPU_AND_NE",
        functions={name: tuple(ops) for name, ops in functions.items()},
        estimated_ms=dict(estimated),
        refusals=dict(reasons.most_common(20)),
    )


def op_of(line: str) -> MeasuredOp | None:
    """The op of a line, with the estimated seconds at its chosen backend; None for a line without
    an op that has one."""
    backend = BACKEND.search(line)
    results, _, kind = line.partition("(")[0].strip().rpartition(" = ")
    if backend is None or not KIND.fullmatch(kind):
        return None
    first, chosen = NAME.search(results), backend[1]
    return MeasuredOp(
        output=first[1] if first else "",
        kind=kind,
        device=BACKENDS.get(chosen),
        cost=runtimes(line).get(chosen),
    )


def entries(line: str, remark: str) -> str:
    """The entries of a dictionary among an op's remarks, as text; empty if it has none.

    A hostile line may begin one again and again, and a regular expression would seek the end of
    each.
    """
    found, end, _ = line.partition(f"{remark}({{{{")[2].partition("}})")
    return found if end else ""


def runtimes(line: str) -> dict[str, float]:
    """Estimated seconds by backend, in decimal or in hexadecimal form."""
    made = {}
    for backend, text in RUNTIME.findall(entries(line, "EstimatedRuntime = dict<string, fp64>")):
        try:
            value = float.fromhex(text) if "x" in text.lower() else float(text)
        except (ValueError, OverflowError):
            continue
        if 0 <= value < 86_400:
            made[backend] = value
    return made


def messages(line: str) -> dict[str, str]:
    """Reasons against a backend, by backend."""
    found = MESSAGE.findall(entries(line, "ValidationMessage = dict<string, string>"))
    return {backend: one_line(text.replace('\\"', '"')) for backend, text in found}
