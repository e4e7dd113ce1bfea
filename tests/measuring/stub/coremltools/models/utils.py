from pathlib import Path


def compile_model(package, destination=None):
    folder = Path(destination)
    folder.mkdir(parents=True)
    (folder / "package").write_text(package)
    return str(folder)
