"""Results on a CUDA device equal those on a CPU and the definitions: `make test-gpu`."""

import copy
import gc
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor
from torch.nn import functional as F

from logpast.data import TokenStore
from logpast.data.batching import Batch, Segments
from logpast.evaluation.evaluate import evaluate
from logpast.evaluation.scoring import score
from logpast.filters import FilterBank
from logpast.generation import generate
from logpast.kernels.cuda_graphs import Replay
from logpast.kernels.dispatch import disable
from logpast.memory import LogMemory, naive
from logpast.models import SYSTEMS, LanguageModel, RecentConfig, Recurrent, build
from logpast.sweeps.cell import run_cell
from logpast.training.checkpoint import find_checkpoint
from logpast.training.compile import compile_model
from logpast.training.config import OptimizerConfig, TrainConfig
from logpast.training.log import read_log
from logpast.training.loop import train
from logpast.training.recipes import SHIPPED
from memory.helpers import HISTORIES, TABLES, TRANSFORMS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
RIVALS = SHIPPED / "rivals-small.yaml"
BOUNDS = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def relative(ours: Tensor | None, exact: Tensor | None) -> float:
    assert ours is not None
    assert exact is not None
    return float((ours.detach() - exact.detach()).norm() / exact.detach().norm())


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("path", ["bag", "support", "fused", "auto"])
@pytest.mark.parametrize("length", [0, 5, 8192])
def test_memory_equals_its_definition(dtype: torch.dtype, path: str, length: int) -> None:
    if path == "fused" and dtype == torch.float64:
        pytest.skip("the fused path has no float64")
    torch.manual_seed(0)
    bank = FilterBank()
    table = torch.randn(500, 24, device="cuda", dtype=dtype).requires_grad_()
    ids = torch.randint(-1, 500, (4, length), device="cuda")
    ours = LogMemory(24, bank, norm=False, path=path).to("cuda", dtype).from_ids(ids, table)  # type: ignore[arg-type]
    exact = table.detach().double().requires_grad_()
    reference = LogMemory(24, bank, norm=False, path="naive").to("cuda", torch.float64)(naive.embed(exact, ids))
    upstream = torch.randn_like(reference).to(dtype)
    ours.backward(upstream)
    reference.backward(upstream.double())
    for mine, true in ((ours, reference), (table.grad, exact.grad)):
        error = (mine.detach().double() - true.detach()).abs().max() / true.detach().abs().max().clamp(min=1e-30)
        bound = BOUNDS[dtype] if path != "support" or dtype.itemsize > 2 else 5 * BOUNDS[dtype]
        assert float(error) < bound


@pytest.mark.parametrize("slots", [53, 65])
def test_compiled_fused_memory_at_full_size_is_exact_and_bit_reproducible(slots: int) -> None:
    """bf16 at the paper's sizes, with torch.compile and autocast."""
    torch.manual_seed(0)
    memory = LogMemory(768, FilterBank(slots=slots), norm=False).cuda()
    table = (0.02 * torch.randn(50304, 768, device="cuda")).requires_grad_()
    ids = (50304 * torch.rand(8, memory.bank.horizon, device="cuda").pow(4)).long()  # some tokens are frequent
    compiled = torch.compile(lambda: memory.from_ids(ids, table))
    upstream = torch.randn(8, slots, 768, device="cuda")
    results = []
    for _ in range(2):
        with torch.autocast("cuda", torch.bfloat16):
            out = compiled()
        (gradient,) = torch.autograd.grad(out.float(), table, upstream)
        results.append((out, gradient))
    assert out.dtype == torch.bfloat16
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    filters = torch.from_numpy(naive.in_time_order(memory.bank)).cuda()
    exact = naive.compress_ids(filters, ids, table.detach().to(torch.bfloat16).double())
    assert relative(out, exact) < 3e-3
    exact_table = table.detach().double().requires_grad_()
    naive.compress_ids(filters, ids, exact_table).backward(upstream.to(torch.bfloat16).double())
    assert relative(gradient, exact_table.grad) < 5e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("slots", [65, 130])
def test_fused_memory_with_many_slots(slots: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    bank = FilterBank(slots=slots, spacing=0.08)
    table = torch.randn(1000, 768, device="cuda", dtype=dtype).requires_grad_()
    ids = torch.randint(-1, 1000, (2, bank.horizon), device="cuda")
    out = LogMemory(768, bank, norm=False).cuda().from_ids(ids, table)
    exact = table.detach().double().requires_grad_()
    reference = LogMemory(768, bank, norm=False, path="naive").to("cuda", torch.float64).from_ids(ids, exact)
    upstream = torch.randn_like(reference).to(dtype)
    out.backward(upstream)
    reference.backward(upstream.double())
    assert relative(out, reference) < 2 * BOUNDS[dtype]
    assert relative(table.grad, exact.grad) < 2 * BOUNDS[dtype]


@pytest.mark.parametrize("path", ["naive", "bag", "support"])
def test_memory_filters_are_on_the_device_of_the_table_and_float32(path: str) -> None:
    """The slots of an identity matrix are the filters."""
    memory = LogMemory(16, FilterBank(slots=17), norm=False, path=path).half()  # type: ignore[arg-type]
    slots = memory.from_ids(torch.arange(16, device="cuda").unsqueeze(0), torch.eye(16, device="cuda"))
    exact = torch.from_numpy(naive.in_time_order(memory.bank))
    torch.testing.assert_close(slots[0].cpu().double(), exact, rtol=1e-6, atol=1e-18)


@pytest.mark.parametrize("scale", [0.02, 1, 1000])
@pytest.mark.parametrize("path", ["naive", "bag", "support", "fused"])
def test_normalised_slots_of_short_and_padded_histories_equal_the_definition(path: str, scale: float) -> None:
    """The LayerNorm magnifies the slots of filters whose largest weights are not in sight."""
    torch.manual_seed(0)
    bank = FilterBank()
    table, ids = scale * torch.randn(500, 64, device="cuda"), torch.randint(500, (8, bank.horizon), device="cuda")
    for row, length in enumerate((0, 1, 7, 53, 300, 1000, 4096)):
        ids[row, : bank.horizon - length] = -1
    ids[7, 300:] = -1
    exact = LogMemory(64, bank, path="naive").to("cuda", torch.float64)
    ours = LogMemory(64, bank, path=path).cuda()  # type: ignore[arg-type]
    for some in (ids, ids[:, -1000:]):
        error = ours.from_ids(some, table) - exact.from_ids(some, table.double())
        assert error.abs().max() < 1e-5


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_torch_func_on_a_gpu_equals_naive(transform: str) -> None:
    ours, exact = (LogMemory(3, FilterBank(slots=5), norm=False, path=path) for path in ("auto", "naive"))  # type: ignore[arg-type]
    ids, tables = HISTORIES.cuda(), TABLES.cuda().float()
    results = [TRANSFORMS[transform](memory, ids, tables) for memory in (ours, exact)]
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


def test_memory_of_a_model_from_the_meta_device_in_a_cuda_graph() -> None:
    """The filters are made in the warm-up and stay where they are; the replay reads them."""
    torch.manual_seed(0)
    with torch.device("meta"):
        memory = LogMemory(8, FilterBank(slots=33))
    memory.load_state_dict(LogMemory(8, memory.bank).cuda().state_dict(), assign=True)
    table = torch.randn(50, 8, device="cuda")
    replay = Replay(lambda batch: memory.from_ids(batch.history, table))
    for _ in range(8):
        ids = torch.randint(-1, 50, (2, 256), device="cuda")
        assert torch.equal(replay(Batch(ids, ids, ids)), memory.from_ids(ids, table))


def test_the_fused_memory_never_waits_for_the_gpu() -> None:
    memory = LogMemory(8, FilterBank(slots=33)).cuda()
    table, ids = torch.randn(50, 8, device="cuda", requires_grad=True), torch.randint(50, (2, 256), device="cuda")
    memory.from_ids(ids, table).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        memory.from_ids(ids, table).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_linear_cross_entropy_gradients_equal_pytorch(dtype: torch.dtype) -> None:
    from logpast.kernels.cross_entropy import linear_cross_entropy

    torch.manual_seed(0)
    hidden, weight = (torch.randn(n, 64, device="cuda").to(dtype).requires_grad_() for n in (300, 50304))
    targets = torch.randint(-1, 50304, (300,), device="cuda")
    upstream = torch.randn(300, device="cuda")
    linear_cross_entropy(hidden, weight, targets).backward(upstream)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    loss = F.cross_entropy(exact[0] @ exact[1].T, targets, ignore_index=-1, reduction="none")
    loss.backward(upstream.double())
    for ours, true in zip((hidden, weight), exact, strict=True):
        assert relative(ours.grad, true.grad) < (2e-2 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("transpose", [True, False])
@pytest.mark.parametrize(
    ("rows", "n", "k"),
    [(2 * 309, 768, 3072), (19776, 2304, 768), (64, 64, 4096), (4, 768, 768), (100, 40, 24), (7, 33, 5)],
)
def test_matmul_is_exact_whichever_kernel_is_fastest(
    dtype: torch.dtype, transpose: bool, rows: int, n: int, k: int
) -> None:
    """The fastest kernel gives the bits of the library's first one."""
    from logpast.kernels import matmul

    torch.manual_seed(0)
    x = torch.randn(rows, k if transpose else n, device="cuda").to(dtype)
    weight = torch.randn(n, k, device="cuda").to(dtype)
    bias = torch.randn(n, device="cuda").to(dtype) if transpose else None
    bound = 4e-3 if dtype == torch.bfloat16 else 5e-4
    exact_weight = weight.double().T if transpose else weight.double()
    product = matmul.matmul(x, weight, bias, transpose)
    assert relative(product, x.double() @ exact_weight + (0 if bias is None else bias.double())) < bound
    out = torch.empty_like(product)
    tensors = [weight, x, out, *([] if bias is None else [bias])]
    plan = matmul._plan(tensors, transpose)
    assert plan is not None or k % 8
    if plan is not None:
        assert plan.best is not None
        plan.run_algorithm(0, tensors)
        assert torch.equal(out, product)
    unaligned = torch.randn(x.numel() + 1, device="cuda").to(dtype)[1:].view_as(x)
    assert relative(matmul.matmul(unaligned, weight, None, transpose), unaligned.double() @ exact_weight) < bound


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("length", "heads", "head_dim"), [(309, 12, 64), (512, 2, 128), (37, 3, 16), (300, 1, 32)])
def test_attention_is_exact_and_bit_reproducible(dtype: torch.dtype, length: int, heads: int, head_dim: int) -> None:
    from logpast.kernels import attention

    torch.manual_seed(0)
    qkv = torch.randn(3, length, 3 * heads * head_dim, device="cuda").to(dtype).requires_grad_()
    bias = torch.zeros(qkv.shape[-1], device="cuda", requires_grad=True)
    upstream = torch.randn(3, length, heads * head_dim)
    assert attention.fits(qkv[..., : heads * head_dim], heads)
    results = []
    for _ in range(2):
        qkv.grad = bias.grad = None
        out = attention.attend(qkv, bias, heads)
        out.backward(upstream.to(out))
        results.append([out.detach(), qkv.grad, bias.grad])
    assert all(torch.equal(*both) for both in zip(*results, strict=True))
    exact = qkv.detach().double().requires_grad_()
    q, k, v = exact.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    future = ~torch.ones(length, length, device="cuda").tril().bool()
    score = (q @ k.mT / head_dim**0.5).masked_fill(future, -1e9)
    reference = (score.softmax(-1) @ v).transpose(1, 2).flatten(2)
    reference.backward(upstream.to(reference))
    assert exact.grad is not None
    for ours, true in zip(results[0], (reference, exact.grad, exact.grad.sum((0, 1))), strict=True):
        assert relative(ours, true) < (1e-2 if dtype == torch.bfloat16 else 2e-3)


def test_gradients_with_kernels_are_as_exact_as_those_of_pytorch() -> None:
    """Blocks of GPT-2 Small under autocast, both compared with float32."""
    torch.manual_seed(0)
    model = build(RecentConfig(layers=2, vocabulary=1024)).cuda()
    ids = torch.randint(0, 1024, (8, 310), device="cuda")

    def gradients(autocast: bool) -> list[Tensor]:
        model.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            model(ids[:, :53], ids[:, 53:-1], ids[:, 54:]).mean().backward()
        return [p.grad.double() for p in model.parameters() if p.grad is not None]

    exact, ours = gradients(autocast=False), gradients(autocast=True)
    with disable("attention", "gelu", "layer_norm"):
        theirs = gradients(autocast=True)
    for true, one, other in zip(exact, ours, theirs, strict=True):
        our_error, their_error = ((some - true).norm() for some in (one, other))
        assert our_error <= 1.5 * their_error + 1e-3 * true.norm()


def test_replay_with_micro_batches_has_the_losses_of_whole_batches(train_config: TrainConfig) -> None:
    whole = replace(train_config, accelerator="cuda", compile=True)
    parts = replace(whole, run=whole.run.with_name("parts"), micro_batch_size=5)
    for config in (whole, parts):
        train(config)
    one, other = ([r["loss"] for r in read_log(c.run) if "loss" in r] for c in (whole, parts))
    assert other == pytest.approx(one, rel=1e-4)


def test_replay_copies_each_batch_and_captures_without_garbage_collection() -> None:
    """Garbage may hold an earlier graph; to free it would end the capture with an error."""
    collecting, total = [], torch.zeros(3, device="cuda")

    def add(batch: Segments) -> None:
        collecting.append(gc.isenabled())
        total.add_(batch.tokens)

    replay = Replay(add)
    for number in range(6):
        replay(Segments(*[torch.full((3,), number, device="cuda")] * 3))
    assert collecting == [True, True, True, False]
    assert gc.isenabled()
    assert total.tolist() == [15] * 3


def test_peak_memory_of_a_run_leaves_out_garbage_of_earlier_runs(train_config: TrainConfig, books: Path) -> None:
    """An earlier run is a cycle of objects, which stays in memory until garbage is collected."""
    garbage = [torch.empty(2**30, dtype=torch.uint8, device="cuda")]
    garbage.append(garbage)  # type: ignore[arg-type]
    del garbage
    assert run_cell(replace(train_config, accelerator="cuda"), str(books))["peak_bytes"] < 2**30


def assert_equal_losses(cpu: TrainConfig, gpu: TrainConfig, tolerance: float) -> None:
    """Trains from two seeds on both devices."""
    for seed in (0, 1):
        both = [
            replace(config, seed=seed, run=config.run.with_name(f"{device}{seed}"))
            for device, config in (("cpu", cpu), ("gpu", gpu))
        ]
        for config in both:
            train(config)
        cpu_losses, gpu_losses = ([record["loss"] for record in read_log(c.run) if "loss" in record] for c in both)
        assert gpu_losses == pytest.approx(cpu_losses, rel=tolerance if gpu.precision == "32-true" else 2e-2)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("compile", [False, True])
def test_training_has_the_losses_of_the_cpu(
    train_config: TrainConfig, precision: str, compile: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is wide enough for the kernels, which half precision uses."""
    from logpast.kernels import attention, gelu, layer_norm

    used = {}
    for module in (attention, gelu, layer_norm):
        fits = module.fits

        def recorded(*args: object, fits: Callable[..., bool] = fits, name: str = module.__name__) -> bool:
            used[name] = used.get(name, False) or fits(*args)
            return fits(*args)

        if not compile:
            monkeypatch.setattr(module, "fits", recorded)
    config = replace(train_config, model=replace(train_config.model, width=32))
    assert_equal_losses(config, replace(config, accelerator="cuda", precision=precision, compile=compile), 1e-4)  # type: ignore[arg-type]
    assert compile or set(used.values()) == {precision == "bf16-mixed"}


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("system", [name for name in SYSTEMS if name not in ("log_memory", "recent")])
def test_training_of_baselines_has_the_losses_of_the_cpu(
    train_config: TrainConfig, system: str, precision: str
) -> None:
    """Compiled and as a CUDA graph, with the state that they carry."""
    sizes = {"window": 8, "layers": 2, "heads": 2, "width": 16, "segments": 2}
    config = replace(train_config, model=SYSTEMS[system].Config(**sizes), batch_size=3)
    assert_equal_losses(config, replace(config, accelerator="cuda", precision=precision), 1e-3)  # type: ignore[arg-type]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("system", ["log_memory", "recent", "transformer_xl"])
def test_training_with_recall_has_the_losses_of_the_cpu(train_config: TrainConfig, system: str, precision: str) -> None:
    """Compiled and as a CUDA graph."""
    model = SYSTEMS[system].Config(window=8, layers=2, heads=2, width=32, recall=200)
    config = replace(train_config, model=model)
    assert_equal_losses(config, replace(config, accelerator="cuda", precision=precision), 1e-3)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", yaml.safe_load(RIVALS.read_text())["systems"])
def test_compiled_system_has_the_gradients_of_the_plain_one(train_config: TrainConfig, name: str) -> None:
    """At the sizes of a comparison, some of which PyTorch 2.11 compiled wrongly; the other tests have small models."""
    from logpast.comparison.recipe import read_recipe
    from logpast.comparison.systems import equal_systems

    store = TokenStore.in_memory([np.zeros(100_000, np.int64)], size=50257, eot=50256)
    systems = {system.name: system.model for system in equal_systems(read_recipe(RIVALS), store)}
    config = replace(systems[name], layers=2, vocabulary=1024)
    torch.manual_seed(0)
    plain = build(config).cuda()
    compiled = compile_model(copy.deepcopy(plain), torch.device("cuda"))
    shape = (8, getattr(config, "segments", 1), config.window)
    past, tokens, targets = (torch.randint(0, 1024, shape, device="cuda") for _ in range(3))
    fresh = torch.zeros(shape[:2], dtype=torch.bool, device="cuda")
    history = torch.randint(0, 1024, (8, plain.history), device="cuda", dtype=torch.int32)

    def gradients(model: LanguageModel, autocast: bool) -> list[Tensor]:
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            if isinstance(model, Recurrent):
                _, state, _ = model(past, targets, fresh, model.start(8))
                nats, _, extra = model(tokens, targets, fresh, state)
                loss = nats.mean() + extra.mean()
            else:
                loss = model(history, tokens[:, 0], targets[:, 0]).mean()
        return list(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True))

    exact, usual, ours = gradients(plain, False), gradients(plain, True), gradients(compiled, True)
    for true, one, other in zip(exact, usual, ours, strict=True):
        if true is not None:
            assert (other - true).norm() <= 2 * (one - true).norm() + 1e-3 * true.norm()


@pytest.mark.parametrize(
    ("freeze", "trained"),
    [(["!memory"], "memory"), (["!blocks.1.mlp_in"], "blocks.1.mlp_in"), (["blocks", "positions", "table"], "")],
)
def test_frozen_parameters_keep_their_values_in_a_compiled_cuda_graph(
    train_config: TrainConfig, freeze: list[str], trained: str
) -> None:
    config = replace(train_config, accelerator="cuda", precision="bf16-mixed", freeze=freeze, steps=8)
    train(replace(config, run=config.run.with_name("initial"), optimizer=OptimizerConfig(0, 0, 0)))
    train(config)
    before, after = (find_checkpoint(run, "latest").weights() for run in (config.run.with_name("initial"), config.run))
    changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert changed == {name for name in after if name.startswith(trained or ("memory", "norm"))}


def test_resumed_training_continues_with_the_optimizer_state(train_config: TrainConfig) -> None:
    config = replace(train_config, accelerator="cuda", keep=10)
    train(config)
    middle = find_checkpoint(config.run / "checkpoints" / "step-00000012")
    again = replace(config, run=config.run.with_name("again"), resume=str(middle.path))
    train(again)
    whole, resumed = (find_checkpoint(c.run, "latest").weights() for c in (config, again))
    for name in whole:
        torch.testing.assert_close(resumed[name], whole[name], rtol=1e-3, atol=1e-5)


def test_scores_equal_those_of_the_cpu_for_every_batch_size(train_config: TrainConfig, store: TokenStore) -> None:
    train(replace(train_config, steps=10))
    nats = {
        (device, size): evaluate(train_config.run, str(store.path), device=device, batch_size=size)["nats"]
        for device in ("cpu", "cuda")
        for size in (1, 7, 64)
    }
    assert list(nats.values()) == pytest.approx([nats["cpu", 1]] * 6, rel=1e-6)
    bf16 = evaluate(train_config.run, str(store.path), device="cuda", precision="bfloat16")["nats"]
    assert math.isclose(bf16, nats["cpu", 1], rel_tol=1e-2)


@pytest.mark.parametrize("recall", [0, 50])
@pytest.mark.parametrize("system", [name for name, kind in SYSTEMS.items() if issubclass(kind, Recurrent)])
def test_scores_of_recurrent_systems_equal_those_of_the_cpu(system: str, recall: int) -> None:
    """As a CUDA graph, with streams of different lengths."""
    torch.manual_seed(0)
    store = TokenStore.in_memory([torch.randint(0, 60, (n,)).numpy() for n in (90, 400, 7, 60, 333, 64)], 61, 60)
    model = build(SYSTEMS[system].Config(window=8, layers=2, heads=2, width=16, recall=recall), 61)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    form = model.config.recall_form
    cpu = score(model, store, 8, 0, 5, "document", recall=form)
    model.cuda()
    for size in (1, 5, 64):
        gpu = score(model, store, 8, 0, size, "document", "cuda", recall=form)
        np.testing.assert_allclose(gpu, cpu, rtol=1e-3, atol=1e-4)
        assert math.isclose(gpu.sum(), cpu.sum(), rel_tol=1e-5)
    with torch.autocast("cuda", torch.bfloat16):
        bf16 = score(model, store, 8, 0, 5, "document", "cuda", recall=form)
    assert math.isclose(bf16.sum(), cpu.sum(), rel_tol=1e-2)


def test_generated_text_equals_that_of_the_cpu(train_config: TrainConfig) -> None:
    train(replace(train_config, steps=5))
    texts = [generate(train_config.run, "And God", tokens=20, temperature=0, device=d) for d in ("cpu", "cuda")]
    assert texts[0] == texts[1]
