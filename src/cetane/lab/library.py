"""The lab of a user: the experiments that come with cetane, and the user's own."""

from functools import cached_property
from pathlib import Path

from cetane.errors import CetaneError
from cetane.lab.entry import Entry, entries
from cetane.lab.experiment import (
    Experiment,
    find_experiment,
    load_experiment,
    load_experiments,
    shipped,
)
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
        same = folder.is_dir() and folder.samefile(shipped())
        self.folders = [folder] if same else [shipped(), folder]

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

    def find(self, name: str) -> Experiment:
        """An experiment by id, whose recipes exist. Raises CetaneError with the alternatives."""
        known = self.files()
        if name in known:
            return find_experiment(known[name].parent, name)
        raise CetaneError(f"no experiment {name!r}; {guess(name, known)}known: {', '.join(known)}")

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
