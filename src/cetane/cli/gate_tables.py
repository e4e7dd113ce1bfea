"""Lines and tables of the gates' results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from cetane.cli.output import console, say, show_warnings, table, verdict, warn, warn_wrapped
from cetane.hardware import LARGEST_FP16

if TYPE_CHECKING:
    from cetane.gates.draft_head import DraftHeadResult
    from cetane.gates.explain import Explanation
    from cetane.gates.golden_result import GoldenResult
    from cetane.gates.verdict import Check


class CheckedGate(Protocol):
    """A gate's result with its checks."""

    @property
    def passed(self) -> bool: ...
    @property
    def checks(self) -> tuple[Check, ...]: ...


def summary(result: CheckedGate) -> str:
    """A verdict and its number of checks, or the failed checks, as rich markup."""
    failed = [check for check in result.checks if not check.passed]
    if not failed:
        return f"{verdict(result.passed)}, {len(result.checks)} checks against the model"
    listed = "; ".join(
        f"{c.name} {c.value:.5g}{c.between}, limit {c.limit:.5g}" for c in failed[:3]
    )
    more = f" and {len(failed) - 3} more" if len(failed) > 3 else ""
    return f"{verdict(result.passed)}, {listed}{more}"


def show_model(source: str, fingerprint: str) -> None:
    """Print with which model a bundle was compared: its maker may have chosen any."""
    say(f"compared with {source}, fingerprint {fingerprint[:16]}")


def show_golden(result: GoldenResult, tables: bool) -> None:
    """Print the golden gate: every check if it failed, and all figures with `tables`."""
    if tables or not result.passed:
        show_checks("golden gate", result.checks)
    if tables:
        table(
            "hidden states after each shard",
            ["shard", "tensor", "mode", "cosine", "worst token", "PSNR dB"],
            [[s.shard, s.tensor, s.mode, s.cosine, s.cosine_min, s.psnr] for s in result.shards],
        )
        widest = sorted(result.ranges, key=lambda block: -block.largest)[:5]
        table(
            f"largest residuals of the model (fp16 ends at {LARGEST_FP16:.0f})",
            ["block", "largest"],
            [[block.block, block.largest] for block in widest],
        )
    show_warnings(result.warnings)
    console.print(f"golden gate: {summary(result)}", soft_wrap=True)


def show_why(explanation: Explanation | None) -> None:
    """Print why a port was refused, and the change that mends it."""
    if explanation is None:
        return
    warn_wrapped(f"{explanation.cause}: {explanation.sentence}")
    if explanation.recipe_change:
        warn(f"in the recipe:\n{explanation.recipe_change}")


def show_head(kind: str, result: DraftHeadResult) -> None:
    """Print the golden gate of a draft head."""
    show_checks(f"golden gate of the {kind} head", result.checks)
    console.print(f"golden gate of the {kind} head: {verdict(result.passed)}")


def show_checks(title: str, checks: Sequence[Check]) -> None:
    """Print values beside their limits."""
    table(
        title,
        ["check", "value", "limit", "verdict"],
        [[c.name, f"{c.value:.5g}{c.between}", c.limit, "pass" if c.passed else "FAIL"]
         for c in checks],
    )  # fmt: skip
