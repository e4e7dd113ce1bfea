"""Evaluations: tasks of lm-evaluation-harness on a bundle, and on its Hugging Face model."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import resources
from importlib.metadata import version
from math import isclose, sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import lm_eval.api.model
import lm_eval.api.task
import lm_eval.evaluator
from lm_eval.loggers import EvaluationTracker
from lm_eval.tasks import TaskManager

from cetane.bundle import Bundle
from cetane.checkpoint import Checkpoint
from cetane.errors import CetaneError
from cetane.evaluation.answers import KeptAnswers
from cetane.evaluation.figures import Evaluation, TaskFigure
from cetane.evaluation.models import BundleModel, ReferenceModel, TokenModel
from cetane.files import Progress, cache_dir, disk_errors, silent
from cetane.gates.quality import refuse_choices
from cetane.gates.reference import reference_of
from cetane.lower.patches import patched
from cetane.pipeline.origin import checkpoint_of, other_checkpoint
from cetane.tasks.task import task_key
from cetane.validation import guess

GATE = "evaluation"
WITHOUT_NETWORK = ("cetane_cloze", "cetane_choice")
"""cetane's own tasks: their data ships."""
OWN_TASKS = Path(str(resources.files("cetane"))) / "data" / "tasks"


def evaluate(
    bundle: str | Path,
    tasks: Sequence[str],
    *,
    limit: int | None = None,
    fewshot: int | None = None,
    chat: bool = False,
    against_reference: bool = False,
    model: str | Path | None = None,
    adapter: str | None = None,
    backend: str = "auto",
    include: str | Path | None = None,
    output: str | Path | None = None,
    progress: Progress = silent,
) -> Evaluation:
    """Run tasks of lm-evaluation-harness on a bundle.

    - `limit`: the number of each task's samples that are used, from its first; `fewshot`: the
      number of examples before each sample.
    - `chat`: requests are turns of a conversation, by the model's template.
    - `against_reference`: the Hugging Face model answers the same requests. `model` is the
      checkpoint's new place, if it has moved since the build.
    - `adapter`: one of the bundle's adapters, for all requests. Its reference is the model with the
      adapter merged.
    - `include`: a folder with more tasks as YAML. `output`: results as the harness writes them.

    Answers are kept in the cache folder, so a run that was stopped goes on. The figures are kept in
    the bundle. Raises CetaneError for an unknown task or adapter, a damaged bundle, or a bundle
    whose head gives choices.
    """
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    opened = Bundle(Path(bundle))
    opened.verify()
    opened.plan.on(adapter)  # refuses before anything is opened
    refuse_choices(opened)
    manager, folder = task_manager(include, tasks, progress), result_folder(output)
    settings = {"limit": limit, "num_fewshot": fewshot, "apply_chat_template": chat}
    checkpoint = checkpoint_of(opened, model) if against_reference else None
    answers = kept_answers(["onnxruntime"], opened.digest, backend, adapter)
    own = BundleModel(opened, backend, answers, progress, adapter)
    # The harness names its folder by this, which is the server's name of the same model.
    name = opened.path.resolve().name + ("" if adapter is None else f":{adapter}")
    ours = run(own, tasks, manager, settings | {"model_args": {"model": name}}, folder)
    theirs, truth = None, None
    if checkpoint is not None:
        truth = reference_model(checkpoint, own, adapter, progress)
        theirs = run(truth, tasks, manager, settings, None)
    warnings = warnings_of(own, opened, checkpoint)
    result = Evaluation(
        figures=tuple(figures(ours, theirs)), limit=limit, fewshot=fewshot, chat=chat,
        adapter=adapter,
        source=None if checkpoint is None else checkpoint.source,
        fingerprint=None if checkpoint is None else checkpoint.fingerprint,
        nats=None if truth is None else distance(own, truth),
        greedy=None if truth is None else agreement(own, truth),
        warnings=tuple(warnings),
    )  # fmt: skip
    gate = GATE if adapter is None else f"{GATE}-{adapter}"
    if not opened.write_gate(gate, result.model_dump(mode="json")):
        result = result.model_copy(update={"warnings": (*warnings, "the bundle is read-only")})
    return result


def reference_model(
    checkpoint: Checkpoint, own: BundleModel, adapter: str | None, progress: Progress
) -> ReferenceModel:
    """The Hugging Face model that gets the same requests as the bundle."""
    answers = kept_answers(["transformers", "torch"], checkpoint.fingerprint, adapter)
    reference = reference_of(checkpoint, adapter)
    return ReferenceModel(reference, own.own_tokenizer, own.max_length, answers, progress)


def warnings_of(own: BundleModel, bundle: Bundle, checkpoint: Checkpoint | None) -> list[str]:
    """Warnings of a reference that the bundle was not built from, and of changed requests."""
    warnings = [] if checkpoint is None else other_checkpoint(bundle, checkpoint)
    if own.shortened:
        text = "answers had less room in the context than their task wanted"
        warnings.append(f"{own.shortened} {text}")
    if own.without_system:
        text = "prompts lack their system message, which the model's chat template refuses"
        warnings.append(f"{own.without_system} {text}")
    return warnings


def kept_answers(packages: Sequence[str], *parts: str | None) -> KeptAnswers:
    """The kept answers of the model that `parts` name, as this code and the installed versions of
    `packages` compute them."""
    versions = {package: version(package) for package in packages}
    key = task_key("evaluation", versions, parts)
    return KeptAnswers(cache_dir() / "evaluations" / key[:32])


def task_manager(
    include: str | Path | None, tasks: Sequence[str], progress: Progress
) -> TaskManager:
    """The known tasks: the harness's, cetane's own, and those of the folder `include`.

    Raises CetaneError for an unknown task, and for a folder that is not there."""
    if include is not None and not Path(include).is_dir():
        raise CetaneError(f"{include}: no such folder", "tasks as YAML lie in it")
    if not tasks:
        raise CetaneError("no task to run", f"name some: --tasks {','.join(WITHOUT_NETWORK)}")
    paths = [str(OWN_TASKS), *([str(include)] if include is not None else [])]
    manager = TaskManager(include_path=paths, include_defaults=False)
    if not set(tasks) <= set(manager.all_tasks):
        progress("the harness's index of tasks", 0, 1)  # which takes seconds
        manager = TaskManager(include_path=paths)
    for task in tasks:
        if task not in manager.all_tasks:
            raise CetaneError(
                f"no task {task!r}; {guess(task, manager.all_tasks)}".rstrip("; "),
                "lm_eval ls tasks lists those of the harness",
            )
    return manager


def result_folder(output: str | Path | None) -> Path | None:
    """The folder for results, made before any work. Raises CetaneError if it cannot be one."""
    if output is None:
        return None
    folder = Path(output)
    if folder.suffix == ".json":  # the harness would write beside it
        raise CetaneError(f"{folder}: results are several files", "name a folder")
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def run(
    model: TokenModel,
    tasks: Sequence[str],
    manager: TaskManager,
    settings: Mapping[str, Any],
    folder: Path | None,
) -> dict[str, Any]:
    """The harness's results for a model, also written to a folder, if any, as the harness does.

    Raises CetaneError if the harness fails, or cannot write."""
    tracker = None if folder is None else EvaluationTracker(output_path=str(folder))
    try:
        with quiet():
            results = lm_eval.evaluator.simple_evaluate(
                model=model, tasks=list(tasks), task_manager=manager, log_samples=True,
                bootstrap_iters=0, evaluation_tracker=tracker, verbosity="ERROR", **settings,
            )  # fmt: skip
    except CetaneError:
        raise
    except ConnectionError as error:  # so says `datasets`
        raise CetaneError(
            f"the data of a task is out of reach: {error}",
            f"check the network, or take tasks that need none: {','.join(WITHOUT_NETWORK)}",
        ) from error
    except Exception as error:  # tasks are foreign code
        raise CetaneError(f"the harness failed: {type(error).__name__}: {error}") from error
    finally:
        model.answers.save()
    content: dict[str, Any] = dict(results)
    if tracker is not None and folder is not None:
        samples, before = content["samples"], result_files(folder)
        plain = {key: value for key, value in content.items() if key != "samples"}
        tracker.save_results_aggregated(results=plain, samples=samples)
        for task, rows in samples.items():
            tracker.save_results_samples(task_name=task, samples=rows)
        # the tracker is silent about its errors
        if len(result_files(folder) - before) < 1 + len(samples):
            raise CetaneError(
                f"{folder}: the harness could not write all of its results there",
                "see that the folder is writable and its disk has room",
            )
    return content


@contextmanager
def quiet() -> Iterator[None]:
    """A context in which the harness draws no bars, and asks git for no hash. The current folder's
    hash says nothing of a bundle, and git complains where there is no repository."""

    def undrawn(iterable: Any, *_: Any, **__: Any) -> Any:
        return iterable

    patches = [
        (lm_eval.api.model, "tqdm", undrawn), (lm_eval.api.task, "tqdm", undrawn),
        (lm_eval.evaluator, "get_git_commit_hash", lambda: None),
    ]  # fmt: skip
    with patched([one for one in patches if one[1] in vars(one[0])]):  # not in every version
        yield


def result_files(folder: Path) -> set[Path]:
    """The files of results and samples in a folder."""
    return {*folder.rglob("results_*.json"), *folder.rglob("samples_*.jsonl")}


def figures(ours: Mapping[str, Any], theirs: Mapping[str, Any] | None) -> list[TaskFigure]:
    """All metrics of all tasks, with their distance from the reference."""
    rows = []
    for task, values in ours["results"].items():
        for key, value in values.items():
            metric, _, filtered = key.partition(",")
            if not filtered or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            own = by_sample(ours, task, key, float(value))
            row = TaskFigure(
                task=task, metric=metric if filtered == "none" else key,
                samples=len(samples_of(ours, task, filtered)), value=float(value),
                error=error_of(own),
            )  # fmt: skip
            if theirs is not None:
                other = float(theirs["results"][task][key])
                pairs = zip(own, by_sample(theirs, task, key, other), strict=False)
                row = row.model_copy(update={
                    "reference": other, "difference": row.value - other,
                    "difference_error": error_of([one - two for one, two in pairs]),
                })  # fmt: skip
            rows.append(row)
    return rows


def samples_of(results: Mapping[str, Any], task: str, filtered: str) -> list[Mapping[str, Any]]:
    """The samples of a task, or of all tasks of a group, from one of the harness's filters."""
    own = [one for one in results["samples"].get(task, ()) if one["filter"] == filtered]
    inner = results["group_subtasks"].get(task, ())
    return own + [one for name in inner for one in samples_of(results, name, filtered)]


def by_sample(results: Mapping[str, Any], task: str, key: str, value: float) -> list[float]:
    """A metric of each sample, by the harness's name "METRIC,FILTER". Empty if the task's `value`
    is not the samples' mean, such as a perplexity."""
    metric, _, filtered = key.partition(",")
    numbers = [sample.get(metric) for sample in samples_of(results, task, filtered)]
    values = [float(number) for number in numbers if isinstance(number, int | float)]
    is_mean = len(values) == len(numbers) > 0 and isclose(fmean(values), value, abs_tol=1e-9)
    return values if is_mean else []


def error_of(values: Sequence[float]) -> float | None:
    """The standard error of a mean; None for fewer than two values."""
    return stdev(values) / sqrt(len(values)) if len(values) > 1 else None


def distance(own: TokenModel, truth: TokenModel) -> float | None:
    """The mean distance of both models' log likelihoods, in nats a token, over the continuations
    that both have scored; None for none."""
    shared = own.scored.keys() & truth.scored.keys()
    tokens = sum(own.scored[key][1] for key in shared)
    far = sum(abs(own.scored[key][0] - truth.scored[key][0]) for key in shared)
    return far / tokens if tokens else None


def agreement(own: TokenModel, truth: TokenModel) -> float | None:
    """The share of continuations that are greedy for both models or for neither; None for none."""
    shared = [*(own.scored.keys() & truth.scored.keys())]
    same = [own.answers.known[key][1] == truth.answers.known[key][1] for key in shared]
    return sum(same) / len(same) if same else None
