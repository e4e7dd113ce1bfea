"""The workloads of experiments: models by name, texts and prompts."""

import pkgutil
import pydoc
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from cetane.bundle import Bundle
from cetane.checkpoint import Checkpoint, open_checkpoint
from cetane.errors import CetaneError
from cetane.files import replacing, sha256
from cetane.gates.probes import asked
from cetane.gates.quality import read_tokens
from cetane.lab.experiment import Experiment, InputName, Workload
from cetane.lab.models import gemma_tiny, smollm2, zaya_tiny
from cetane.lab.synthetic import Shapes, write_gemma4
from cetane.planner import ModelSource
from cetane.prompts import suite
from cetane.sweeps.smoke import load_prompts
from cetane.validation import guess

MODULES = ("argparse", "collections", "datetime", "functools", "itertools", "json", "logging")
"""Modules of the standard library, whose documentation is a text that every Python has."""
MODELS = ("zaya-tiny", "gemma-tiny", "smollm2", "gemma4-synthetic")
"""The models that need no path."""


@dataclass(frozen=True)
class Setting:
    """The folder of a lab's work, and the models that the user gave by path."""

    folder: Path
    """Holds bundles, named by their content, synthetic models and texts."""
    models: dict[str, Path]
    """Paths, by the names in workloads."""

    def checkpoint(self, workload: Workload) -> Checkpoint:
        """The model of a workload. Raises CetaneError with the command that gets it."""
        return open_checkpoint(self.model(workload.model))

    def model(self, name: str) -> Path:
        """The path of a model."""
        if name in self.models:
            return self.models[name]
        where = f"--where {name}=PATH"
        match name:
            case "zaya-tiny":
                return zaya_tiny()
            case "gemma-tiny":
                return gemma_tiny()
            case "smollm2":
                try:
                    return smollm2()
                except CetaneError as error:
                    hint = f"{error.hint}; or name another place: {where}"
                    raise CetaneError(error.message, hint) from error
            case "gemma4-synthetic":
                return write_gemma4(self.folder / "models" / name, zaya_tiny())
        near = guess(name, MODELS)
        raise CetaneError(f"{name} does not come with cetane", f"{near}give its path: {where}")

    def text(self, workload: Workload) -> Path:
        """The file of a workload's text."""
        if workload.text_file is not None:
            return workload.text_file
        path = self.folder / f"stdlib-{sys.version_info.major}.{sys.version_info.minor}.txt"
        if not path.exists():
            write_documentation(path)
        return path

    def inputs(self, experiment: Experiment) -> dict[InputName, str]:
        """The hashes of the model's content and of the text of a runnable experiment.

        It leaves out those that cannot be read, which a run reports.
        """
        assert experiment.workload is not None
        found: dict[InputName, str] = {}
        with suppress(CetaneError, OSError):
            found["model"] = self.checkpoint(experiment.workload).content
        with suppress(CetaneError, OSError):
            found["text"] = sha256(self.text(experiment.workload))
        return found


def write_documentation(path: Path) -> None:
    """Write the documentation of Python's standard library as plain text.

    It is the same on every machine with the same Python.
    """
    known = {module.name for module in pkgutil.iter_modules()} | set(sys.builtin_module_names)
    text = "\n".join(pydoc.plain(pydoc.render_doc(name)) for name in MODULES if name in known)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@dataclass(frozen=True)
class OpenWorkload:
    """A workload with its checkpoint, for both arms."""

    setting: Setting
    spec: Workload
    checkpoint: Checkpoint

    @cached_property
    def real(self) -> ModelSource:
        """The model whose speed is predicted."""
        name = self.spec.stands_for
        return self.checkpoint if name is None else Shapes(name)

    def tokens(self, bundle: Bundle) -> list[int]:
        """The tokens of the text."""
        path = self.setting.text(self.spec)
        return read_tokens(bundle.tokenizer, path, self.spec.tokens)

    def prompts(self, bundle: Bundle) -> dict[str, list[int]]:
        """Token ids of the prompts, by name, in the model's chat form."""
        named = named_prompts(self.spec.prompts)
        return {name: asked(bundle.tokenizer, text) for name, text in named.items()}


def named_prompts(name: str) -> dict[str, str]:
    """The smoke prompts, or a category of the speculative suite."""
    if name == "smoke":
        return {prompt.id: prompt.text for prompt in load_prompts()}
    categories = suite()
    if name not in categories:
        known = ["smoke", *categories]
        raise CetaneError(f"no prompts {name!r}; {guess(name, known)}known: {', '.join(known)}")
    return {f"{name}-{index}": text for index, text in enumerate(categories[name], 1)}
