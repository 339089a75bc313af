"""The training loop (command `train`).

Initial weights, order of the data and learning rate depend only on the seed and the step. On a CPU and not compiled, a
run that was killed and resumed therefore ends with the same bits as one that was not.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from shlex import quote
from typing import Any

import torch
from torch import Tensor

from logpast.data.batching import Batch, Segments
from logpast.evaluation.metrics import perplexity
from logpast.evaluation.scoring import score
from logpast.kernels.cuda_graphs import Replay
from logpast.kernels.ops import HAS_TRITON
from logpast.training.checkpoint import Checkpoint, moments_of, save_checkpoint
from logpast.training.compile import is_compiled
from logpast.training.config import TrainConfig
from logpast.training.devices import find_launcher, gather, unsharded, whole, with_launcher
from logpast.training.memory_check import check_training
from logpast.training.optimizer import learning_rate, set_learning_rate
from logpast.training.resume import check_length, is_finished
from logpast.training.setup import (
    make_batches,
    make_carried_state,
    make_fabric,
    make_model,
    make_optimizer,
    make_state,
    open_initial_weights,
    open_inputs,
    open_run_dir,
    rows_of_process,
)
from logpast.util.environment import cpu_threads, thread_count
from logpast.util.errors import Diverged
from logpast.util.progress import ProgressBar, progress_bar
from logpast.util.signals import SIGHUP, handle_signals


def train(config: TrainConfig) -> dict[str, Any]:
    """Train a model and keep its best checkpoint.

    Examples:
        logpast train --config paper-wikitext103
        logpast train --config paper-wikitext103 --model.slots 41 --model.sharpness 150 --run runs/L41
        logpast train --config paper-wikitext103 --model recent --run runs/control
        logpast train --config small-cpu --data.train mybook.txt --data.tokenizer bpe-4096
        logpast train --config paper-wikitext103 --resume auto
        logpast train --config paper-wikitext103 --resume auto --epochs 120       # train a finished run further
        logpast train --init_from runs/mine --data.train new.txt --steps 500 --run runs/tuned
        logpast train --init_from gpt2 --data.train new.txt --steps 500 --freeze '!memory' --run runs/gpt2

    Returns:
        The final state, as in state.json of a checkpoint.
    """
    run = Run(config)
    start = run.done
    with (
        closing(run),
        cpu_threads(run.threads),
        _stop_signals(lambda: run.done > start, run.launched) as stop,
        progress_bar("training", run.total, run.done, visible=run.leads) as progress,
    ):
        progress.say("\n".join([run.start_summary(), *run.notes]))
        for batch in run.batches_to_come():
            run.step(batch)
            stopping = run.any_process(stop.is_set())
            if run.due(config.log_every) or stopping:
                progress.update(run.done, run.report())
            improved = False
            if run.validation is not None and run.due(config.validate_every):
                improved = run.validate(progress)
            if run.due(config.checkpoint_every) or improved or stopping:
                run.save()
            if stopping:
                break
    if run.leads:
        print(run.end_summary())
    if run.done < run.total:
        raise KeyboardInterrupt
    return run.state


class Run:
    """A training run, ready for its next step: model, optimizer, data and progress.

    Attributes:
        bare: the model itself; `model` is the same one wrapped by Fabric.
        batches: training batches as a function of the step.
        carried: the state of a recurrent system, None for other systems.
        done: steps trained so far, of `total`.
        launched: whether torchrun or srun has started this process.
        loss: mean loss of the last step's tokens, on the device.
        notes: what the user should know before the first step.
        threads: CPU threads to train with.
    """

    def __init__(self, config: TrainConfig) -> None:
        launcher = find_launcher()
        self.launched = launcher is not None
        config = with_launcher(config, launcher)
        self.fabric = fabric = make_fabric(config, launcher)
        self.leads = fabric.global_rank == 0
        self.compiled = is_compiled(config, fabric.device)
        config, store, self.validation, resumed = open_inputs(config, fabric)
        if not (resumed and is_finished(resumed, config)):
            check_training(config, store.tokenizer.size, fabric.device, self.compiled, fabric.world_size)
        self.tokenizer = store.load_tokenizer()
        source = open_initial_weights(config, store, resumed)
        self.bare = make_model(config, store, resumed or source, self.compiled, fabric.device)
        self.batches = make_batches(config, store, self.bare, fabric.device)
        self.total = config.total_steps(self.batches.windows_per_epoch)
        if resumed:
            check_length(resumed, self.total)
        self.notes = source.notes if source else _length_notes(config, resumed, self.total) if resumed else []
        unfinished = resumed if resumed and resumed.step < self.total else None  # a finished run may have only weights
        self.model, self.optimizer = make_optimizer(config, fabric, self.bare, unfinished)
        self.rows = rows_of_process(config, fabric)
        self.carried = make_carried_state(self.bare, self.rows, unfinished)
        self.config = replace(config, model=self.bare.config)  # with its vocabulary
        self.state = make_state(fabric, self.bare, store, self.validation, self.total, resumed, source)
        self.threads = thread_count(self.state["parameters"], resumed.state.get("hardware") if resumed else None)
        self.state["hardware"]["threads"] = self.threads
        self.done = self.saved = int(self.state["step"])
        self.seen = torch.tensor(int(self.state["tokens"]), device=fabric.device)
        self.norm = torch.zeros(())
        self.start_time = time.monotonic() - self.state["seconds"]  # as if the run had not been interrupted
        self.last_report = time.monotonic(), int(self.seen)
        self.folder, self.log = open_run_dir(self.config, fabric, resumed, self.done)
        alone_on_gpu = fabric.device.type == "cuda" and fabric.world_size == 1
        no_sync = HAS_TRITON and config.precision != "64-true"  # other code paths of the memory wait for the GPU
        self.update = Replay(self._update) if self.compiled and alone_on_gpu and no_sync else self._update

    def any_process(self, stop: bool) -> bool:
        """Whether any process was asked to stop: all must stop after the same step."""
        return stop if self.fabric.world_size == 1 else bool(self._sum(torch.tensor(float(stop))))

    def due(self, every: int) -> bool:
        """Whether the last step is a multiple of `every`, or the end of the run."""
        return self.done % every == 0 or self.done == self.total

    def batches_to_come(self) -> Iterator[Batch | Segments]:
        """This process's rows of every batch to the end of the run.

        If batches are made on the CPU for another device, the next one is made while the last is used. For training on
        the CPU that would be slower: with more threads than cores, torch's threads sleep between operations.
        """
        if self.batches.device.type == self.fabric.device.type:
            while self.done < self.total:
                yield self.batches.at(self.done, self.rows)
            return
        with ThreadPoolExecutor(1) as ahead:
            make: Callable[[int, slice], Batch | Segments] = self.batches.at
            coming = ahead.submit(make, self.done, self.rows)
            while self.done < self.total:
                batch, coming = coming.result(), ahead.submit(make, self.done + 1, self.rows)
                yield batch

    def step(self, batch: Batch | Segments) -> None:
        """Train one step."""
        self.rate = learning_rate(self.config.optimizer, self.done, self.total)
        set_learning_rate(self.optimizer, self.rate)
        self.update(batch.to(self.fabric.device))
        self.done += 1

    def _update(self, batch: Batch | Segments) -> None:
        """The part of a step that runs on the device. The loss is the mean over all tokens of the batch."""
        fabric, config = self.fabric, self.config
        tokens = self._sum((batch.targets >= 0).sum())
        scored = tokens.clamp(min=1)
        self.loss = torch.zeros((), dtype=self.bare.table.weight.dtype, device=fabric.device)
        size = config.micro_batch_size or len(batch.tokens)
        parts: Sequence[Batch | Segments] = batch.split(size)
        for number, part in enumerate(parts):
            with fabric.no_backward_sync(self.model, enabled=number + 1 < len(parts)):
                if self.carried is None:
                    loss = share = self.model(*part.inputs).sum() / scored
                else:
                    before = {name: value.split(size)[number] for name, value in self.carried.items()}
                    nats, after, extra = self.model(*part.inputs[:3], before, *part.inputs[3:])
                    share = nats.sum() / scored
                    loss = share + extra.sum() / config.batch_size
                fabric.backward(loss * fabric.world_size)  # processes average gradients; we need the sum
            self.loss += share.detach()
            if self.carried is not None:
                for name, value in before.items():
                    value.copy_(after[name])
        if config.optimizer.clip:
            norm = fabric.clip_gradients(
                self.model, self.optimizer, max_norm=config.optimizer.clip, error_if_nonfinite=False
            )
            assert norm is not None
            self.norm = whole(norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seen += tokens

    def report(self) -> str:
        """Log the last step, and return a short summary for the progress bar."""
        loss, now, seen = self._finite_loss(), time.monotonic(), int(self.seen)
        then, seen_then = self.last_report
        speed = (seen - seen_then) / max(now - then, 1e-9)
        self.last_report = now, seen
        self.log.write(
            self.done,
            epoch=round(self.done * self.config.batch_size / self.batches.windows_per_epoch, 4),
            loss=loss,
            ppl=perplexity(loss, 1),
            learning_rate=self.rate,
            gradient_norm=float(self.norm),
            tokens=seen,
            tokens_per_second=round(speed, 1),
        )
        return f"loss {loss:.4f} ppl {perplexity(loss, 1):.2f} {speed:,.0f} tokens/s"

    def validate(self, progress: ProgressBar) -> bool:
        """Score the validation text. True if this is the lowest loss so far."""
        assert self.validation is not None
        fabric, config, started = self.fabric, self.config, time.monotonic()
        # only the training step is compiled
        eager = torch.compiler.set_stance("force_eager") if self.compiled else nullcontext()
        with eager, unsharded(self.bare):  # processes may score different numbers of batches
            nats = score(
                self.model,
                self.validation,
                self.bare.window,
                self.bare.history,
                batch_size=max(1, (config.micro_batch_size or config.batch_size) // fabric.world_size),
                streams=config.data.streams,
                device=fabric.device,
                limit=config.data.validation_tokens,
                share=(fabric.global_rank, fabric.world_size),
                recall=self.bare.config.recall_form,
            )
        total = self._sum(torch.tensor(math.fsum(nats), dtype=torch.float64))
        loss = self._finite(float(total) / len(nats))
        best = self.state["best"]
        improved = best is None or loss < best["nats_per_token"]
        if improved:
            self.state["best"] = {"step": self.done, "nats_per_token": loss, "ppl_token": perplexity(loss, 1)}
        self.log.write(self.done, validation_loss=loss, validation_ppl=perplexity(loss, 1))
        note = " (best so far)" if improved else ""
        progress.say(f"step {self.done:,}: validation loss {loss:.4f} ppl {perplexity(loss, 1):.2f}{note}")
        then, seen = self.last_report
        self.last_report = then + time.monotonic() - started, seen  # not part of the training speed
        return improved

    def save(self) -> None:
        """Write a checkpoint."""
        self._finite_loss()
        seconds = round(time.monotonic() - self.start_time, 3)
        self.state |= {"step": self.done, "tokens": int(self.seen), "seconds": seconds, "log": self.log.state()}
        carried = self.carried
        if carried is not None and self.fabric.world_size > 1:
            carried = {name: self._gather(value) for name, value in carried.items()}
        weights = gather(self.bare.state_dict(), keep=self.leads)
        moments = gather(moments_of(self.bare, self.optimizer), keep=self.leads)
        if self.leads:
            save_checkpoint(self.config, weights, moments, self.tokenizer, self.state, carried, check=self.log.state)
        self.saved = self.done
        self.fabric.barrier()

    def close(self) -> None:
        """Close the log and release the run folder."""
        self.log.close()
        self.folder.close()

    def start_summary(self) -> str:
        """Printed before the first step."""
        state, hardware = self.state, self.state["hardware"]
        epochs = self.total * self.config.batch_size / self.batches.windows_per_epoch
        resuming = "; already finished" if self.done == self.total else f"; resuming after step {self.done:,}"
        trained = sum(parameter.numel() for parameter in self.bare.parameters() if parameter.requires_grad)
        frozen = f" ({trained:,} of them trained)" if self.config.freeze else ""
        size, windows, processes = self.config.batch_size, self.batches.count, self.fabric.world_size
        devices = f"{processes} × " if processes > 1 else ""
        note = f"\nnote: batch_size ({size:,}) is larger than the text, which has {windows:,} windows; lower it"
        return (
            f"{state['parameters'] / 1e6:.1f}M parameters{frozen}, "
            f"attention over {self.bare.attention_length} positions; "
            f"{state['data']['name']}: {state['data']['tokens']:,} tokens, {self.total:,} steps = "
            f"{epochs:.2f} epochs; {devices}{hardware['device']} ({hardware['name']}), {self.config.precision}"
            + (resuming if self.done else "")
            + (note if size > windows else "")
        )

    def end_summary(self) -> str:
        """Printed after the last step."""
        state, folder = self.state, quote(str(self.config.run))
        if self.done < self.total:
            return f"stopped after step {self.done:,} of {self.total:,}, saved; resume with --resume auto"
        best = state["best"]
        result = f"best validation ppl {best['ppl_token']:.3f} at step {best['step']:,}" if best else "not validated"
        return (
            f"trained {self.done:,} steps in {state['seconds']:,.0f} s; {result}\n"
            f"next: logpast eval --checkpoint {folder} --data FILE    logpast generate --checkpoint {folder}"
        )

    def _finite_loss(self) -> float:
        """The loss of the last step. Diverged if it, or the norm of the gradient, is not finite."""
        loss = self._finite(float(self._sum(self.loss)))
        self._finite(float(self.norm), "gradient norm")
        return loss

    def _finite(self, value: float, what: str = "loss") -> float:
        """The value, which may be reported and saved. Diverged if it is infinite or not a number."""
        if math.isfinite(value):
            return value
        raise Diverged(
            f"the {what} became {value} by step {self.done}; lower optimizer.learning_rate or lengthen "
            f"optimizer.warmup_steps (the last checkpoint is of step {self.saved})"
        )

    def _gather(self, rows: Tensor) -> Tensor:
        """The rows of all processes, in their order."""
        every = self.fabric.all_gather(rows)
        assert isinstance(every, Tensor)
        return every.flatten(0, 1)

    def _sum(self, value: Tensor) -> Tensor:
        """The sum over all processes."""
        if self.fabric.world_size == 1:
            return value
        total = self.fabric.all_reduce(value, reduce_op="sum")
        assert isinstance(total, Tensor)
        return total


def _length_notes(config: TrainConfig, resumed: Checkpoint, total: int) -> list[str]:
    """What changes if a resumed run has another number of steps than before."""
    before = resumed.state["total_steps"]
    if total in (before, resumed.step):
        return []
    last = learning_rate(config.optimizer, resumed.step - 1, before)
    coming = learning_rate(config.optimizer, resumed.step, total)
    return [f"{total:,} steps instead of {before:,}: the learning rate goes from {last:.3g} to {coming:.3g}"]


@contextmanager
def _stop_signals(trained: Callable[[], bool], launched: bool) -> Iterator[threading.Event]:
    """Ctrl-C, SIGTERM and SIGHUP make the loop save and stop after the current step.

    A second Ctrl-C or SIGTERM stops at once, unless the process was `launched`: torchrun passes on a signal that may
    have arrived here already. So does the first signal while nothing is `trained` that could be saved.
    """
    stop, requests = threading.Event(), list[int]()

    def ask(number: int) -> None:
        stop.set()
        if number != SIGHUP:  # a logout may send SIGHUP and SIGTERM
            requests.append(number)
        if (len(requests) > 1 and not launched) or not trained():
            raise KeyboardInterrupt

    with handle_signals(ask, signal.SIGINT, signal.SIGTERM, SIGHUP):
        yield stop
