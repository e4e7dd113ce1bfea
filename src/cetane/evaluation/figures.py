"""Figures of an evaluation: what a task measured, and how far it is from the reference."""

from cetane.validation import Data


class TaskFigure(Data):
    """One metric of one task."""

    task: str
    metric: str
    """Its name in the harness: with the filter of answers after a comma, if there is one."""
    samples: int
    """The number of samples."""
    value: float
    error: float | None = None
    """The standard error of the value; None if it is not a mean over samples."""
    reference: float | None = None
    """The value of the Hugging Face model on the same requests."""
    difference: float | None = None
    """`value` less `reference`."""
    difference_error: float | None = None
    """The standard error of the difference, from the same samples on both sides."""


class Evaluation(Data):
    """The figures of an evaluation, and how it was made."""

    figures: tuple[TaskFigure, ...]
    limit: int | None
    fewshot: int | None
    chat: bool
    adapter: str | None = None
    """The adapter that answered; None for the base alone."""
    source: str | None = None
    """The reference's path, URL or hub id; None without one, and in older results."""
    fingerprint: str | None = None
    """The fingerprint of its checkpoint."""
    nats: float | None = None
    """The mean distance of log likelihoods from the reference's, in nats a token."""
    greedy: float | None = None
    """The share of continuations that are greedy for both models or for neither."""
    warnings: tuple[str, ...] = ()
