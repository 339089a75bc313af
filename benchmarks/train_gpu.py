"""Training steps on one GPU: our systems, nanoGPT and full attention, in one run.

    python benchmarks/train_gpu.py --data STORE_OR_TEXT --nanogpt CHECKOUT --out results/train_gpu.json

GPT-2 Small (124M), bf16-mixed, torch.compile, AdamW, clipping 1; 64 windows of 256 = 16,384 loss tokens per step:

    memory, delta, plain            53 slots over 8,192 tokens; the 53 preceding tokens; no slots
    memory-65k, memory-1m           65 and 81 slots: a past of 65,536 and 1,048,576 tokens, shuffled windows
    recall, recall-65k, recall-1m   delta with recall of 8,192, 65,536 and 1,048,576 tokens
    recall-gates                    delta with recall of 8,192 tokens at the output only
    memory-1m-consecutive           the same as memory-1m; the 64 windows of a batch are consecutive in the text
    memory-einsum, memory-conv1d    `memory` in two simple ways: gather + einsum; a depth-wise convolution, as the paper
                                    describes it, at the one position that is needed (see `convolution`)
    nanogpt                         nanoGPT's model and training step at 64 × 309 positions, from a checkout. Its loss
                                    covers all 19,776 positions, so compare ms per step, not loss tokens per second
    full-T                          our decoder without slots over windows of T; about 16,384 loss tokens per step, or
                                    one longer window; its position table grows with T. Attention uses our kernel up
                                    to 1,024 positions, and PyTorch's SDPA beyond that and in nanoGPT

Our systems are timed in the trainer itself, data loading included, without log, validation and checkpoints; nanoGPT's
step without the logging that waits for the GPU. The time of a step runs from the end of the previous step to its own
end, by CUDA events. `share` is the model's arithmetic (`flops`) per second, relative to a bf16 product of 8,192³ that
is timed in the same run. Without --data, table and plot are made again from the JSON file.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import pairwise, repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

from logpast.data import TokenStore, open_tokens
from logpast.memory import LogMemory
from logpast.memory.naive import embed
from logpast.models import LogMemoryConfig, RecentConfig, TransformerConfig
from logpast.training.config import DataConfig, TrainConfig
from logpast.training.loop import Run
from logpast.util.environment import describe, pick_device, revision
from logpast.util.errors import UserError
from logpast.util.files import ensure_writable

SLOTS = {"memory": 53, "memory-65k": 65, "memory-1m": 81, "memory-1m-consecutive": 81, "memory-einsum": 53,
         "memory-conv1d": 53, "delta": 53, "plain": 0, "nanogpt": 53, "recall": 53, "recall-65k": 53, "recall-1m": 53,
         "recall-gates": 53}  # fmt: skip
REACH = {"recall": 2**13, "recall-65k": 2**16, "recall-1m": 2**20, "recall-gates": 2**13}
FULL = {f"full-{length}": length for length in (1024, 2048, 4096, 8192 + 256, 16384, 32768, 65536)}
CASES = ("memory", "delta", "nanogpt", "plain", "memory-65k", "memory-1m", "memory-1m-consecutive", *FULL,
         "memory-einsum", "memory-conv1d", *REACH)  # fmt: skip
RATIOS = (("memory", "delta"), ("nanogpt", "memory"), ("memory-65k", "memory"), ("memory-1m", "memory"),
          ("memory-1m-consecutive", "memory"), ("recall", "delta"), ("recall-gates", "delta"), ("recall-65k", "recall"),
          ("recall-1m", "recall"))  # fmt: skip
WARM_UP_SECONDS, TIMED_SECONDS = 4.0, 8.0  # a slow case makes fewer steps
GPU_UNUSABLE = 3  # exit status: after a failed case, the remaining ones need a new process


@dataclass(frozen=True)
class Sizes:
    """GPT-2 Small; `--toy` has smaller ones for a CPU."""

    layers: int = 12
    heads: int = 12
    width: int = 768
    window: int = 256
    batch: int = 64
    fewer_slots: int = 0
    shrink: int = 1
    """factor by which windows of full attention are shorter"""
    product: int = 8192


TOY = Sizes(layers=2, heads=2, width=32, window=16, batch=4, fewer_slots=36, shrink=256, product=256)
Steps = Generator[Tensor, None, None]  # trains one step at a time and yields its loss


def model_config(case: str, sizes: Sizes, vocabulary: int) -> TransformerConfig:
    shape: dict[str, Any] = {"layers": sizes.layers, "heads": sizes.heads, "width": sizes.width}
    shape |= {"vocabulary": vocabulary, "window": sizes.window}
    if case in FULL:
        return RecentConfig(**shape | {"slots": 0, "window": FULL[case] // sizes.shrink})
    slots = max(0, SLOTS[case] - sizes.fewer_slots)
    if case in REACH:
        return RecentConfig(slots=slots, recall=REACH[case], recall_input=case != "recall-gates", **shape)
    if case in ("delta", "plain", "nanogpt"):
        return RecentConfig(slots=slots, **shape)
    return LogMemoryConfig(slots=slots, sharpness=100, **shape)


def flops(model: TransformerConfig, windows: int, loss_tokens: int) -> float:
    """Multiplications and additions in the matrix products of a step; the backward pass is twice the forward pass.

    Blocks (12 d² parameters each) at all positions, attention over the causal half of T², the last layer at positions
    with a loss. The arithmetic of the memory itself is not counted: it is overhead.
    """
    length, width = model.slots + model.window, model.width
    blocks = 2 * 12 * width**2 * model.layers * windows * length
    attention = 2 * 2 * width * model.layers * windows * length**2 / 2
    head = 2 * (model.vocabulary or 0) * width * loss_tokens
    return 3 * (blocks + attention + head)


def our_steps(case: str, model: TransformerConfig, batch_size: int, store: TokenStore, total: int, row: dict) -> Steps:
    """The trainer's own steps."""
    with tempfile.TemporaryDirectory() as folder:
        run = Run(
            TrainConfig(
                run=Path(folder) / "run", data=DataConfig(train=str(store.path)), model=model, batch_size=batch_size,
                steps=total, precision="bf16-mixed", tensorboard=False,
            )
        )  # fmt: skip
        row["parameters"] = run.bare.parameter_count()
        if memory := getattr(run.bare, "memory", None):
            if case == "memory-einsum":
                memory.path = "naive"  # takes effect: the model is compiled at its first call
            row["path"] = memory.path_for(run.bare.table.weight)
            if case == "memory-conv1d":
                memory.from_ids, row["path"] = convolution(memory), "conv1d"
        if case == "memory-1m-consecutive":
            use_text_order(run)
        for batch in run.batches_to_come():
            run.step(batch)
            yield run.loss


def use_text_order(run: Run) -> None:
    """Make the trainer take windows in the order of the text, beginning where the past is complete."""
    batches, window = run.batches, run.bare.window
    order = np.roll(np.arange(batches.windows_per_epoch), -(run.bare.history // window))
    batches._order = lambda epoch: (0, order)  # type: ignore[assignment]
    history, tokens, *_ = batches.at(0)
    if not (history[1:, -window:] == tokens[:-1]).all():
        raise RuntimeError("windows are not in the order of the text: Batches no longer uses _order")


def convolution(memory: LogMemory, at_once: int = 4) -> Callable[[Tensor, Tensor], Tensor]:
    """Replaces `from_ids`: the whole bank as a depth-wise conv1d, a few histories at a time.

    Only the forward pass is a convolution. PyTorch's gradient of conv1d would visit all M taps at all M inputs for a
    single output. Here the backward pass is one matrix product with the same result, so this is a lower bound.
    """
    gain = next(memory.norm.parameters())
    width = len(gain)
    filters = torch.from_numpy(memory.bank.weights[::-1, ::-1].copy()).to(gain.device, torch.float32)
    kernel = filters.repeat(width, 1).unsqueeze(1)  # L filters for each of d channels

    class Convolve(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, history: Tensor) -> Tensor:
            parts = [F.conv1d(part.mT, kernel, groups=width) for part in history.split(at_once)]
            return torch.cat(parts).unflatten(1, (width, -1)).squeeze(-1).mT

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return torch.einsum("lt,bld->btd", filters, grad)

    @torch.compiler.disable
    def from_ids(ids: Tensor, table: Tensor) -> Tensor:
        with torch.autocast(ids.device.type, enabled=False):
            return memory.norm(Convolve.apply(embed(table, ids)))

    return from_ids


def nanogpt_steps(checkout: Path, model: TransformerConfig, batch_size: int, store: TokenStore, row: dict) -> Steps:
    """The training step of nanoGPT's train.py with its defaults for GPT-2 (its GradScaler is off in bf16)."""
    sys.path.append(str(checkout))
    theirs = importlib.import_module("model")
    device, length = pick_device("auto"), model.slots + model.window
    shape = {"n_layer": model.layers, "n_head": model.heads, "n_embd": model.width, "vocab_size": model.vocabulary}
    torch.manual_seed(1337)
    gpt = theirs.GPT(theirs.GPTConfig(block_size=length, bias=False, dropout=0.0, **shape)).to(device)
    row["parameters"] = sum(p.numel() for p in gpt.parameters())
    row["model_py_sha256"] = hashlib.sha256((checkout / "model.py").read_bytes()).hexdigest()
    optimizer = gpt.configure_optimizers(0.1, 6e-4, (0.9, 0.95), device.type)
    compiled: Any = torch.compile(gpt) if device.type == "cuda" else gpt

    def get_batch() -> tuple[Tensor, ...]:
        data = np.memmap(store.path / "tokens.bin", dtype=store.tokens.dtype, mode="r")
        starts = torch.randint(len(data) - length, (batch_size,)).tolist()
        pieces = [[torch.from_numpy(data[s + by :][:length].astype(np.int64)) for s in starts] for by in (0, 1)]
        both = (torch.stack(piece) for piece in pieces)
        if device.type == "cuda":
            both = (part.pin_memory().to(device, non_blocking=True) for part in both)
        return tuple(both)

    flags: tuple[Any, Any] = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [flag.allow_tf32 for flag in flags]
    try:
        flags[0].allow_tf32 = flags[1].allow_tf32 = True
        tokens, targets = get_batch()
        while True:
            for group in optimizer.param_groups:
                group["lr"] = 6e-4
            with torch.autocast(device.type, dtype=torch.bfloat16):
                _, loss = compiled(tokens, targets)
            tokens, targets = get_batch()  # while the GPU is busy with the forward pass
            loss.backward()
            torch.nn.utils.clip_grad_norm_(compiled.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            yield loss.detach()
    finally:
        flags[0].allow_tf32, flags[1].allow_tf32 = before


def time_steps(steps: Iterator[Tensor], warm_up: int, timed: int) -> tuple[list[float], float, Tensor]:
    """Times the steps without waiting for the GPU between them.

    Returns:
        milliseconds of each timed step, from the end of the previous one to its own end
        seconds of the very first step, which builds and compiles everything
        the last step's loss
    """
    cuda, started = torch.cuda.is_available(), time.perf_counter()

    def mark() -> Any:
        if not cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait() -> float:
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    last = next(steps)
    first = wait() - started
    for limit, seconds in ((warm_up, WARM_UP_SECONDS), (timed, TIMED_SECONDS)):
        started, marks = wait(), [mark()]
        while len(marks) <= limit and time.perf_counter() - started < seconds:
            last = next(steps)
            marks.append(mark())
        wait()
    times = [begin.elapsed_time(end) if cuda else 1000 * (end - begin) for begin, end in pairwise(marks)]
    return times, first, last


def measure(case: str, args: argparse.Namespace, store: TokenStore, ceiling: float) -> dict[str, Any]:
    """One row of the table."""
    sizes = args.sizes
    model = model_config(case, sizes, -(-store.tokenizer.size // 64) * 64)
    batch_size = max(1, round(sizes.batch * sizes.window / model.window)) if case in FULL else sizes.batch
    loss_tokens = batch_size * (model.window + (model.slots if case == "nanogpt" else 0))
    sees = model.window + (model.bank.horizon if isinstance(model, LogMemoryConfig) else model.slots)
    row: dict[str, Any] = {"case": case, "windows": batch_size, "positions": model.slots + model.window, "sees": sees,
                           "loss_tokens": loss_tokens}  # fmt: skip
    if cuda := torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        row["left_over_gib"] = round(torch.cuda.memory_allocated() / 2**30, 2)  # by earlier cases
    if case == "nanogpt":
        steps = nanogpt_steps(args.nanogpt, model, batch_size, store, row)
    else:
        steps = our_steps(case, model, batch_size, store, 1 + args.warmup + args.steps, row)
    with closing(steps):
        times, first, loss = time_steps(steps, args.warmup, args.steps)
    low, median, high = np.percentile(times, [10, 50, 90])
    work = flops(model, batch_size, loss_tokens)
    return row | {
        "loss": round(float(loss), 3), "first_step_s": round(first, 1), "steps": len(times), "ms": round(median, 3),
        "ms_10": round(low, 3), "ms_90": round(high, 3), "loss_tokens_per_s": round(1000 * loss_tokens / median),
        "model_tflop": round(work / 1e12, 3), "share": round(work / median * 1000 / ceiling / 1e12, 4),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if cuda else None,
    }  # fmt: skip


def describe_run(args: argparse.Namespace, store: TokenStore) -> dict[str, Any]:
    """The measured ceiling, and everything else that the numbers depend on."""
    sizes, device = args.sizes, pick_device("auto")
    one, other = (torch.randn(sizes.product, sizes.product, device=device, dtype=torch.bfloat16) for _ in range(2))
    times, *_ = time_steps((one @ other for _ in repeat(None)), 20, 100)
    heads = torch.empty(1, sizes.heads, 1024, sizes.width // sizes.heads, device=device, dtype=torch.bfloat16)
    attention = SDPBackend(torch._fused_sdp_choice(heads, heads, heads, is_causal=True))
    triton = importlib.util.find_spec("triton") and importlib.metadata.version("triton")
    return {
        "what": "training steps on one GPU: medians, 10th and 90th percentiles",
        "recipe": asdict(sizes) | {
            "precision": "bf16-mixed", "compiled": device.type == "cuda", "optimizer": "AdamW, fused; clip 1",
            "sharpness": 100, "warm_up_steps": args.warmup, "most_steps": args.steps,
            "most_seconds": [WARM_UP_SECONDS, TIMED_SECONDS],
            "attention": f"ours up to 1,024 positions, {attention.name} beyond and in nanoGPT",
        },
        "data": store.identity, "revision": revision(), "hardware": describe(device), "triton": triton or None,
        "ceiling_tflops": round(2 * sizes.product**3 / float(np.median(times)) / 1e9, 4),
    }  # fmt: skip


def measure_cases(args: argparse.Namespace) -> None:
    """Measure the cases one by one and write the table after each."""
    store = open_tokens(args.data)
    table = read(args.out) or describe_run(args, store) | {"rows": []}
    for case in args.cases:
        try:
            row = measure(case, args, store, table["ceiling_tflops"])
        except Exception as error:
            traceback.print_exc()
            row = {"case": case, "error": f"{type(error).__name__}: {error}"[:500]}
        write(table, row, args.out)
        print(format_row(row), flush=True)
        try:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        except RuntimeError:  # for example after an illegal memory access
            os._exit(GPU_UNUSABLE)
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()


def supervise(args: argparse.Namespace) -> None:
    """Run all cases in one process, because its start is slow; if a case ends it, the rest in a new one."""
    if "nanogpt" in args.cases and not (args.nanogpt and (args.nanogpt / "model.py").is_file()):
        raise UserError("the case nanogpt needs --nanogpt, a checkout of nanoGPT; or leave it out with --cases")
    ensure_writable(args.out)
    args.out.unlink(missing_ok=True)
    left, store = list(args.cases), open_tokens(args.data)
    while left:
        options = {"data": store.path, "out": args.out, "steps": args.steps, "warmup": args.warmup,
                   "cases": ",".join(left), "nanogpt": args.nanogpt or ""}  # fmt: skip
        command = [sys.executable, __file__, "--work", *(f"--{name}={value}" for name, value in options.items())]
        status = subprocess.run([*command, "--toy"] if args.toy else command).returncode
        table = read(args.out)
        if not table:
            raise UserError(f"the run failed before its first case (exit status {status})")
        done = [row["case"] for row in table["rows"]]
        left = [case for case in left if case not in done]
        if left and status != GPU_UNUSABLE:
            write(table, {"case": left.pop(0), "error": f"its process ended with status {status}"}, args.out)


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def write(table: dict[str, Any], row: dict[str, Any], path: Path) -> None:
    """Add a row and update the ratios."""
    table["rows"].append(row)
    times = {row["case"]: row["ms"] for row in table["rows"] if "ms" in row}
    both = [(top, bottom) for top, bottom in RATIOS if top in times and bottom in times]
    table["step_time_ratios"] = {f"{top} / {bottom}": round(times[top] / times[bottom], 4) for top, bottom in both}
    path.write_text(json.dumps(table, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def format_row(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{row['case']:22} failed: {row['error'].splitlines()[0]}"
    return (
        "{case:22} {windows:3} × {positions:<6} {ms:9.2f} ms [{ms_10:.2f}, {ms_90:.2f}]  {loss_tokens_per_s:>9,} "
        "loss tokens/s  {share:6.1%} of the ceiling  {peak_gib} GiB"
    ).format(**row)


def draw(table: dict[str, Any], out: Path) -> None:
    """Left: throughput of each system. Right: time against the length of the past."""
    from matplotlib.figure import Figure

    ensure_writable(out)
    rows = {row["case"]: row for row in table["rows"] if "ms" in row}
    figure = Figure(figsize=(13, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    draw_throughput(left, rows)
    draw_past(right, rows)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{table['hardware']['name']}, PyTorch {table['hardware']['torch']}", fontsize=10)
    figure.savefig(out, dpi=130)


def draw_throughput(axes: Any, rows: dict[str, dict[str, Any]]) -> None:
    from logpast.reporting.palette import SERIES

    systems = [row for case, row in rows.items() if case in SLOTS][::-1]
    for height, row in enumerate(systems):
        rate = row["loss_tokens_per_s"]
        spread = [[rate * (1 - row["ms"] / row["ms_90"])], [rate * (row["ms"] / row["ms_10"] - 1)]]
        colour = SERIES[1] if row["case"] == "nanogpt" else SERIES[0]
        axes.barh(height, rate, xerr=spread, color=colour, alpha=0.75, ecolor=SERIES[7], capsize=2)
        text = f"  {row['ms']:.1f} ms per step, {row['share']:.0%}"
        axes.text(rate * row["ms"] / row["ms_10"], height, text, va="center", fontsize=8)
    names = ["nanogpt (loss at\nall 309 positions)" if row["case"] == "nanogpt" else row["case"] for row in systems]
    axes.set_yticks(range(len(systems)), names)
    axes.set(xlabel="loss tokens per second", title="64 windows per step; % of the measured bf16 ceiling")
    axes.set_xlim(0, 1.3 * axes.get_xlim()[1])  # room for the text
    axes.xaxis.set_major_formatter("{x:,.0f}")


def draw_past(axes: Any, rows: dict[str, dict[str, Any]]) -> None:
    from logpast.reporting.palette import SERIES

    curves = (("memory, shuffled windows", SERIES[0], "o-", ("memory", "memory-65k", "memory-1m")),
              ("memory, consecutive windows", SERIES[9], "D", ("memory-1m-consecutive",)),
              ("delta, plain", SERIES[7], "s", ("delta", "plain")),
              ("full attention", SERIES[3], "^-", tuple(FULL)))  # fmt: skip
    for label, colour, style, cases in curves:
        if points := [rows[case] for case in cases if case in rows]:
            low, middle, high = (
                np.array([16384 * row[key] / row["loss_tokens"] for row in points]) for key in ("ms_10", "ms", "ms_90")
            )
            axes.errorbar([row["sees"] for row in points], middle, (np.maximum(middle - low, 0), high - middle),
                          fmt=style, color=colour, label=label, capsize=2)  # fmt: skip
    axes.set(xlabel="tokens that a window's last position can see", ylabel="ms per 16,384 loss tokens",
             title="step time with a longer past")  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x / 2**20:g}M" if x >= 2**20 else f"{x / 2**10:g}k")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.legend(frameon=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="token store or text; about 20M tokens, so that most windows have a past of 1M")
    parser.add_argument("--nanogpt", type=Path, help="a checkout of nanoGPT")
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the table; replaced")
    parser.add_argument("--plot", type=Path, help="image file for the plot")
    parser.add_argument("--cases", default=",".join(CASES), help="some of: %(default)s")
    parser.add_argument("--steps", type=int, default=30, help="timed steps per case, at most")
    parser.add_argument("--warmup", type=int, default=10, help="untimed steps per case, at most, besides the first")
    parser.add_argument("--toy", action="store_true", help="tiny models, to try the script on a CPU")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.cases, args.sizes = args.cases.split(","), TOY if args.toy else Sizes()
    if unknown := set(args.cases) - set(CASES):
        parser.error(f"unknown cases: {', '.join(sorted(unknown))}; known: {', '.join(CASES)}")
    try:
        if args.work:
            return measure_cases(args)
        if args.data:
            supervise(args)
        if not (table := read(args.out)):
            raise UserError(f"no table in {args.out}; give --data to measure one")
        print("\n".join(format_row(row) for row in table["rows"]))
        print(f"bf16 ceiling: {table['ceiling_tflops']:,} TFLOP/s; {table['data']['tokens']:,} tokens of text")
        for name, ratio in table["step_time_ratios"].items():
            print(f"step time, {name}: {ratio}")
        if args.plot:
            draw(table, args.plot)
    except UserError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
