"""Training: reads from top to bottom. Weights, data order and learning rate are functions of seed and step alone,
so a run that was killed and resumed is, on a CPU, the run left alone, to the bit.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import yaml

from logpast.data import TokenStore, load_tokenizer, open_tokens
from logpast.data.windows import Batch, Batches
from logpast.environment import describe, revision
from logpast.errors import UserError
from logpast.metrics import perplexity
from logpast.models import build
from logpast.progress import Meter, meter
from logpast.scoring import score
from logpast.training.checkpoint import (
    Checkpoint,
    find_checkpoint,
    remove_folder,
    remove_leftovers,
    save_checkpoint,
    sorted_checkpoints,
)
from logpast.training.config import TrainConfig, recipe
from logpast.training.log import Log
from logpast.training.optimizer import build_optimizer, learning_rate

if TYPE_CHECKING:
    from lightning.fabric import Fabric


def train(config: TrainConfig) -> dict[str, Any]:
    """Train a model and keep its best checkpoint; returns the final state, as in the checkpoint's state.json.

    Examples:
        logpast train --config recipes/paper-wikitext103.yaml
        logpast train --config recipes/paper-wikitext103.yaml --model.slots 41 --model.sharpness 150 --run runs/L41
        logpast train --config recipes/paper-wikitext103.yaml --model recent --run runs/control
        logpast train --config recipes/small-cpu.yaml --data.train mybook.txt --data.tokenizer bpe-4096
        logpast train --config recipes/paper-wikitext103.yaml --resume auto
    """
    fabric = _fabric(config)
    with fabric.rank_zero_first():
        train_store, validation_store = _open_data(config)
        resumed = _find_resumption(config, train_store)

    torch.manual_seed(config.seed)
    bare = build(config.model, train_store.tokenizer.size)
    if resumed:
        bare.load_state_dict(resumed.weights())
    history, window = bare.history, bare.window
    batches = Batches(
        train_store, window, history, config.batch_size, config.seed, config.data.streams, config.data.jitter
    )
    total = config.total_steps(batches.windows_per_epoch)
    optimizer = build_optimizer(bare, config.optimizer, fabric.device)
    if config.compile or (config.compile is None and fabric.device.type == "cuda"):
        bare.compile()
    model, optimizer = fabric.setup(bare, optimizer)
    if resumed:
        resumed.load_optimizer(bare, optimizer)

    state: dict[str, Any] = resumed.state if resumed else {"step": 0, "tokens": 0, "seconds": 0.0, "best": None}
    state |= {
        "total_steps": total,
        "parameters": bare.parameter_count(),
        "data": train_store.identity,
        "revision": revision(),
        "hardware": describe(fabric.device),
    }
    lead = fabric.global_rank == 0
    with fabric.rank_zero_first():
        if lead:
            _enter_run(config, state["step"])
    log = Log(config.run, config.tensorboard, state["step"]) if lead else Log()
    tokenizer = load_tokenizer(train_store.path)
    config = replace(config, model=bare.config)  # its vocabulary is no longer open

    def validate() -> float:
        """Nats per validation token."""
        assert validation_store is not None
        nats = score(
            model,
            validation_store,
            window,
            history,
            batch_size=max(1, (config.micro_batch_size or config.batch_size) // config.devices),
            streams=config.data.streams,
            device=fabric.device,
            limit=config.data.validation_tokens,
            share=(fabric.global_rank, fabric.world_size),
        )
        total_nats = fabric.all_reduce(torch.tensor(math.fsum(nats), dtype=torch.float64), reduce_op="sum")
        return float(total_nats) / len(nats)

    def step_once(batch: Batch, rate: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """One optimizer step; returns its nats per token, its tokens and the gradient's norm, all on the device."""
        batch = batch.to(fabric.device)
        tokens = fabric.all_reduce((batch.targets >= 0).sum().float(), reduce_op="sum")
        loss = torch.zeros((), device=fabric.device)
        parts = batch.split(config.micro_batch_size or len(batch.tokens))
        for number, part in enumerate(parts):
            with fabric.no_backward_sync(model, enabled=number + 1 < len(parts)):
                share = model(*part).sum() / tokens.clamp(min=1)
                fabric.backward(share * fabric.world_size)  # data parallelism averages, the batch's loss is a sum
            loss += share.detach()
        norm = torch.zeros(())
        if config.optimizer.clip:
            norm = fabric.clip_gradients(model, optimizer, max_norm=config.optimizer.clip, error_if_nonfinite=False)  # type: ignore[assignment]
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad()
        return fabric.all_reduce(loss, reduce_op="sum"), tokens, norm  # type: ignore[return-value]

    share = config.batch_size // fabric.world_size
    rows = slice(fabric.global_rank * share, (fabric.global_rank + 1) * share)
    done, before = int(state["step"]), float(state["seconds"])
    seen: torch.Tensor | float = float(state["tokens"])
    started = time.monotonic()
    marked, marked_tokens = started, float(state["tokens"])
    saved = done
    with (
        _stop_signals() as stop,
        ThreadPoolExecutor(1) as ahead,
        meter("training", total, done, visible=lead) as progress,
    ):
        _greet(progress, config, state, batches, done)
        coming = ahead.submit(batches.at, done, rows)
        while done < total:
            batch = coming.result()
            rate = learning_rate(config.optimizer, done, total)
            coming = ahead.submit(batches.at, done + 1, rows)
            loss, tokens, norm = step_once(batch, rate)
            seen, done = seen + tokens.double(), done + 1
            last, stopping = done == total, stop.is_set()

            if done % config.log_every == 0 or last or stopping:
                nats, now = float(loss), time.monotonic()
                if not math.isfinite(nats):
                    raise UserError(
                        f"the loss became {nats} at step {done}; lower optimizer.learning_rate or lengthen "
                        f"warmup_steps, and resume from the checkpoint of step {saved}"
                    )
                speed, marked, marked_tokens = (float(seen) - marked_tokens) / (now - marked), now, float(seen)
                log.write(
                    done,
                    epoch=round(done * config.batch_size / batches.windows_per_epoch, 4),
                    loss=nats,
                    ppl=perplexity(nats, 1),
                    learning_rate=rate,
                    gradient_norm=float(norm),
                    tokens=int(seen),
                    tokens_per_second=round(speed, 1),
                )
                progress.update(done, f"loss {nats:.4f} ppl {perplexity(nats, 1):.2f} {speed:,.0f} tokens/s")

            improved = False
            if validation_store and (done % config.validate_every == 0 or last):
                nats = validate()
                improved = not state["best"] or nats < state["best"]["nats_per_token"]
                if improved:
                    state["best"] = {"step": done, "nats_per_token": nats, "ppl_token": perplexity(nats, 1)}
                log.write(done, validation_loss=nats, validation_ppl=perplexity(nats, 1))
                mark = " (best so far)" if improved else ""
                progress.say(f"step {done:,}: validation loss {nats:.4f} ppl {perplexity(nats, 1):.2f}{mark}")
                marked = time.monotonic()

            if improved or last or stopping or done % config.checkpoint_every == 0:
                seconds = round(before + time.monotonic() - started, 3)
                state |= {"step": done, "tokens": int(seen), "seconds": seconds}
                if lead:
                    save_checkpoint(config.run, config, bare, optimizer, tokenizer, state)
                saved = done
                fabric.barrier()
            if stopping:
                break
    log.close()
    if lead:
        _farewell(config, state, stopped=done < total)
    if done < total:
        raise KeyboardInterrupt
    return state


def _fabric(config: TrainConfig) -> Fabric:
    from lightning.fabric import Fabric  # takes seconds to import, so only where it is used

    strategy = "ddp" if config.devices > 1 else "auto"
    try:
        fabric = Fabric(
            accelerator=config.accelerator, devices=config.devices, strategy=strategy, precision=config.precision
        )
    except (ValueError, RuntimeError) as error:
        raise UserError(f"accelerator={config.accelerator} with devices={config.devices} cannot be used: {error}") from None
    fabric.launch()
    return fabric


def _open_data(config: TrainConfig) -> tuple[TokenStore, TokenStore | None]:
    """Training and validation tokens, both of the training text's tokenizer."""
    data = config.data
    train_store = open_tokens(data.train, data.tokenizer or data.train)
    return train_store, open_tokens(data.validation, train_store.path) if data.validation else None


def _find_resumption(config: TrainConfig, store: TokenStore) -> Checkpoint | None:
    """The checkpoint to go on from, if that is what the config asks for; refuses what would overwrite a run."""
    run, found = config.run, None
    if config.resume is True or config.resume == "auto":
        if sorted_checkpoints(run):
            found = find_checkpoint(run, "latest")
    elif config.resume is not False:
        found = find_checkpoint(Path(config.resume), "latest")
        later = [c for c in sorted_checkpoints(run) if int(c.name.partition("-")[2]) > found.step]
        if later:
            raise UserError(
                f"{run} has later checkpoints ({later[-1].name}) than {found.path.name}; give another run folder"
            )
    elif run.exists() and any(run.iterdir()):
        raise UserError(f"{run} exists already; go on with it by --resume auto, or give another --run folder")
    if found is None:
        return None
    ours, theirs = recipe(config), recipe(found.config)
    ours["model"] |= {"vocabulary": config.model.vocabulary or theirs["model"]["vocabulary"]}
    for name, value in ours.items():
        if value != theirs[name]:
            raise UserError(f"cannot resume {found.path}: it was run with {name}={theirs[name]}, now it is {value}")
    if found.state["data"]["sha256"] != store.identity["sha256"]:
        raise UserError(f"cannot resume {found.path}: {store.name} holds other tokens than it was trained on")
    return found


def _enter_run(config: TrainConfig, step: int) -> None:
    """Make the run's folder, or clear from it what a killed run left behind."""
    config.run.mkdir(parents=True, exist_ok=True)
    remove_leftovers(config.run)
    for folder in sorted_checkpoints(config.run):
        if int(folder.name.partition("-")[2]) > step:  # later than the one we go on from: it was found damaged
            remove_folder(folder)
    (config.run / "config.yaml").write_text(yaml.safe_dump(config.to_dict(), sort_keys=False, allow_unicode=True))


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


def _greet(progress: Meter, config: TrainConfig, state: dict[str, Any], batches: Batches, done: int) -> None:
    model, hardware = config.model, state["hardware"]
    epochs = state["total_steps"] * config.batch_size / batches.windows_per_epoch
    progress.say(
        f"{state['parameters'] / 1e6:.1f}M parameters, {model.slots} slots + {model.window} tokens; "
        f"{state['data']['name']}: {state['data']['tokens']:,} tokens, {state['total_steps']:,} steps = "
        f"{epochs:.2f} epochs; {hardware['device']} ({hardware['name']}), {config.precision}"
        + (f"; going on after step {done:,}" if done else "")
    )


def _farewell(config: TrainConfig, state: dict[str, Any], stopped: bool) -> None:
    if stopped:
        print(f"stopped after step {state['step']:,}, saved; go on with --resume auto")
        return
    best = state["best"]
    which = f"best validation ppl {best['ppl_token']:.3f} at step {best['step']:,}" if best else "no validation text"
    print(f"trained {state['step']:,} steps in {state['seconds']:,.0f} s; {which}")
    print(f"next: logpast eval --checkpoint {config.run} --data FILE    logpast generate --checkpoint {config.run}")
