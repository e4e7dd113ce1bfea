"""Kill a port at random points and run it again: the bundle must equal an undisturbed one."""

import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from cetane.bundle import Bundle
from common import WORK, arguments, report


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--recipe", default="int8")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    whole, killed = WORK / "undisturbed", WORK / "killed"
    for path in (whole, killed):
        for folder in (path, path.with_name(path.name + ".partial")):
            shutil.rmtree(folder, ignore_errors=True)
    WORK.mkdir(parents=True, exist_ok=True)

    def command(target: Path) -> list[str]:
        script = "from cetane.cli import main; main()"
        return [sys.executable, "-c", script, "port", options.model, "-r", options.recipe,
                "-o", str(target)]  # fmt: skip

    started = time.perf_counter()
    subprocess.run(command(whole), check=True, stdout=subprocess.DEVNULL)
    undisturbed = time.perf_counter() - started
    random.seed(options.seed)
    rows = []
    for attempt in range(options.kills):
        # Short enough that the work of earlier attempts never lets one come to its end.
        delay = random.uniform(5, undisturbed / (options.kills + 1))
        process = subprocess.Popen(command(killed), stdout=subprocess.DEVNULL)
        try:
            process.wait(delay)
            rows.append([attempt, f"{delay:.1f}", f"ended by itself with {process.returncode}"])
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            rows.append([attempt, f"{delay:.1f}", "killed"])
    subprocess.run(command(killed), check=True, stdout=subprocess.DEVNULL)
    equal = Bundle(whole).digest == Bundle(killed).digest
    Bundle(killed).verify()
    kills = sum(row[-1] == "killed" for row in rows)
    result = {"equal": equal, "seconds_undisturbed": undisturbed, "kills": kills}
    rows.append(["-", "-", "manifests equal" if equal else "MANIFESTS DIFFER"])
    report("kill and resume", ["attempt", "after s", "what"], rows, result, options.json)
    sys.exit(0 if equal else 1)


if __name__ == "__main__":
    main()
