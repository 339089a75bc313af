"""`make fuzz`: odd inputs of every kind, 10,000 of each, and what became of them in results/fuzz.json.

python -m fuzz --jobs 2
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ALL_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path

INPUTS = 10_000
ROOT = Path(__file__).parents[2]
OFFLINE = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


def fuzz(count: int, seed: int, jobs: int, out: Path, only: list[str] | None) -> None:
    """Run all targets, or `only` some, each in a process of its own. Their counts replace those in the file `out`."""
    from fuzz.raw import RAW
    from fuzz.targets import TARGETS
    from logpast.util.environment import describe, pick_device, revision
    from logpast.util.files import atomic_write
    from logpast.util.serialization import to_json

    names, started = only or [*TARGETS, *RAW], time.monotonic()
    about = {"revision": revision(), "hardware": describe(pick_device("cpu")), "inputs_per_target": count, "seed": seed}
    tool = ("hypothesis", "atheris")
    before = json.loads(out.read_text()) if only and out.exists() else {"targets": {}}
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        homes = {name: Path(folder, name.replace(", ", "-").replace(" ", "-")) for name in names}
        with ThreadPoolExecutor(jobs) as pool:
            running = [pool.submit(_run, name, name in RAW, count, seed, homes[name]) for name in names]
            while not all(future.done() for future in running):
                wait(running, timeout=30, return_when=ALL_COMPLETED)
                found = {
                    name: {"tool": tool[name in RAW], "revision": about["revision"], **_counts(home)}
                    for name, home in homes.items()
                    if _counts(home)
                }
                # now and again: an interrupted run has written what it did
                atomic_write(out, to_json(about | before | {"targets": before["targets"] | found}) + "\n")
                inputs = ", ".join(f"{name} {each['inputs']:,}" for name, each in found.items())
                print(f"{time.monotonic() - started:,.0f} s: {inputs}", flush=True)
    if failed := [future.result() for future in running if future.result()]:
        sys.exit(f"failed: {', '.join(filter(None, failed))}")


def _run(name: str, raw: bool, count: int, seed: int, home: Path) -> str | None:
    """One target in a process; its output is shown, and its name returned, if it fails."""
    home.mkdir()
    words = ["fuzz.guided"] if raw else ["fuzz", "--one"]
    environment = os.environ | OFFLINE | {"LOGPAST_CACHE": str(home / "cache"), "TMPDIR": str(home)}
    command = [sys.executable, "-m", *words, name, str(count), str(seed), str(home / "counts.json")]
    with (home / "output.txt").open("w") as output:
        status = subprocess.run(command, env=environment, stdout=output, stderr=subprocess.STDOUT).returncode
    if status == 0 and _counts(home).get("inputs", 0) >= count:
        return None
    print((home / "output.txt").read_text(errors="replace")[-6000:])
    print(f"{name} failed after {_counts(home).get('inputs', 0):,} inputs", flush=True)
    return name


def _counts(home: Path) -> dict[str, float]:
    """What a target has reported so far."""
    file = home / "counts.json"
    return dict(json.loads(file.read_text())) if file.exists() else {}


def one(name: str, count: int, seed: int, file: Path) -> None:
    """One target of hypothesis, in this process."""
    import torch

    from fuzz.harness import Counts, run
    from fuzz.targets import TARGETS
    from logpast.util.files import atomic_write

    torch.set_num_threads(1)
    sys.dont_write_bytecode = True
    home = file.parent / "home"
    home.mkdir()
    os.chdir(home)

    def report(counts: Counts) -> None:
        if counts.inputs % 100 == 0:
            atomic_write(file, json.dumps(counts.to_dict()))

    atomic_write(file, json.dumps(run(TARGETS[name](home), count, seed, report).to_dict()))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        one(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]))
    else:
        parser = argparse.ArgumentParser(description=__doc__)
        parser.add_argument("--inputs", type=int, default=INPUTS, help="for each target")
        parser.add_argument("--seed", type=int, default=0)
        parser.add_argument("--jobs", type=int, default=os.cpu_count())
        parser.add_argument("--out", type=Path, default=ROOT / "results" / "fuzz.json")
        parser.add_argument("--only", nargs="+", help="these targets; the others in the file stay")
        given = parser.parse_args()
        fuzz(given.inputs, given.seed, given.jobs, given.out, given.only)
