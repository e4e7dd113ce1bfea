"""The lab of a user: the experiments that come with cetane, and the user's own."""

from functools import cached_property
from importlib import resources
from pathlib import Path

from cetane.errors import CetaneError
from cetane.files import read_toml
from cetane.lab.entry import Entry, entries
from cetane.lab.experiment import ARMS, Experiment, parse_experiment
from cetane.lab.journal import Journal
from cetane.validation import guess

JOURNAL = "journal.jsonl"


class Lab:
    """A folder of own experiments and their journal, on top of those that come with cetane.

    cetane's own experiments are only read. A user's experiment of the same id replaces one, with
    its runs and verdicts.
    """

    def __init__(self, folder: Path) -> None:
        """`folder` need not exist yet. Raises CetaneError for a file of that name."""
        if folder.exists() and not folder.is_dir():
            raise CetaneError(f"{folder}: not a folder", "name the folder of your experiments")
        self.folder = folder
        same = folder.is_dir() and folder.samefile(shipped_experiments())
        self.folders = [folder] if same else [shipped_experiments(), folder]

    @cached_property
    def journal(self) -> Journal:
        """Runs and verdicts. New ones go to the user's folder."""
        if len(self.folders) == 1:
            return Journal(self.folder / JOURNAL)
        replaced = {path.stem for path in self.folder.glob("*.toml")}
        return Journal(self.folder / JOURNAL, self.folders[0] / JOURNAL, replaced)

    def files(self) -> dict[str, Path]:
        """The files of all experiments, by id; some may be wrong."""
        paths = [path for folder in self.folders for path in folder.glob("*.toml")]
        return {path.stem: path for path in sorted(paths, key=lambda path: path.stem)}

    def experiments(self) -> dict[str, Experiment]:
        """All experiments, by id."""
        return {name: load_experiment(path) for name, path in self.files().items()}

    def own(self) -> dict[str, Experiment]:
        """The user's experiments; cetane's, if the user has none."""
        own = load_experiments(self.folder) if self.folder.is_dir() else {}
        return own or self.experiments()

    def logged(self) -> dict[str, Experiment]:
        """The experiments of the decision log: the user's, and those that were run or decided here;
        all, if there are none."""
        known, files = self.experiments(), self.files()
        mine = {event.experiment for event in self.journal.own()}
        mine |= {name for name, path in files.items() if path.parent == self.folder}
        return {name: one for name, one in known.items() if name in mine} or known

    def find(self, name: str) -> Experiment:
        """An experiment by id, whose recipes exist. Raises CetaneError with the nearest id."""
        known = self.files()
        if name in known:
            return load_runnable(known[name])
        raise CetaneError(
            f"no experiment {name!r}; {guess(name, known)}".rstrip("; "),
            "cetane lab list has the ids; --lab names the folder of your own",
        )

    def entry(self, name: str) -> Entry:
        """An experiment with its runs and its verdict."""
        (entry,) = entries([self.find(name)], self.journal)
        return entry

    def entries(self) -> tuple[list[Entry], list[CetaneError]]:
        """Every experiment with its runs and its verdict, and what is wrong with other files."""
        read: list[Experiment] = []
        wrong: list[CetaneError] = []
        for path in self.files().values():
            try:
                read.append(load_experiment(path))
            except CetaneError as error:
                wrong.append(error)
        return entries(read, self.journal), wrong


def shipped_experiments() -> Path:
    """The experiments that come with cetane."""
    folder = Path(str(resources.files("cetane"))) / "experiments"
    return folder if folder.is_dir() else Path(__file__).parents[3] / "experiments"


def load_experiments(folder: Path) -> dict[str, Experiment]:
    """All experiments of a folder, by id. Raises CetaneError for a wrong file or a missing
    folder."""
    if not folder.is_dir():
        raise CetaneError(f"{folder}: no such folder", "--lab FOLDER names one with experiments")
    files = sorted(folder.glob("*.toml"), key=lambda path: path.stem)
    return {path.stem: load_experiment(path) for path in files}


def load_experiment(path: Path) -> Experiment:
    """An experiment from its file. Does not look up its recipes."""
    content = read_toml(path)
    experiment = parse_experiment({"id": path.stem} | content, str(path))
    if experiment.id != path.stem:
        raise CetaneError(f"{path}: id {experiment.id!r} differs from the file's name")
    for part in (experiment.workload, experiment.baseline, experiment.candidate):
        if part is not None:
            part.beside(path)
    return experiment


def load_runnable(path: Path) -> Experiment:
    """An experiment from its file, if its recipes exist. Raises CetaneError if not."""
    experiment = load_experiment(path)
    for arm in ARMS if experiment.runnable else ():
        try:
            experiment.arm(arm).recipe_here()
            experiment.arm(arm).recipe_there()
        except CetaneError as error:
            raise CetaneError(f"{path}: {arm}: {error.message}", error.hint) from error
    return experiment
