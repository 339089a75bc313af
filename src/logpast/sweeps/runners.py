"""Where cells run: in processes on this machine, or on a Ray cluster. Both return futures of rows."""

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

Job = dict[str, Any]  # argument of cell.work
Row = dict[str, Any]
COMMAND = [sys.executable, "-m", "logpast.sweeps.cell"]  # process of a cell
CONNECT_SECONDS = 5.0  # timeout for a Ray cluster
RETRIES = 3  # restarts by Ray of a cell whose process or machine was lost; it resumes from its checkpoint


class Runner(Protocol):
    """Runs cells for a sweep."""

    @property
    def max_started(self) -> int:
        """How many cells may be started at a time, including queued ones."""

    @property
    def parallel(self) -> int:
        """How many cells run at a time."""

    def start(self, job: Job) -> Future[Row]: ...

    def stop(self) -> None:
        """Ask all running cells to save and stop."""

    def close(self) -> None:
        """Kill what still runs."""

    def reason(self, error: BaseException) -> str:
        """Why a cell failed, in one line."""


class Processes:
    """One process per cell, each with one GPU if there are any, or with an equal share of the cores."""

    def __init__(self, jobs: int | None) -> None:
        gpus = _visible_gpus()
        self.max_started = self.parallel = jobs or max(1, len(gpus))
        self.free = [_environment(gpus, number, self.parallel) for number in range(self.parallel)]
        self.threads = ThreadPoolExecutor(self.parallel)
        self.running: set[subprocess.Popen[bytes]] = set()

    def start(self, job: Job) -> Future[Row]:
        environment, log = self.free.pop(0), Path(job["log"])
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as errors:
            process = subprocess.Popen(
                COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=os.environ | environment,
                start_new_session=True,  # Ctrl-C reaches only the sweep, which then stops the cells
            )  # fmt: skip
        self.running.add(process)
        return self.threads.submit(self._wait, process, job, environment)

    def _wait(self, process: subprocess.Popen[bytes], job: Job, environment: dict[str, str]) -> Row:
        assert process.stdin
        assert process.stdout
        with process:  # its standard input stays open until it ends: if it closes earlier, the sweep has died
            with suppress(BrokenPipeError):
                process.stdin.write(json.dumps(job).encode() + b"\n")
                process.stdin.flush()
            output = process.stdout.read()
            code = process.wait()
            with suppress(BrokenPipeError):  # close would write again what the process did not read
                process.stdin.close()
        self.running.discard(process)
        self.free.append(environment)
        if code == 0:
            row: Row = json.loads(output)
            return row
        if code < 0:
            hint = " (out of memory?)" if -code == signal.SIGKILL else ""
            raise RuntimeError(f"its process was killed by {signal.Signals(-code).name}{hint}")
        raise RuntimeError(_last_line(Path(job["log"])) or f"its process exited with code {code}")

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
    """By their names in CUDA_VISIBLE_DEVICES."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(number) for number in range(torch.cuda.device_count())]
    return names[: torch.cuda.device_count()]


def _environment(gpus: list[str], number: int, parallel: int) -> dict[str, str]:
    """Variables for one of `parallel` processes: its GPU, or its share of the cores."""
    if gpus:
        return {"CUDA_VISIBLE_DEVICES": gpus[number % len(gpus)]}
    threads = max(1, (os.cpu_count() or 1) // parallel)
    return {} if parallel == 1 or "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(threads)}


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line.strip().removeprefix("logpast: ") for line in reversed(lines) if line.strip()), "")


class Cluster:
    """A Ray cluster: Ray decides where each cell runs, and restarts cells whose process or machine is lost."""

    def __init__(self, address: str, cpus: float, gpus: float | None) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # do not send reports about this machine
        try:
            import ray
        except ImportError:
            raise UserError("Ray is not installed: `pip install 'logpast[ray]'`, or leave out --address") from None
        self.ray = ray
        options: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
        try:
            _check_reachable(address)
            ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **options)
        except (OSError, RuntimeError, ValueError) as error:
            problem = " ".join(str(error).split())[:200]
            raise UserError(f"no Ray cluster at {address!r} ({problem}); --address local starts one here") from None
        resources = ray.cluster_resources()
        self.cpus, self.gpus = cpus, gpus if gpus is not None else float(resources.get("GPU", 0) > 0)
        if not any(self._fits(node["Resources"]) for node in ray.nodes() if node["Alive"]):
            self._report_no_room(address)
        self.task = ray.remote(_work_in).options(
            num_cpus=self.cpus, num_gpus=self.gpus, max_retries=RETRIES, scheduling_strategy="SPREAD"
        )
        self.running: dict[Future[Row], Any] = {}

    def _fits(self, resources: dict[str, float]) -> bool:
        return resources.get("CPU", 0) >= self.cpus and resources.get("GPU", 0) >= self.gpus

    def _report_no_room(self, address: str) -> None:
        """Ray would wait silently: forever on this machine, elsewhere until the cluster grows."""
        wanted = f"a cell with cpus: {self.cpus:g} and gpus: {self.gpus:g}"
        if address == "local":
            self.close()
            raise UserError(f"this machine is too small for {wanted}; lower them in the sweep's YAML file")
        print(f"no machine of the cluster is large enough for {wanted}; waiting for one", file=sys.stderr)

    @property
    def max_started(self) -> int:
        """One more than can run, so that clusters that grow on demand do so."""
        return 1 + self.parallel

    @property
    def parallel(self) -> int:
        """How many fit into the cluster at present."""
        resources = self.ray.cluster_resources()
        fits = [resources.get(kind, 0) / each for kind, each in (("CPU", self.cpus), ("GPU", self.gpus)) if each]
        return max(1, int(min(fits, default=1)))

    def start(self, job: Job) -> Future[Row]:
        environment = {name: value for name, value in os.environ.items() if name.startswith("LOGPAST_")}
        reference = self.task.remote(os.getcwd(), job, environment)
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


def _check_reachable(address: str) -> None:
    """Fail at once if nothing answers at an address: Ray itself would try for minutes."""
    from ray.util import get_node_ip_address

    if address == "auto":
        address = os.environ.get("RAY_ADDRESS") or "auto"
    if address in ("auto", "local"):  # Ray looks for a cluster on this machine, or starts one
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host:
        raise ValueError("expected auto, local or HOST:PORT")
    if host in ("localhost", "127.0.0.1", "[::1]"):
        host = get_node_ip_address()  # the address by which Ray knows this machine
    socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()


def _work_in(folder: str, job: Job, environment: dict[str, str]) -> Row:
    """`work` on another machine, in the folder and with the variables of the sweep."""
    os.chdir(folder)
    os.environ.update(environment)
    return work(job)
