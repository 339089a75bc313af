"""Training: reads from top to bottom. Weights, data order and learning rate are functions of seed and step alone,
so a run that was killed and resumed is, on a CPU and not compiled, the run left alone, to the bit.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import replace
from shlex import quote
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from logpast.data import TokenStore, is_store, open_tokens
from logpast.data.batching import Batch, Batches, Lanes, Segments
from logpast.evaluation.metrics import perplexity
from logpast.evaluation.scoring import score
from logpast.kernels.cuda_graphs import Replay
from logpast.kernels.ops import HAS_TRITON
from logpast.models import Recurrent, State, build
from logpast.training.checkpoint import save_checkpoint
from logpast.training.compile import compile_model, release_model
from logpast.training.config import DataConfig, TrainConfig
from logpast.training.log import Log
from logpast.training.optimizer import build_optimizer, learning_rate, set_learning_rate
from logpast.training.run_dir import entered, find_resumption
from logpast.util.environment import describe, revision
from logpast.util.errors import Diverged, UserError
from logpast.util.progress import ProgressBar, progress_bar

if TYPE_CHECKING:
    from lightning.fabric import Fabric


def train(config: TrainConfig) -> dict[str, Any]:
    """Train a model and keep its best checkpoint.

    Examples:
        logpast train --config paper-wikitext103
        logpast train --config paper-wikitext103 --model.slots 41 --model.sharpness 150 --run runs/L41
        logpast train --config paper-wikitext103 --model recent --run runs/control
        logpast train --config small-cpu --data.train mybook.txt --data.tokenizer bpe-4096
        logpast train --config paper-wikitext103 --resume auto

    Returns:
        The final state, as in the checkpoint's state.json.
    """
    run = Run(config)
    with (
        closing(run),
        _stop_signals() as stop,
        progress_bar("training", run.total, run.done, visible=run.leads) as progress,
    ):
        progress.say(run.greeting())
        for batch in run.batches_to_come():
            run.step(batch)
            stopping = run.agree(stop.is_set())
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
        print(run.farewell())
    if run.done < run.total:
        raise KeyboardInterrupt
    return run.state


class Run:
    """A run under way: model, optimizer, data, and how far it has come."""

    def __init__(self, config: TrainConfig) -> None:
        self.fabric = fabric = _fabric(config)
        self.leads = fabric.global_rank == 0
        with fabric.rank_zero_first():
            store, self.validation = open_data(config.data)
            if config.data.tokenizer and is_store(config.data.train):  # which has its own, whatever a recipe says
                config = replace(config, data=replace(config.data, tokenizer=store.tokenizer.name))
            resumed = find_resumption(config, store, self.validation)
        torch.manual_seed(config.seed)
        bare = build(config.model, store.tokenizer.size)
        if resumed:
            resumed.load_weights(bare)
        self.compiled = config.compile or (config.compile is None and fabric.device.type == "cuda")
        self.bare = bare = compile_model(bare, config, fabric.device) if self.compiled else bare
        where = config.data.streams, config.data.jitter, fabric.device
        self.batches: Batches | Lanes
        if isinstance(bare, Recurrent):
            segments = bare.config.segments
            self.batches = Lanes(store, bare.window, config.batch_size, segments, config.seed, *where)
        else:
            self.batches = Batches(store, bare.window, bare.history, config.batch_size, config.seed, *where)
        self.total = config.total_steps(self.batches.windows_per_epoch)
        self.model, self.optimizer = fabric.setup(bare, build_optimizer(bare, config.optimizer, fabric.device))
        going_on = resumed if resumed and resumed.step < self.total else None  # one that is done may have weights alone
        if going_on:
            going_on.load_optimizer(bare, self.optimizer)
        share = config.batch_size // fabric.world_size
        self.rows = slice(fabric.global_rank * share, (fabric.global_rank + 1) * share)  # ours of each batch
        self.carried: State | None = None
        if isinstance(bare, Recurrent):
            self.carried = {name: value.detach().clone() for name, value in bare.start(share).items()}
            for name, value in (going_on.carried() if going_on else {}).items():
                self.carried[name].copy_(value[self.rows])
        self.config = replace(config, model=bare.config)  # its vocabulary is no longer open
        self.tokenizer = store.load_tokenizer()
        self.state: dict[str, Any] = (
            resumed.state if resumed else {"step": 0, "tokens": 0, "seconds": 0.0, "best": None}
        )
        self.state |= {
            "total_steps": self.total,
            "parameters": bare.parameter_count(),
            "data": store.identity,
            "validation_data": self.validation.identity if self.validation else None,
            "revision": revision(),
            "hardware": describe(fabric.device),
        }
        self.done = int(self.state["step"])
        self.saved = self.done
        self.seen = torch.tensor(int(self.state["tokens"]), device=fabric.device)
        self.clock = time.monotonic() - self.state["seconds"]  # as if the run had gone on without a break
        self.marked = time.monotonic(), int(self.seen)
        self.folder, self.log = ExitStack(), Log()
        problem = None
        if self.leads:
            try:
                self.folder.enter_context(entered(self.config, resumed))
                self.log = Log(config.run, config.tensorboard, self.done)
            except UserError as error:
                problem = str(error)
            except OSError as error:
                problem = f"cannot write {config.run}: {error.strerror}; make room or give another --run folder"
        if problem := fabric.broadcast(problem):  # or the others would wait for ever
            self.folder.close()  # whoever keeps the error, as a notebook does, shall not keep the lock
            raise UserError(problem)
        self.norm = torch.zeros(())
        alone_on_gpu = fabric.device.type == "cuda" and fabric.world_size == 1
        never_waits = HAS_TRITON and config.precision != "64-true"  # else the memory asks the GPU how much there is
        self.update = Replay(self._update) if self.compiled and alone_on_gpu and never_waits else self._update

    def agree(self, asked: bool) -> bool:
        """Whether any process was asked to stop: all must stop after the same step."""
        return asked if self.fabric.world_size == 1 else bool(self._sum(torch.tensor(float(asked))))

    def due(self, every: int) -> bool:
        return self.done % every == 0 or self.done == self.total

    def batches_to_come(self) -> Iterator[Batch | Segments]:
        """This process's rows of every batch to the end of the run.

        Where the CPU must make them for another device, it makes each while the last is used. Not for itself: torch's
        threads go to sleep between operations if there are more of them than cores, and all becomes slower.
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
        """One optimizer step."""
        self.rate = learning_rate(self.config.optimizer, self.done, self.total)
        set_learning_rate(self.optimizer, self.rate)
        self.update(batch.to(self.fabric.device))
        self.done += 1

    def _update(self, batch: Batch | Segments) -> None:
        """All of a step that happens on the device. The loss is the mean over the whole batch's tokens."""
        fabric, config = self.fabric, self.config
        tokens = self._sum((batch.targets >= 0).sum())
        scored = tokens.clamp(min=1)
        self.loss = torch.zeros((), device=fabric.device)
        size = config.micro_batch_size or len(batch.tokens)
        parts = batch.split(size)
        for number, part in enumerate(parts):
            with fabric.no_backward_sync(self.model, enabled=number + 1 < len(parts)):
                if self.carried is None:
                    loss = share = self.model(*part).sum() / scored
                else:
                    before = {name: value.split(size)[number] for name, value in self.carried.items()}
                    nats, after, extra = self.model(*part, before)
                    share = nats.sum() / scored
                    loss = share + extra.sum() / config.batch_size
                fabric.backward(loss * fabric.world_size)  # processes average their gradients, we want the sum
            self.loss += share.detach()
            if self.carried is not None:
                for name, value in before.items():
                    value.copy_(after[name])
        if config.optimizer.clip:
            norm = fabric.clip_gradients(
                self.model, self.optimizer, max_norm=config.optimizer.clip, error_if_nonfinite=False
            )
            assert norm is not None
            self.norm = norm
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seen += tokens

    def report(self) -> str:
        """Log the step just done and say it in a few words."""
        loss, now, seen = self._sound_loss(), time.monotonic(), int(self.seen)
        speed = (seen - self.marked[1]) / max(now - self.marked[0], 1e-9)
        self.marked = now, seen
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
        """Score the validation text; True if the model was never better."""
        assert self.validation is not None
        fabric, config, started = self.fabric, self.config, time.monotonic()
        # what is compiled is the training step
        with torch.compiler.set_stance("force_eager") if self.compiled else nullcontext():
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
            )
        total = self._sum(torch.tensor(math.fsum(nats), dtype=torch.float64))
        loss = self._finite(float(total) / len(nats))
        best = self.state["best"]
        improved = best is None or loss < best["nats_per_token"]
        if improved:
            self.state["best"] = {"step": self.done, "nats_per_token": loss, "ppl_token": perplexity(loss, 1)}
        self.log.write(self.done, validation_loss=loss, validation_ppl=perplexity(loss, 1))
        mark = " (best so far)" if improved else ""
        progress.say(f"step {self.done:,}: validation loss {loss:.4f} ppl {perplexity(loss, 1):.2f}{mark}")
        self.marked = self.marked[0] + time.monotonic() - started, self.marked[1]  # no part of the training speed
        return improved

    def save(self) -> None:
        self._sound_loss()
        seconds = round(time.monotonic() - self.clock, 3)
        self.state |= {"step": self.done, "tokens": int(self.seen), "seconds": seconds}
        carried = self.carried
        if carried is not None and self.fabric.world_size > 1:
            carried = {name: self._gather(value) for name, value in carried.items()}
        if self.leads:
            save_checkpoint(self.config, self.bare, self.optimizer, self.tokenizer, self.state, carried)
        self.saved = self.done
        self.fabric.barrier()

    def close(self) -> None:
        """No step will follow."""
        self.log.close()
        self.folder.close()
        if self.compiled and self.fabric.world_size == 1:
            release_model(self.bare, self.config, self.fabric.device)

    def greeting(self) -> str:
        state, hardware = self.state, self.state["hardware"]
        epochs = self.total * self.config.batch_size / self.batches.windows_per_epoch
        return (
            f"{state['parameters'] / 1e6:.1f}M parameters, attention over {self.bare.attention_length} places; "
            f"{state['data']['name']}: {state['data']['tokens']:,} tokens, {self.total:,} steps = "
            f"{epochs:.2f} epochs; {hardware['device']} ({hardware['name']}), {self.config.precision}"
            + (f"; going on after step {self.done:,}" if self.done else "")
        )

    def farewell(self) -> str:
        state, folder = self.state, quote(str(self.config.run))
        if self.done < self.total:
            return f"stopped after step {self.done:,} of {self.total:,}, saved; go on with --resume auto"
        best = state["best"]
        which = f"best validation ppl {best['ppl_token']:.3f} at step {best['step']:,}" if best else "not validated"
        return (
            f"trained {self.done:,} steps in {state['seconds']:,.0f} s; {which}\n"
            f"next: logpast eval --checkpoint {folder} --data FILE    logpast generate --checkpoint {folder}"
        )

    def _sound_loss(self) -> float:
        """Of the step just done, whose gradients made the weights what they are."""
        loss = self._finite(float(self._sum(self.loss)))
        self._finite(float(self.norm), "gradient norm")
        return loss

    def _finite(self, value: float, what: str = "loss") -> float:
        """Nothing that is not a number may be reported, called best or saved."""
        if math.isfinite(value):
            return value
        raise Diverged(
            f"the {what} became {value} by step {self.done}; lower optimizer.learning_rate or lengthen "
            f"optimizer.warmup_steps (the last checkpoint is of step {self.saved})"
        )

    def _gather(self, rows: Tensor) -> Tensor:
        """Of all processes, in their order."""
        every = self.fabric.all_gather(rows)
        assert isinstance(every, Tensor)
        return every.flatten(0, 1)

    def _sum(self, value: Tensor) -> Tensor:
        """Over all processes."""
        if self.fabric.world_size == 1:
            return value
        total = self.fabric.all_reduce(value, reduce_op="sum")
        assert isinstance(total, Tensor)
        return total


def _fabric(config: TrainConfig) -> Fabric:
    from lightning.fabric import Fabric  # takes seconds to import, so only where it is used
    from lightning.fabric.plugins.precision import MixedPrecision
    from lightning.fabric.strategies import DDPStrategy

    class Mixed(MixedPrecision):
        """Inputs are ids, and a state that is carried on and should stay as precise as it is."""

        def convert_input(self, data: Any) -> Any:
            return data

    mixed = Mixed("bf16-mixed", "cpu") if config.precision == "bf16-mixed" else None
    try:
        fabric = Fabric(
            accelerator=config.accelerator,
            devices=config.devices,
            # buffers are constants; to share them, all processes would have to score equally many batches
            strategy=DDPStrategy(broadcast_buffers=False) if config.devices > 1 else "auto",
            precision=None if mixed else config.precision,
            plugins=mixed,
        )
    except (ValueError, RuntimeError) as error:
        raise UserError(
            f"accelerator={config.accelerator} with devices={config.devices} cannot be used: {error}"
        ) from None
    if fabric.device.type == "mps" and config.precision == "64-true":
        raise UserError("precision=64-true needs a CPU or CUDA device; give --accelerator cpu")
    if mixed:
        mixed.device = fabric.device.type  # which is known only now
    fabric.launch()
    return fabric


def open_data(data: DataConfig) -> tuple[TokenStore, TokenStore | None]:
    """Training and validation tokens, both of the training text's tokenizer."""
    train_store = open_tokens(data.train, None if is_store(data.train) else data.tokenizer)
    return train_store, open_tokens(data.validation, train_store.path) if data.validation else None


@contextmanager
def _stop_signals() -> Iterator[threading.Event]:
    """Ctrl-C and SIGTERM ask the loop to save and stop after the step at hand; a second one stops at once."""
    stop = threading.Event()

    def ask(number: int, frame: Any) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
