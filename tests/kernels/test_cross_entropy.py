from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.helpers import BOUNDS, check_operator, relative

pytest.importorskip("triton", reason="Triton is for Linux")
from logpast.kernels import cross_entropy

TARGETS = torch.tensor([3, -1, 0, 19, 7])


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("vocabulary", [3, 2048, 5003])
def test_loss_and_gradients_equal_pytorch(dtype: torch.dtype, vocabulary: int) -> None:
    torch.manual_seed(0)
    hidden, weight = (torch.randn(n, 12).to(dtype).requires_grad_() for n in (7, vocabulary))
    targets = torch.randint(0, vocabulary, (7,))
    targets[[2, 5]] = -1
    upstream = torch.randn(7)
    loss = cross_entropy.linear_cross_entropy(hidden, weight, targets)
    loss.backward(upstream)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    reference = F.cross_entropy(exact[0] @ exact[1].T, targets, ignore_index=-1, reduction="none")
    reference.backward(upstream.double())
    assert loss.dtype == torch.float32
    assert loss[2] == loss[5] == 0
    assert relative(loss, reference) < BOUNDS[dtype]
    for ours, true in zip((hidden, weight), exact, strict=True):
        assert ours.grad is not None
        assert true.grad is not None
        assert relative(ours.grad, true.grad) < BOUNDS[dtype]


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("vocabulary", [3, 2048, 5003])
def test_loss_from_logits_equals_pytorch_and_leaves_the_logits(dtype: torch.dtype, vocabulary: int) -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(7, vocabulary).to(dtype), torch.randint(0, vocabulary, (7,))
    targets[[2, 5]] = -1
    before = logits.clone()
    exact = F.cross_entropy(logits.double(), targets, ignore_index=-1, reduction="none")
    assert relative(cross_entropy.cross_entropy(logits, targets), exact) < BOUNDS[dtype]
    assert torch.equal(logits, before)


@pytest.mark.interpreter
def test_targets_of_any_stride() -> None:
    hidden, weight, ids = torch.randn(4, 6), torch.randn(9, 6), torch.tensor([[0, 3], [1, 8], [2, -1], [3, 4]])
    strided = cross_entropy.linear_cross_entropy(hidden, weight, ids[:, 1])
    assert torch.equal(strided, cross_entropy.linear_cross_entropy(hidden, weight, ids[:, 1].clone()))


@pytest.mark.interpreter
def test_target_beyond_the_vocabulary_is_an_error() -> None:
    hidden, weight, targets = torch.randn(4, 6), torch.randn(9, 6), torch.tensor([0, 9, 1, 2])
    with pytest.raises(RuntimeError):
        cross_entropy.linear_cross_entropy(hidden, weight, targets)
    with pytest.raises(RuntimeError):
        cross_entropy.cross_entropy(hidden @ weight.T, targets)


@pytest.mark.interpreter
def test_operators_are_registered_correctly() -> None:
    hidden, weight = torch.randn(5, 6, requires_grad=True), torch.randn(20, 6, requires_grad=True)
    check_operator("linear_cross_entropy", hidden, weight, TARGETS)
    check_operator("cross_entropy", torch.randn(5, 20), TARGETS, differentiable=False)


@pytest.mark.interpreter
def test_autocast_does_not_round_the_logits() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        _, dlogits = torch.ops.logpast.linear_cross_entropy(torch.randn(5, 6), torch.randn(20, 6), TARGETS)
    assert dlogits.dtype == torch.float32


def test_fits_everything_but_float64_on_a_gpu(on_gpu: Callable[..., Tensor]) -> None:
    assert cross_entropy.fits(on_gpu(5, 6))
    assert cross_entropy.fits(on_gpu(5, 6, dtype=torch.float32))
    assert not cross_entropy.fits(on_gpu(5, 6, dtype=torch.float64))
    assert not cross_entropy.fits(torch.empty(5, 6))
