"""Linear layers in half precision for training on a GPU: the fastest cuBLASLt kernel, weight gradients in float32.

`linear` is F.linear with a float32 weight that is cast to the dtype of x. The weight's gradient stays in float32, as
the product accumulates it, instead of being rounded to half precision and cast back.

`matmul` is the matrix product. cuBLASLt offers several kernels for each product, in the order of its own estimate, and
PyTorch takes the first. On an H200 a later one is often faster, so at the first call with a shape all are timed. Only
kernels that agree with the first one bit by bit are candidates, so the choice does not change the result; most agree,
since none splits the sum over k. The library is the one that PyTorch has loaded. If it is missing or has no kernel for
a product, PyTorch computes it.
"""

from __future__ import annotations

import ctypes
from ctypes import Structure, byref, c_float, c_int, c_int64, c_size_t, c_uint32, c_uint64, c_void_p, sizeof
from functools import cache
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from logpast.kernels.ops import disabled, operator

MAX_SHAPES = 256  # limits the time for trials in a program with ever new shapes
MAX_ALGORITHMS = 8  # to try per shape
COMPARED = 2**22  # elements of the outputs that are compared: a copy of the whole output might not fit
WORKSPACE = 32 * 2**20  # bytes
DATA_TYPES = {torch.bfloat16: 14, torch.float16: 2}  # cudaDataType
FLOAT32 = 0
COMPUTE_FLOAT32 = 68  # cublasComputeType_t
TRANSPOSE_A, EPILOGUE, BIAS_POINTER = 3, 7, 8  # cublasLtMatmulDescAttributes_t
EPILOGUE_DEFAULT, EPILOGUE_BIAS = 1, 4  # cublasLtEpilogue_t
MAX_WORKSPACE, REDUCTIONS, ALIGNMENTS = 1, 3, (5, 6, 7, 8)  # cublasLtMatmulPreferenceAttributes_t; of A, B, C, D


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear in the dtype of x, half precision. The bias (out,) gets no gradient here."""
    return _Linear.apply(x, weight, bias)


def matmul(x: Tensor, weight: Tensor, bias: Tensor | None = None, transpose: bool = True) -> Tensor:
    """x (…, k) @ weight (n, k)ᵀ + bias (n,); or with `transpose=False`, x (…, n) @ weight (n, k)."""
    return torch.ops.logpast.matmul(x, weight, bias, transpose)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        weight = weight.to(x.dtype)
        ctx.save_for_backward(x, weight)
        return matmul(x, weight, None if bias is None else bias.to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        dx = dweight = None
        if ctx.needs_input_grad[1]:
            dweight = torch.ops.logpast.weight_gradient(dout.flatten(0, -2), x.flatten(0, -2))
        if ctx.needs_input_grad[0]:
            dx = matmul(dout, weight, transpose=False)
        return dx, dweight, None


@operator("weight_gradient")
def _weight_gradient(dout: Tensor, x: Tensor) -> Tensor:
    if dout.is_cuda:
        return torch.mm(dout.T, x, out_dtype=torch.float32)
    return dout.T.float() @ x.float()


@_weight_gradient.register_fake
def _(dout: Tensor, x: Tensor) -> Tensor:
    return dout.new_empty(dout.shape[1], x.shape[1], dtype=torch.float32)


@operator("matmul")
def _matmul(x: Tensor, weight: Tensor, bias: Tensor | None, transpose: bool) -> Tensor:
    if "matmul" not in disabled and fits(x, weight, bias):
        out = x.new_empty(*x.shape[:-1], weight.shape[0 if transpose else 1])
        tensors = [weight.contiguous(), x.contiguous(), out, *([] if bias is None else [bias.contiguous()])]
        plan = _plan(tensors, transpose)
        if plan is not None:
            plan.run(tensors)
            return out
    return F.linear(x, weight, bias) if transpose else x @ weight


@_matmul.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, transpose: bool) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0 if transpose else 1])


def fits(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether cuBLASLt can be called directly for these tensors."""
    tensors = [x, weight] if bias is None else [x, weight, bias]
    alike = all(t.dtype == x.dtype and t.device == x.device and t.numel() for t in tensors)
    bias_fits = bias is None or bias.shape == weight.shape[:1]
    return alike and bias_fits and x.is_cuda and x.dtype in DATA_TYPES and _library() is not None


_plans: dict[tuple[Any, ...], _Plan | None] = {}  # None: cuBLASLt has no kernel


def _plan(tensors: list[Tensor], transpose: bool) -> _Plan | None:
    weight, x, *_ = tensors
    alignment = tuple(min(256, t.data_ptr() & -t.data_ptr()) for t in tensors)
    key = x.device, x.dtype, x.numel() // x.shape[-1], *weight.shape, transpose, alignment
    if key not in _plans:
        if len(_plans) >= MAX_SHAPES:
            return None
        plan = _Plan(tensors, transpose, alignment)
        _plans[key] = plan if plan.algorithms else None
    return _plans[key]


class _HeuristicResult(Structure):
    """cublasLtMatmulHeuristicResult_t"""

    _fields_ = [
        ("algorithm", c_uint64 * 8),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    ]


class _Plan:
    """The algorithms for one shape, and which is the fastest.

    `tensors` are weight, x, out and perhaps the bias. cuBLASLt's matrices are column-major: its A, B and D are the
    transposes of weight, x and out.
    """

    def __init__(self, tensors: list[Tensor], transpose: bool, alignment: tuple[int, ...]) -> None:
        weight, x, out, *bias = tensors
        data_type = DATA_TYPES[x.dtype]
        self.handle = _handle(x.device)
        self.operation = _create("cublasLtMatmulDescCreate", c_int(COMPUTE_FLOAT32), c_int(FLOAT32))
        self._set(TRANSPOSE_A, c_int(transpose))
        self._set(EPILOGUE, c_int(EPILOGUE_BIAS if bias else EPILOGUE_DEFAULT))
        self.layouts = [_layout(data_type, t) for t in (weight, x, out)]
        if bias:
            self._set(BIAS_POINTER, c_void_p(bias[0].data_ptr()))
        self.algorithms = self._find_algorithms(alignment)
        self.best: int | None = None
        self.lock = Lock()  # all calls share the operation, which holds the pointer to the bias

    def _find_algorithms(self, alignment: tuple[int, ...]) -> list[_HeuristicResult]:
        preference = _create("cublasLtMatmulPreferenceCreate")
        values: dict[int, Any] = {MAX_WORKSPACE: c_uint64(WORKSPACE), REDUCTIONS: c_uint32(0)}
        values |= {name: c_uint32(a) for name, a in zip(ALIGNMENTS, (*alignment[:3], alignment[2]), strict=True)}
        for name, value in values.items():
            _call(
                "cublasLtMatmulPreferenceSetAttribute", preference, c_int(name), byref(value), c_size_t(sizeof(value))
            )
        found, count = (_HeuristicResult * MAX_ALGORITHMS)(), c_int()
        a, b, d = self.layouts
        status = _library().cublasLtMatmulAlgoGetHeuristic(
            self.handle, self.operation, a, b, d, d, preference, c_int(MAX_ALGORITHMS), found, byref(count)
        )
        _call("cublasLtMatmulPreferenceDestroy", preference)
        return [] if status else [result for result in found[: count.value] if result.state == 0]

    def _set(self, name: int, value: Any) -> None:
        _call("cublasLtMatmulDescSetAttribute", self.operation, c_int(name), byref(value), c_size_t(sizeof(value)))

    def run(self, tensors: list[Tensor]) -> None:
        if self.best is None and not torch.cuda.is_current_stream_capturing():
            self.best = self._fastest(tensors)
        self.run_algorithm(self.best or 0, tensors)

    def run_algorithm(self, number: int, tensors: list[Tensor]) -> None:
        weight, x, out, *bias = tensors
        chosen, (a, b, d) = self.algorithms[number], self.layouts
        workspace = torch.empty(chosen.workspace, dtype=torch.uint8, device=x.device)
        with self.lock:
            if bias:
                self._set(BIAS_POINTER, c_void_p(bias[0].data_ptr()))
            _call(
                "cublasLtMatmul",
                *(self.handle, self.operation),
                *(byref(c_float(1)), c_void_p(weight.data_ptr()), a, c_void_p(x.data_ptr()), b),
                *(byref(c_float(0)), c_void_p(out.data_ptr()), d, c_void_p(out.data_ptr()), d),
                *(byref(chosen.algorithm), c_void_p(workspace.data_ptr()), c_size_t(chosen.workspace)),
                c_void_p(torch.cuda.current_stream(x.device).cuda_stream),
            )

    def _fastest(self, tensors: list[Tensor], rounds: int = 4, repeats: int = 4) -> int:
        """The algorithm with the shortest round, of those with exactly the output of the first."""
        candidates, timings, compared = [0], [], tensors[2].flatten()[:COMPARED]
        self.run_algorithm(0, tensors)
        expected = compared.clone()
        for number in range(1, len(self.algorithms)):
            self.run_algorithm(number, tensors)
            candidates += [number] if torch.equal(compared, expected) else []
        for _ in range(rounds):
            for number in candidates:
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                torch.cuda._sleep(200_000)  # so that the GPU does not wait for the host between small products
                begin.record()
                for _ in range(repeats):
                    self.run_algorithm(number, tensors)
                end.record()
                timings.append((begin, end, number))
        torch.cuda.synchronize(tensors[0].device)
        return min((begin.elapsed_time(end), number) for begin, end, number in timings)[1]


@cache
def _library() -> Any:
    try:
        return ctypes.CDLL(f"libcublasLt.so.{str(torch.version.cuda).partition('.')[0]}")
    except OSError:
        return None


@cache
def _handle(device: torch.device) -> c_void_p:
    return _create("cublasLtCreate")


def _layout(data_type: int, tensor: Tensor) -> c_void_p:
    width = tensor.shape[-1]
    rows = tensor.numel() // width
    return _create("cublasLtMatrixLayoutCreate", c_int(data_type), c_uint64(width), c_uint64(rows), c_int64(width))


def _create(function: str, *arguments: Any) -> c_void_p:
    """The object that one of the library's functions creates."""
    created = c_void_p()
    _call(function, byref(created), *arguments)
    return created


def _call(function: str, *arguments: Any) -> None:
    status = getattr(_library(), function)(*arguments)
    if status:
        raise RuntimeError(f"{function} of cuBLASLt failed with status {status}")
