"""Enough for a package of one function."""

from types import SimpleNamespace


class Model:
    mlProgram = SimpleNamespace(functions={"main": None})

    def ParseFromString(self, data):
        pass
