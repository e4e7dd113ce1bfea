"""Call times of a bundle by the cost model: predicted, never measured."""

import shlex
from pathlib import Path

from cetane.bundle import Bundle
from cetane.errors import CetaneError
from cetane.hardware.chips import DEFAULT_CHIP, Chip
from cetane.perf.combinations import CONTEXTS
from cetane.perf.cost import TERM_OF
from cetane.perf.predict import Prediction, Predictor
from cetane.pipeline.origin import checkpoint_of
from cetane.planner import Planner
from cetane.report.content.page import Absent
from cetane.report.content.speed import CallTime, CallTimes


def call_times(bundle: Bundle, chip: Chip, model: str | None) -> CallTimes | Absent:
    """Milliseconds by the cost model, which needs the checkpoint's shapes.

    A hub id is downloaded only if the user gives it. CetaneError if the given model is not the
    bundle's.
    """
    source = bundle.manifest.source
    path, page = str(bundle.path), f"{bundle.path.resolve().name}.html"
    again = f"cetane report {shlex.quote(path)} -o {shlex.quote(page)}"
    elsewhere = f"{again} --chip {chip.id} --model CHECKPOINT"
    if not chip.stream:
        return Absent(
            why=f"Nothing is predicted: {chip.no_speed}.",
            command=f"{again} --chip {DEFAULT_CHIP}",
        )
    if model is None and not Path(source).exists():
        return Absent(
            why=f"The checkpoint {source} is not on this machine, and predictions need its shapes.",
            command=elsewhere,
        )
    try:
        checkpoint = checkpoint_of(bundle, model)
    except CetaneError as error:
        if model is not None:
            raise
        return Absent(why=f"Nothing is predicted: {error.message}.", command=elsewhere)
    return predicted(Planner(checkpoint, bundle.plan.recipe), chip)


def predicted(planner: Planner, chip: Chip) -> CallTimes:
    """The times of every mode at the context, and of decoding at others."""
    predictor = Predictor(chip)
    flexible = planner.recipe.tokens.shapes == "range"  # the ANE runs only the default shape
    modes = [
        call_time(predictor.predict(planner, mode))
        for mode, tokens in planner.recipe.tokens.by_mode().items()
        if not (flexible and tokens > 1)
    ]
    contexts = sorted({planner.recipe.cache.context, *CONTEXTS})
    errors = predictor.fit.errors
    return CallTimes(
        chip=chip.name,
        longest=max(one.high or one.ms for one in modes),
        terms=tuple(dict.fromkeys(TERM_OF.values())),
        modes=tuple(modes),
        contexts=tuple(
            call_time(predictor.predict(planner, "decode", context))
            for context in contexts
            if context <= planner.model.max_context
        ),
        within=errors.share if chip.devices else None,
        steps=errors.rows,
        median=errors.median if chip.devices else None,
    )


def call_time(prediction: Prediction) -> CallTime:
    return CallTime(
        mode=prediction.mode,
        tokens=prediction.tokens,
        context=prediction.context,
        ms=prediction.ms,
        low=prediction.low,
        high=prediction.high,
        tok_s=prediction.tok_s,
        binds=prediction.binds,
        terms={term: ms for term, ms in prediction.terms.items() if ms > 0},
    )
