"""Where a sweep's cells are worked on: in processes of this machine, or on a Ray cluster. Both give futures of rows."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import torch

from logpast.sweeps.cell import work
from logpast.util.errors import UserError

Job = dict[str, Any]  # what cell.work takes
Row = dict[str, Any]
COMMAND = [sys.executable, "-m", "logpast.sweeps.cell"]  # a cell's own process
ANSWER = 5.0  # seconds that a Ray cluster has to answer
RETRIES = 3  # how often Ray starts a cell again whose process or machine was lost; it goes on from its checkpoint


class Runner(Protocol):
    """What a sweep asks of the place where its cells run."""

    @property
    def width(self) -> int:
        """How many cells may be started at a time."""

    @property
    def places(self) -> int:
        """How many of them are worked on at a time; others wait."""

    def start(self, job: Job) -> Future[Row]: ...

    def stop(self) -> None:
        """Tell all cells under way to save and stop."""

    def close(self) -> None:
        """End what still runs."""

    def reason(self, error: BaseException) -> str:
        """Why a cell failed, in a line."""


class Processes:
    """A process for each cell, on a GPU of its own where there are any, or on a fair share of the cores."""

    def __init__(self, jobs: int | None) -> None:
        gpus = _visible_gpus()
        self.width = self.places = jobs or max(1, len(gpus))
        self.free = [_surroundings(gpus, place, self.width) for place in range(self.width)]
        self.threads = ThreadPoolExecutor(self.width)
        self.running: set[subprocess.Popen[bytes]] = set()

    def start(self, job: Job) -> Future[Row]:
        place, log = self.free.pop(0), Path(job["log"])
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as errors:
            process = subprocess.Popen(
                COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=os.environ | place,
                start_new_session=True,  # Ctrl-C is for us: we tell the cells
            )  # fmt: skip
        self.running.add(process)
        return self.threads.submit(self._see_through, process, job, place)

    def _see_through(self, process: subprocess.Popen[bytes], job: Job, place: dict[str, str]) -> Row:
        assert process.stdin
        assert process.stdout
        with process:  # its standard input stays open until it ends: that is how it knows that we live
            with suppress(BrokenPipeError):
                process.stdin.write(json.dumps(job).encode() + b"\n")
                process.stdin.flush()
            told = process.stdout.read()
            code = process.wait()
            with suppress(BrokenPipeError):  # what it ended too soon to read would be written again
                process.stdin.close()
        self.running.discard(process)
        self.free.append(place)
        if code == 0:
            row: Row = json.loads(told)
            return row
        if code < 0:
            hint = " (out of memory?)" if -code == signal.SIGKILL else ""
            raise RuntimeError(f"its process was ended by {signal.Signals(-code).name}{hint}")
        raise RuntimeError(_last_line(Path(job["log"])) or f"its process ended with code {code}")

    def stop(self) -> None:
        for process in list(self.running):
            process.terminate()

    def close(self) -> None:
        for process in list(self.running):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        self.threads.shutdown()

    def reason(self, error: BaseException) -> str:
        return str(error)


def _visible_gpus() -> list[str]:
    """As CUDA_VISIBLE_DEVICES names them."""
    told = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = told.split(",") if told else [str(number) for number in range(torch.cuda.device_count())]
    return names[: torch.cuda.device_count()]


def _surroundings(gpus: list[str], place: int, width: int) -> dict[str, str]:
    """The environment of the cells in one of `width` places."""
    if gpus:
        return {"CUDA_VISIBLE_DEVICES": gpus[place % len(gpus)]}
    threads = max(1, (os.cpu_count() or 1) // width)
    return {} if width == 1 or "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(threads)}


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line.strip().removeprefix("logpast: ") for line in reversed(lines) if line.strip()), "")


class Cluster:
    """Ray: it finds each cell a place, and starts a cell whose process or machine is lost again, elsewhere."""

    def __init__(self, address: str, cpus: float, gpus: float | None) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nobody asked for reports about this machine
        try:
            import ray
        except ImportError:
            raise UserError("Ray is not installed: `pip install 'logpast[ray]'`, or leave out --address") from None
        self.ray = ray
        here: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
        try:
            _knock(address)
            ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **here)
        except (OSError, RuntimeError, ValueError) as error:
            problem = " ".join(str(error).split())[:200]
            raise UserError(f"no Ray cluster at {address!r} ({problem}); --address local starts one here") from None
        there = ray.cluster_resources()
        self.cpus, self.gpus = cpus, gpus if gpus is not None else float(there.get("GPU", 0) > 0)
        if not any(self._fits(node["Resources"]) for node in ray.nodes() if node["Alive"]):
            self._tell_of_no_room(address)
        self.task = ray.remote(_work_elsewhere).options(
            num_cpus=self.cpus, num_gpus=self.gpus, max_retries=RETRIES, scheduling_strategy="SPREAD"
        )
        self.running: dict[Future[Row], Any] = {}

    def _fits(self, there: dict[str, float]) -> bool:
        return there.get("CPU", 0) >= self.cpus and there.get("GPU", 0) >= self.gpus

    def _tell_of_no_room(self, address: str) -> None:
        """Ray would wait without a word: for ever on this machine, elsewhere until the cluster grows."""
        wanted = f"cpus: {self.cpus:g} and gpus: {self.gpus:g}, as the page wants for a cell"
        if address == "local":
            self.close()
            raise UserError(f"this machine has no room for {wanted}; set them lower")
        print(f"no machine of the cluster has room for {wanted}: waiting for one", file=sys.stderr)

    @property
    def width(self) -> int:
        """As many as there are places for, and one to wait, for clusters that grow on demand."""
        return 1 + self.places

    @property
    def places(self) -> int:
        """How many fit into the cluster as it now is."""
        there = self.ray.cluster_resources()
        fits = [there.get(kind, 0) / each for kind, each in (("CPU", self.cpus), ("GPU", self.gpus)) if each]
        return max(1, int(min(fits, default=1)))

    def start(self, job: Job) -> Future[Row]:
        environment = {name: value for name, value in os.environ.items() if name.startswith("LOGPAST_")}
        reference = self.task.remote(job, os.getcwd(), environment)
        future: Future[Row] = reference.future()
        self.running[future] = reference
        return future

    def stop(self) -> None:
        for future, reference in self.running.items():
            if not future.done():
                self.ray.cancel(reference, force=False)

    def close(self) -> None:
        self.ray.shutdown()

    def reason(self, error: BaseException) -> str:
        cause = getattr(error, "cause", None) or error
        text = next((line for line in str(cause).splitlines() if line.strip()), type(cause).__name__)
        return text if isinstance(cause, UserError) else f"{type(cause).__name__}: {text}"


def _knock(address: str) -> None:
    """An error at once if nobody answers at an address: Ray itself would try for minutes."""
    from ray._private.services import canonicalize_bootstrap_address

    if not address:
        raise ValueError("it is empty; give auto, local or HOST:PORT")
    # what auto stands for, and the name by which Ray calls this machine, only Ray knows
    found = canonicalize_bootstrap_address(address)
    if found is None:  # there is none yet
        return
    host, _, port = found.removeprefix("ray://").rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), ANSWER).close()


def _work_elsewhere(job: Job, folder: str, environment: dict[str, str]) -> Row:
    """The same work on another machine, which has the same folders but was started from another one of them."""
    os.chdir(folder)
    os.environ.update(environment)
    return work(job)
