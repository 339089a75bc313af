"""The same answers on a CUDA device: `make test-gpu`."""

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

from logpast.comparison import compare as comparison
from logpast.data import TokenStore
from logpast.data.batching import Segments
from logpast.evaluation.evaluate import evaluate
from logpast.evaluation.scoring import score
from logpast.filters import FilterBank
from logpast.generation import generate
from logpast.kernels.cuda_graphs import Replay
from logpast.memory import LogMemory, naive
from logpast.models import SYSTEMS, LanguageModel, Recurrent, build
from logpast.sweeps.cell import run_cell
from logpast.training.checkpoint import find_checkpoint
from logpast.training.compile import compile_model
from logpast.training.config import TrainConfig
from logpast.training.log import read_log
from logpast.training.loop import train
from logpast.training.recipes import SHIPPED

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
RIVALS = SHIPPED / "rivals-small.yaml"
BOUNDS = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("path", ["bag", "support", "fused", "auto"])
@pytest.mark.parametrize("length", [0, 5, 8192])
def test_memory_equals_the_definition(dtype: torch.dtype, path: str, length: int) -> None:
    if path == "fused" and dtype == torch.float64:
        pytest.skip("float64 goes by another path")
    torch.manual_seed(0)
    bank = FilterBank()
    table = torch.randn(500, 24, device="cuda", dtype=dtype).requires_grad_()
    ids = torch.randint(-1, 500, (4, length), device="cuda")
    ours = LogMemory(24, bank, norm=False, path=path).to("cuda", dtype).from_ids(ids, table)  # type: ignore[arg-type]
    exact = table.detach().double().requires_grad_()
    reference = LogMemory(24, bank, norm=False, path="naive").to("cuda", torch.float64)(naive.embed(exact, ids))
    towards = torch.randn_like(reference).to(dtype)
    ours.backward(towards)
    reference.backward(towards.double())
    for mine, true in ((ours, reference), (table.grad, exact.grad)):
        error = (mine.detach().double() - true.detach()).abs().max() / true.detach().abs().max().clamp(min=1e-30)
        bound = BOUNDS[dtype] if path != "support" or dtype.itemsize > 2 else 5 * BOUNDS[dtype]
        assert float(error) < bound


@pytest.mark.parametrize("slots", [53, 65])
def test_the_fused_memory_at_full_size_compiled(slots: int) -> None:
    """bf16, the paper's sizes, through torch.compile and autocast; the same to the bit when run again."""
    torch.manual_seed(0)
    memory = LogMemory(768, FilterBank(slots=slots), norm=False).cuda()
    table = (0.02 * torch.randn(50304, 768, device="cuda")).requires_grad_()
    ids = (50304 * torch.rand(8, memory.bank.horizon, device="cuda").pow(4)).long()  # some tokens are frequent
    compiled = torch.compile(lambda: memory.from_ids(ids, table))
    towards = torch.randn(8, slots, 768, device="cuda")
    results = []
    for _ in range(2):
        with torch.autocast("cuda", torch.bfloat16):
            slots_seen = compiled()
        (gradient,) = torch.autograd.grad(slots_seen.float(), table, towards)
        results.append((slots_seen, gradient))
    assert slots_seen.dtype == torch.bfloat16
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    filters = memory.filters.double()
    exact = naive.compress_ids(filters, ids, table.detach().to(torch.bfloat16).double())
    assert float((slots_seen - exact).norm() / exact.norm()) < 3e-3
    one = table.detach().double().requires_grad_()
    naive.compress_ids(filters, ids, one).backward(towards.to(torch.bfloat16).double())
    assert one.grad is not None
    assert float((gradient - one.grad).norm() / one.grad.norm()) < 5e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("slots", [65, 130])
def test_the_fused_memory_with_many_slots(slots: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    bank = FilterBank(slots=slots, spacing=0.08)
    table = torch.randn(1000, 768, device="cuda", dtype=dtype).requires_grad_()
    ids = torch.randint(-1, 1000, (2, bank.horizon), device="cuda")
    slots_seen = LogMemory(768, bank, norm=False).cuda().from_ids(ids, table)
    exact = table.detach().double().requires_grad_()
    reference = LogMemory(768, bank, norm=False, path="naive").to("cuda", torch.float64).from_ids(ids, exact)
    towards = torch.randn_like(reference).to(dtype)
    slots_seen.backward(towards)
    reference.backward(towards.double())
    for ours, true in ((slots_seen, reference), (table.grad, exact.grad)):
        assert ours is not None
        assert true is not None
        assert float(((ours - true).norm() / true.norm()).detach()) < 2 * BOUNDS[dtype]


def test_replay_with_parts_of_a_batch(train_config: TrainConfig) -> None:
    whole = replace(train_config, accelerator="cuda", compile=True)
    parts = replace(whole, run=whole.run.with_name("parts"), micro_batch_size=5)
    for config in (whole, parts):
        train(config)
    one, other = ([r["loss"] for r in read_log(c.run) if "loss" in r] for c in (whole, parts))
    assert other == pytest.approx(one, rel=1e-4)


def test_nothing_is_collected_during_a_capture() -> None:
    """Garbage may hold an earlier graph, and freeing that would end the capture."""
    collecting, total = [], torch.zeros(3, device="cuda")

    def work(batch: Segments) -> None:
        collecting.append(gc.isenabled())
        total.add_(batch.tokens)

    replay = Replay(work)
    for number in range(6):
        replay(Segments(*[torch.full((3,), number, device="cuda")] * 3))
    assert collecting == [True, True, True, False]
    assert gc.isenabled()
    assert total.tolist() == [15] * 3


def test_the_peak_is_this_runs_own(train_config: TrainConfig, books: Path) -> None:
    """An earlier run is a cycle of objects, which stays until garbage is collected: a search's were counted."""
    left = [torch.empty(2**30, dtype=torch.uint8, device="cuda")]
    left.append(left)  # type: ignore[arg-type]
    del left
    assert run_cell(replace(train_config, accelerator="cuda"), str(books))["peak_bytes"] < 2**30


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_head_is_cross_entropy(dtype: torch.dtype) -> None:
    from logpast.kernels import cross_entropy as head

    torch.manual_seed(0)
    hidden, table = (torch.randn(n, 64, device="cuda").to(dtype).requires_grad_() for n in (300, 50304))
    targets = torch.randint(-1, 50304, (300,), device="cuda")
    towards = torch.randn(300, device="cuda")
    head.nats(hidden, table, targets).backward(towards)
    exact = [x.detach().double().requires_grad_() for x in (hidden, table)]
    logits = exact[0] @ exact[1].T
    torch.nn.functional.cross_entropy(logits, targets, ignore_index=-1, reduction="none").backward(towards.double())
    for ours, true in zip((hidden, table), exact, strict=True):
        assert ours.grad is not None
        assert true.grad is not None
        assert float((ours.grad - true.grad).norm() / true.grad.norm()) < (2e-2 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize(
    ("rows", "n", "k"),
    [(2 * 309, 768, 3072), (19776, 2304, 768), (64, 64, 4096), (4, 768, 768), (100, 40, 24), (7, 33, 5)],
)
def test_products_are_products(dtype: torch.dtype, back: bool, rows: int, n: int, k: int) -> None:
    """By whichever of the library's kernels: the choice between them, which the clock makes, must not show."""
    from logpast.kernels import matmul as products

    torch.manual_seed(0)
    x, weight = torch.randn(rows, n if back else k, device="cuda").to(dtype), torch.randn(n, k, device="cuda").to(dtype)
    bias = None if back else torch.randn(n, device="cuda").to(dtype)
    made = products.product(x, weight, bias, back)
    true = x.double() @ (weight.double() if back else weight.double().T)
    true = true if bias is None else true + bias.double()
    bound = 4e-3 if dtype == torch.bfloat16 else 5e-4
    assert float((made - true).norm() / true.norm()) < bound
    out = torch.empty_like(made)
    given = [weight, x, out, *([] if bias is None else [bias])]
    plan = products._plan(given, back)
    assert plan is not None or k % 8
    if plan is not None:
        assert plan.best is not None
        plan.by(0, given)
        assert torch.equal(out, made)
    odd = torch.randn(rows * weight.shape[0 if back else 1] + 1, device="cuda").to(dtype)[1:].view_as(x)  # unaligned
    true = odd.double() @ (weight.double() if back else weight.double().T)
    assert float((products.product(odd, weight, None, back) - true).norm() / true.norm()) < bound


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("length", "heads", "depth"), [(309, 12, 64), (512, 2, 128), (37, 3, 16), (300, 1, 32)])
def test_attention_is_attention(dtype: torch.dtype, length: int, heads: int, depth: int) -> None:
    """And the same to the bit when done again."""
    from logpast.kernels import attention

    torch.manual_seed(0)
    packed = torch.randn(3, length, 3 * heads * depth, device="cuda").to(dtype).requires_grad_()
    bias, up = torch.zeros(packed.shape[-1], device="cuda", requires_grad=True), torch.randn(3, length, heads * depth)
    assert attention.fits(packed[..., : heads * depth], heads)
    seen = []
    for _ in range(2):
        packed.grad = bias.grad = None
        mixed = attention.attend(packed, bias, heads)
        mixed.backward(up.to(mixed))
        seen.append([mixed.detach(), packed.grad, bias.grad])
    assert all(torch.equal(*both) for both in zip(*seen, strict=True))
    exact = packed.detach().double().requires_grad_()
    query, key, value = exact.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    score = (query @ key.mT / depth**0.5).masked_fill(~torch.ones(length, length, device="cuda").tril().bool(), -1e9)
    true = (score.softmax(-1) @ value).transpose(1, 2).flatten(2)
    true.backward(up.to(true))
    assert exact.grad is not None
    for ours, right in zip(seen[0], (true.detach(), exact.grad, exact.grad.sum((0, 1))), strict=True):
        assert float((ours - right).norm() / right.norm()) < (1e-2 if dtype == torch.bfloat16 else 2e-3)


def test_a_block_is_that_of_the_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPT-2 Small's sizes under autocast: costs and gradients with our kernels and without, against float32."""
    from logpast.kernels import attention, gelu
    from logpast.kernels import layer_norm as norm
    from logpast.models import RecentConfig, build

    torch.manual_seed(0)
    model = build(RecentConfig(layers=2, vocabulary=1024)).cuda()
    ids = torch.randint(0, 1024, (8, 310), device="cuda")

    def gradients(low: bool) -> list[Tensor]:
        model.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=low):
            model(ids[:, :53], ids[:, 53:-1], ids[:, 54:]).mean().backward()
        return [p.grad.double() for p in model.parameters() if p.grad is not None]

    exact, ours = gradients(low=False), gradients(low=True)
    for module in (attention, gelu, norm):
        monkeypatch.setattr(module, "fits", lambda *given: False)
    theirs = gradients(low=True)
    for true, one, other in zip(exact, ours, theirs, strict=True):
        off, usual = ((some - true).norm() for some in (one, other))
        assert off <= 1.5 * usual + 1e-3 * true.norm()


def trains_alike(cpu: TrainConfig, gpu: TrainConfig, tolerance: float) -> None:
    """From two seeds: where it is compiled, the second run takes over the model of the first."""
    for seed in (0, 1):
        both = [
            replace(config, seed=seed, run=config.run.with_name(f"{place}{seed}"))
            for place, config in (("cpu", cpu), ("gpu", gpu))
        ]
        for config in both:
            train(config)
        here, there = ([record["loss"] for record in read_log(c.run) if "loss" in record] for c in both)
        assert there == pytest.approx(here, rel=tolerance if gpu.precision == "32-true" else 2e-2)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("compile", [False, True])
def test_training_is_that_of_the_cpu(
    train_config: TrainConfig, precision: str, compile: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In half precision with our kernels, for which the model is wide enough."""
    from logpast.kernels import attention, gelu
    from logpast.kernels import layer_norm as norm

    took = {}
    for module in (attention, gelu, norm):
        fits = module.fits

        def asked(*given: object, fits: Callable[..., bool] = fits, name: str = module.__name__) -> bool:
            took[name] = took.get(name, False) or fits(*given)
            return fits(*given)

        if not compile:
            monkeypatch.setattr(module, "fits", asked)
    config = replace(train_config, model=replace(train_config.model, width=32))
    trains_alike(config, replace(config, accelerator="cuda", precision=precision, compile=compile), 1e-4)  # type: ignore[arg-type]
    assert compile or set(took.values()) == {precision == "bf16-mixed"}


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("system", [name for name in SYSTEMS if name not in ("log_memory", "recent")])
def test_rivals_train_as_on_the_cpu(train_config: TrainConfig, system: str, precision: str) -> None:
    """Compiled, and replayed with the state that they carry."""
    sizes = {"window": 8, "layers": 2, "heads": 2, "width": 16, "segments": 2}
    config = replace(train_config, model=SYSTEMS[system].Config(**sizes), batch_size=3)
    trains_alike(config, replace(config, accelerator="cuda", precision=precision), 1e-3)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", yaml.safe_load(RIVALS.read_text())["systems"])
def test_a_compiled_system_has_the_gradients_of_a_plain_one(train_config: TrainConfig, name: str) -> None:
    """At the sizes of a comparison: the compiler was wrong at these, and right at the small ones of the other tests."""
    store = TokenStore.in_memory([np.zeros(100_000, np.int64)], size=50257, eot=50256)
    rivals = {each.name: each.model for each in comparison._contestants(comparison._read(RIVALS), store)}
    config = replace(rivals[name], layers=2, vocabulary=1024)
    torch.manual_seed(0)
    plain = build(config).cuda()
    fast = compile_model(copy.deepcopy(plain), train_config, torch.device("cuda"))
    shape = (8, getattr(config, "segments", 1), config.window)
    past, tokens, targets = (torch.randint(0, 1024, shape, device="cuda") for _ in range(3))
    fresh = torch.zeros(shape[:2], dtype=torch.bool, device="cuda")
    history = torch.randint(0, 1024, (8, plain.history), device="cuda", dtype=torch.int32)

    def gradients(model: LanguageModel, low: bool) -> list[Tensor]:
        with torch.autocast("cuda", torch.bfloat16, enabled=low):
            if isinstance(model, Recurrent):
                _, state, _ = model(past, targets, fresh, model.start(8))
                nats, _, extra = model(tokens, targets, fresh, state)
                loss = nats.mean() + extra.mean()
            else:
                loss = model(history, tokens[:, 0], targets[:, 0]).mean()
        return list(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True))

    exact, usual, ours = gradients(plain, False), gradients(plain, True), gradients(fast, True)
    for true, one, other in zip(exact, usual, ours, strict=True):
        if true is not None:
            assert (other - true).norm() <= 2 * (one - true).norm() + 1e-3 * true.norm()


def test_resuming_goes_on_with_the_optimizer(train_config: TrainConfig) -> None:
    config = replace(train_config, accelerator="cuda", keep=10)
    train(config)
    middle = find_checkpoint(config.run / "checkpoints" / "step-00000012")
    again = replace(config, run=config.run.with_name("again"), resume=str(middle.path))
    train(again)
    whole, resumed = (find_checkpoint(c.run, "latest").weights() for c in (config, again))
    for name in whole:
        torch.testing.assert_close(resumed[name], whole[name], rtol=1e-3, atol=1e-5)


def test_scoring_is_that_of_the_cpu(train_config: TrainConfig, store: TokenStore) -> None:
    train(replace(train_config, steps=10))
    results = {
        (device, size): evaluate(train_config.run, str(store.path), device=device, batch_size=size)["nats"]
        for device in ("cpu", "cuda")
        for size in (1, 7, 64)
    }
    assert list(results.values()) == pytest.approx([results["cpu", 1]] * 6, rel=1e-6)
    rough = evaluate(train_config.run, str(store.path), device="cuda", precision="bfloat16")["nats"]
    assert math.isclose(rough, results["cpu", 1], rel_tol=1e-2)


@pytest.mark.parametrize("system", [name for name, kind in SYSTEMS.items() if issubclass(kind, Recurrent)])
def test_scoring_what_reads_on_is_that_of_the_cpu(system: str) -> None:
    """Replayed, with streams that end one after the other."""
    torch.manual_seed(0)
    store = TokenStore.in_memory([torch.randint(0, 60, (n,)).numpy() for n in (90, 400, 7, 60, 333, 64)], 61, 60)
    model = build(SYSTEMS[system].Config(window=8, layers=2, heads=2, width=16), 61)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    here = score(model, store, 8, 0, 5, "document")
    model.cuda()
    for size in (1, 5, 64):
        there = score(model, store, 8, 0, size, "document", "cuda")
        np.testing.assert_allclose(there, here, rtol=1e-3, atol=1e-4)
        assert math.isclose(there.sum(), here.sum(), rel_tol=1e-5)
    with torch.autocast("cuda", torch.bfloat16):
        rough = score(model, store, 8, 0, 5, "document", "cuda")
    assert math.isclose(rough.sum(), here.sum(), rel_tol=1e-2)


def test_generation_runs_there(train_config: TrainConfig) -> None:
    train(replace(train_config, steps=5))
    texts = [generate(train_config.run, "And God", tokens=20, temperature=0, device=d) for d in ("cpu", "cuda")]
    assert texts[0] == texts[1]


def test_bank_moves_with_the_module() -> None:
    memory = LogMemory(8, FilterBank(slots=9)).cuda().half()
    assert memory.filters.is_cuda
    assert memory.filters.dtype == torch.float32
    exact = memory.bank.weights[::-1, ::-1].astype(np.float32)
    assert (memory.filters.cpu().numpy() == exact).all()
