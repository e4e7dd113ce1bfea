"""The gates of a finished bundle: it is compared with its model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cetane.bundle import Bundle
from cetane.errors import CetaneError
from cetane.files import Progress, silent
from cetane.gates.draft_head import DraftHeadResult, judge_draft_heads
from cetane.gates.explain import Explanation
from cetane.gates.golden_result import GoldenResult
from cetane.gates.layers import LayersResult, judge_layers
from cetane.gates.quality import TextQuality, read_tokens
from cetane.gates.quality import perplexity as measure_perplexity
from cetane.gates.static import PackageProblem, static_checks
from cetane.pipeline.golden_gate import judge
from cetane.pipeline.origin import checkpoint_of, with_origin
from cetane.pipeline.port_result import explanation_json
from cetane.schema.draft_head import DraftHeadKind


@dataclass(frozen=True)
class Validation:
    """The outcomes of a bundle's gates. If static checks find problems, the other gates do not
    run."""

    static: tuple[PackageProblem, ...]
    """Contradictions between the manifest and the packages and tables themselves."""
    golden: GoldenResult | None = None
    """The bundle, compared with the model."""
    explanation: Explanation | None = None
    """The cause of a red golden gate, and the remedy; None if the gate is not red."""
    heads: Mapping[DraftHeadKind, DraftHeadResult] = field(default_factory=dict)
    """Draft heads, compared with the trained modules."""

    @property
    def passed(self) -> bool:
        judged = self.golden is not None and self.golden.passed
        return judged and all(head.passed for head in self.heads.values())

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the golden gate could not judge, and whether its model is another one."""
        return () if self.golden is None else self.golden.warnings

    def as_json(self) -> dict[str, Any]:
        """The outcomes of the gates that ran, as a JSON object."""
        content: dict[str, Any] = {"passed": self.passed, "warnings": list(self.warnings)}
        if self.static:
            content["static"] = [finding.model_dump(mode="json") for finding in self.static]
        if self.golden is not None:
            content["golden"] = self.golden.model_dump(mode="json")
            content["explanation"] = explanation_json(self.explanation)
        if self.heads:
            content["heads"] = {
                kind: head.model_dump(mode="json") for kind, head in self.heads.items()
            }
        return content


def validate(
    bundle: str | Path,
    *,
    model: str | Path | None = None,
    lora: str | Path | None = None,
    adapters: Mapping[str, str | Path] | None = None,
    progress: Progress = silent,
) -> Validation:
    """Compare a bundle with its manifest and with the Hugging Face model.

    `model`, `lora` and `adapters` are new places of the checkpoint and of adapters, if they were
    moved after the build. The outcomes are kept in the bundle. CetaneError for a damaged bundle or
    a missing checkpoint.

    >>> cetane.validate(bundle).passed
    True
    """
    opened = Bundle(Path(bundle))
    findings = static_checks(opened)
    listed = [finding.model_dump() for finding in findings]
    opened.write_gate("static", {"passed": not findings, "findings": listed})
    if findings:
        return Validation(tuple(findings))
    opened.verify()  # after static checks: a wrong hash does not tell what is wrong with a file
    checkpoint = checkpoint_of(opened, model, lora, adapters)
    golden, why = judge(opened, checkpoint, progress)
    heads = judge_draft_heads(opened, progress)
    return Validation((), golden, why, heads)


def perplexity(
    bundle: str | Path,
    text: str | Path,
    *,
    tokens: int = 20_000,
    model: str | Path | None = None,
    lora: str | Path | None = None,
    adapters: Mapping[str, str | Path] | None = None,
    progress: Progress = silent,
) -> TextQuality:
    """The perplexities of a bundle and its Hugging Face model, on the first `tokens` of a text.

    `model`, `lora` and `adapters` are the new places of what was ported, as in `validate`. The
    outcome is kept in the bundle. CetaneError as `validate`, for an unreadable text, and for fewer
    than two tokens: nothing predicts the first.
    """
    if tokens < 2:
        raise CetaneError(f"tokens = {tokens}: must be at least 2", "the first token is not judged")
    text = Path(text)
    opened = Bundle(Path(bundle))
    opened.verify()
    checkpoint = checkpoint_of(opened, model, lora, adapters)
    ids = read_tokens(opened.tokenizer, text, tokens)
    quality = measure_perplexity(opened, checkpoint, ids, progress)
    quality = with_origin(quality, opened, checkpoint)
    opened.write_gate("perplexity", quality.model_dump(mode="json") | {"text": text.name})
    return quality


def validate_layers(
    bundle: str | Path,
    *,
    block: int | None = None,
    prompt_ids: Sequence[int] = (),
    probes: int = 1,
    model: str | Path | None = None,
    lora: str | Path | None = None,
    adapters: Mapping[str, str | Path] | None = None,
    progress: Progress = silent,
) -> LayersResult:
    """Compare shards with the model one by one, as the published ports' validator does.

    The shards are all that hold layers, or the one that holds the model's `block`. They run on
    `prompt_ids`, by default on `probes` random sequences. The outcome is kept in the bundle.
    `model`, `lora` and `adapters` are as in `validate`.
    CetaneError as `validate`, for a block that the model lacks, and if no id is fit for judging.
    """
    opened = Bundle(Path(bundle))
    opened.verify()
    checkpoint = checkpoint_of(opened, model, lora, adapters)
    result = judge_layers(opened, checkpoint, block, tuple(prompt_ids), probes, progress)
    result = with_origin(result, opened, checkpoint)
    opened.write_gate("layers", result.model_dump(mode="json"))
    return result
