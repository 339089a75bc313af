"""The sketch of a stream of vectors, against the memory that keeps all of them."""

import numpy as np
import pytest
import torch

from logpast import FilterBank, LogMemory, Sketch

BANK = FilterBank(slots=33, sharpness=60, normalize="area", reach=1.5)


def streams(length: int, dim: int = 3, batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, length, dim, generator=torch.Generator().manual_seed(length), dtype=torch.float64)


def sketch_of(inputs: torch.Tensor, bank: FilterBank = BANK, blocks: int = 12, moments: int = 3) -> Sketch:
    sketch = Sketch(bank, inputs.shape[2], len(inputs), blocks, moments, torch.float64)
    sketch.push(inputs)
    return sketch


def exact(inputs: torch.Tensor, bank: FilterBank = BANK) -> torch.Tensor:
    return LogMemory(inputs.shape[2], bank, norm=False, path="naive").double()(inputs)


@pytest.mark.parametrize("kernel", ["paper", "isith", "binned"])
@pytest.mark.parametrize("length", [0, 1, 11, 12, 13, 100, 383, 384, 385, 1000, 5000])
def test_difference_from_the_memory_is_within_the_bound(length: int, kernel: str) -> None:
    bank = FilterBank(slots=33, sharpness=60, kernel=kernel, normalize="area", reach=1.5)  # type: ignore[arg-type]
    inputs = streams(length)
    sketch = sketch_of(inputs, bank)
    difference = (sketch.slots() - exact(inputs, bank)).norm(dim=-1).flip(1)
    reachable = sketch.moments.shape[0] and sum(n << level for level, n in enumerate(sketch._counts(length)))
    norms = np.linalg.norm(bank.weights, axis=1)
    bound = torch.from_numpy(sketch.error() * norms) * inputs[:, length - reachable :].flatten(1).norm(dim=1)[:, None]
    assert (difference <= bound * (1 + 1e-9) + 1e-14).all()
    assert sketch.error().max() < 0.02


def test_bound_is_reached_by_the_worst_input() -> None:
    """The input that is what the projection leaves out of a filter."""
    length, slot = 1000, 20
    sketch = sketch_of(streams(length, 1, 1))
    basis = torch.eye(length, dtype=torch.float64)  # each stream has one input that is not zero
    seen = sketch_of(basis.unsqueeze(-1)).slots()[:, -1 - slot, 0]
    weights = torch.from_numpy(np.pad(BANK.weights[slot], (0, length - BANK.horizon))[::-1].copy())
    worst = weights - seen
    worst[: length - BANK.horizon - 16] = 0
    inputs = worst.view(1, -1, 1)
    difference = (sketch_of(inputs).slots() - exact(inputs))[0, -1 - slot, 0].abs()
    bound = sketch.error()[slot] * np.linalg.norm(BANK.weights[slot]) * worst.norm()
    assert difference.item() == pytest.approx(bound.item(), rel=1e-6)


def test_recent_past_and_polynomials_are_exact() -> None:
    inputs = streams(12)
    torch.testing.assert_close(sketch_of(inputs).slots(), exact(inputs), rtol=1e-12, atol=1e-14)
    bank = FilterBank(slots=20, sharpness=1e-9, kernel="paper", reach=1.5)  # constant over all lags
    inputs = streams(bank.horizon)
    whole = sketch_of(inputs, bank, moments=1)
    torch.testing.assert_close(whole.slots(), exact(inputs, bank), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("sizes", [[1] * 700, [700], [13, 0, 300, 387], [5] * 140])
def test_state_does_not_depend_on_how_the_inputs_arrive(sizes: list[int]) -> None:
    inputs = streams(700)
    sketch = Sketch(BANK, 3, 2, 12, 3, torch.float64)
    for part in inputs.split(sizes, dim=1):
        sketch.push(part)
    torch.testing.assert_close(sketch.moments, sketch_of(inputs).moments, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(("sharpness", "blocks", "moments"), [(200, 24, 2), (100, 24, 2), (200, 24, 3), (100, 16, 3)])
def test_state_is_bounded_and_the_error_small(sharpness: float, blocks: int, moments: int) -> None:
    bank = FilterBank(slots=53, sharpness=sharpness, normalize="area", reach=1.5)
    sketch, largest = Sketch(bank, 1, blocks=blocks, moments=moments), 0.0
    for sketch.length in (20_000, 33_333, 10**6, 10**9 + 7):  # as if so many inputs had arrived
        largest = max(largest, sketch.error().max())
        assert sketch.vectors <= moments * blocks * (1 + np.log2(bank.horizon / (blocks - 1)))
    assert largest < (1.5 if moments == 2 else 0.4) * 0.032 * sharpness / blocks**2


def test_horizon_at_the_last_peak_is_a_large_error() -> None:
    sketch = Sketch(FilterBank(slots=53, sharpness=200), 1)
    sketch.length = 20_000
    assert sketch.error()[-1] > 0.05
    assert sketch.error()[:-4].max() < 0.005


def test_what_is_beyond_the_horizon_is_forgotten() -> None:
    inputs = streams(3000)
    other = inputs.clone()
    other[:, : 3000 - 2 * BANK.horizon] += 1
    assert torch.equal(sketch_of(inputs).slots(), sketch_of(other).slots())


def test_gradients_reach_the_inputs() -> None:
    inputs = streams(50).requires_grad_()
    sketch_of(inputs).slots().sum().backward()
    reference = inputs.detach().requires_grad_()
    exact(reference).sum().backward()
    torch.testing.assert_close(inputs.grad, reference.grad, rtol=0.02, atol=0.002)


def test_state_is_continued() -> None:
    inputs = streams(900)
    first, again = sketch_of(inputs[:, :500]), Sketch(BANK, 3, 2, 12, 3, torch.float64)
    again.load_state(first.state())
    again.push(inputs[:, 500:])
    first.push(inputs[:, 500:])
    assert torch.equal(again.slots(), first.slots())
    torch.testing.assert_close(first.slots(), sketch_of(inputs).slots(), rtol=1e-12, atol=1e-13)


def test_half_precision_sums_in_float32() -> None:
    inputs = streams(500).bfloat16()
    sketch = Sketch(BANK, 3, 2, 12, 3, torch.bfloat16)
    sketch.push(inputs)
    assert (sketch.moments.dtype, sketch.slots().dtype) == (torch.float32, torch.bfloat16)
    torch.testing.assert_close(sketch.slots().double(), exact(inputs.double()), rtol=0.01, atol=0.01)


@pytest.mark.parametrize("shape", [(2, 5), (3, 5, 3), (2, 5, 4)])
def test_wrong_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="inputs"):
        Sketch(BANK, 3, 2).push(torch.zeros(shape))


@pytest.mark.parametrize("name", ["dim", "batch", "blocks", "moments"])
def test_impossible_sizes_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        Sketch(BANK, **({"dim": 3} | {name: 0}))


def test_state_of_another_sketch_is_refused() -> None:
    with pytest.raises(ValueError, match="moments"):
        Sketch(BANK, 3, 2, 16, 3, torch.float64).load_state(sketch_of(streams(500)).state())
