"""A kit of two bundles through coremltools and cetane's bridge, with every fault.

    python benchmarks/kit_faults.py BUNDLE OTHER

Without faults first, then once for every fault in a function of the first bundle, then killed in
the middle and resumed. It prints a line for each: the exit code, the recorded faults, and what was
kept. Every child imports coremltools, which takes seconds, so the tests use a stand-in for it.
"""

import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

from cetane.pipeline.import_kit import import_kit
from cetane.pipeline.kit import make_kit

FAULTS = ("hang", "die", "nan", "refuse")
BRIDGE = "--bridge"


def bridged(arguments: list[str]) -> None:
    """Run a script with the bridge, and with the fault that the environment names."""
    from cetane import bridge
    from cetane.bridge.proxy import ModelProxy

    bridge.install()
    fault, where = os.environ.get("FAULT", ""), os.environ.get("WHERE", "-")
    predict = ModelProxy.predict

    def faulty(self: ModelProxy, data: Any, state: Any = None) -> dict[str, Any]:
        if where not in str(self._path):
            return predict(self, data, state)
        if fault == "hang":
            time.sleep(3600)
        if fault == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "refuse":
            print("Error: ANECCompile() FAILED", file=sys.stderr)
            raise RuntimeError("error code: -14")
        made = predict(self, data, state)
        return {name: value + float("nan") for name, value in made.items()}

    if fault:
        ModelProxy.predict = faulty  # type: ignore[method-assign]
    sys.argv = arguments
    sys.path[0] = str(Path(arguments[0]).resolve().parent)
    runpy.run_path(arguments[0], run_name="__main__")


def command(*arguments: str) -> list[str]:
    quick = ["--rounds", "2", "--steps", "8", "--energy", "0", "--limit", "60"]
    return [sys.executable, str(Path(__file__).resolve()), BRIDGE, "measure.py", *quick, *arguments]


def tell(name: str, code: int, kit: Path) -> None:
    """Print one line about a run."""
    content = json.loads((kit / "measurements.json").read_text())
    functions = [f for b in content["bundles"].values() for f in b["functions"].values()]
    kept = {
        "functions": len(functions),
        "predicted": sum("predict" in f for f in functions),
        "probes": sum(len(b.get("probes", {})) for b in content["bundles"].values()),
        "turns": [t["bundle"] for t in content["turns"]],
        "finished": content["finished"],
    }
    faults = [f"{f['job']} {f['kind']} {f['phase']}: {f['detail'][:70]}" for f in content["faults"]]
    print(f"{name}: exit {code}; {kept}; faults {faults}", flush=True)


def main(bundles: list[str]) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        archive = make_kit(bundles, folder / "kit.zip").path
        with zipfile.ZipFile(archive) as packed:
            packed.extractall(folder)
        fresh, kit = folder / "kit", folder / "run"
        function = json.loads((fresh / "kit.json").read_text())["bundles"]["A"]["functions"][0]
        where = f"A/{function['shard']}.mlmodelc"
        for fault in ("", *FAULTS):
            shutil.rmtree(kit, ignore_errors=True)
            shutil.copytree(fresh, kit)
            env = os.environ | ({"FAULT": fault, "WHERE": where} if fault else {})
            done = subprocess.run(command(), cwd=kit, env=env, stdout=subprocess.DEVNULL)
            tell(fault or "no fault", done.returncode, kit)
        shutil.rmtree(kit)
        shutil.copytree(fresh, kit)
        killed = subprocess.Popen(command(), cwd=kit, stdout=subprocess.DEVNULL)
        while not (kit / "measurements.json").exists() or (
            len(json.loads((kit / "measurements.json").read_text())["jobs"]) < 3
        ):
            time.sleep(0.1)
        killed.kill()
        tell("killed", killed.wait(), kit)
        done = subprocess.run(command(), cwd=kit, stdout=subprocess.DEVNULL)
        tell("resumed", done.returncode, kit)
        made = import_kit(kit / "measurements.json", bundles)
        for outcome in made.outcomes:
            print(f"import: {outcome.name}: passed {outcome.passed}, {outcome.notes}")
        print(f"the second's time over the first's: {made.ratios}")


if __name__ == "__main__":
    if sys.argv[1:2] == [BRIDGE]:
        bridged(sys.argv[2:])
    else:
        main(sys.argv[1:])
