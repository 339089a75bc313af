"""Large products in half precision, for training on a GPU: by the fastest of the kernels that cuBLASLt has for them.

cuBLASLt offers several kernels for a product, those first that it takes to be fast; PyTorch uses the first. On an H200
a later one is often faster, so the first time that a product of some shape is wanted, all are tried. Only those that
agree with the first to the bit are taken, so that the choice, made by the clock, changes no result; as none splits the
sum that an entry is, they usually do.

The library is the one that PyTorch has loaded. Where it is not found, or has nothing for a product, PyTorch does it.
"""

from __future__ import annotations

import ctypes
from ctypes import Structure, byref, c_float, c_int, c_int64, c_size_t, c_uint32, c_uint64, c_void_p, sizeof
from functools import cache
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from logpast.kernels.ops import disabled, operator

MOST_SHAPES = 256  # a program whose shapes never stay the same need not wait for more trials than that
CHOICES = 8
COMPARED = 2**22  # entries of the results by which choices are compared: a copy of all might not fit
WORKSPACE = 32 * 2**20
TYPES = {torch.bfloat16: 14, torch.float16: 2}  # cudaDataType
FLOAT = 0
COMPUTE_FLOAT = 68  # cublasComputeType_t
TRANSPOSE_A, EPILOGUE, BIAS_POINTER = 3, 7, 8  # cublasLtMatmulDescAttributes_t
PLAIN, WITH_BIAS = 1, 4  # cublasLtEpilogue_t
MOST_WORKSPACE, REDUCTIONS, ALIGNMENTS = 1, 3, (5, 6, 7, 8)  # cublasLtMatmulPreferenceAttributes_t; of A, B, C, D


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None, back: bool = False) -> Tensor:
    """x (…, k) times the transpose of weight (n, k), and bias (n,); or `back`: x (…, n) times weight (n, k)."""
    return torch.ops.logpast.product(x, weight, bias, back)


@operator("product")
def _product(x: Tensor, weight: Tensor, bias: Tensor | None, back: bool) -> Tensor:
    biases = [] if bias is None else [bias.contiguous()]
    alike = all(t.dtype == x.dtype and t.device == x.device and t.numel() for t in (x, weight, *biases))
    fits = alike and all(b.shape == weight.shape[:1] for b in biases)
    if "matmul" not in disabled and x.is_cuda and x.dtype in TYPES and fits and _library():
        out = x.new_empty(*x.shape[:-1], weight.shape[1 if back else 0])
        given = [weight.contiguous(), x.contiguous(), out, *biases]
        plan = _plan(given, back)
        if plan is not None:
            plan.run(given)
            return out
    return x @ weight if back else F.linear(x, weight, bias)


@_product.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, back: bool) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[1 if back else 0])


_plans: dict[tuple[Any, ...], _Plan | None] = {}


def _plan(given: list[Tensor], back: bool) -> _Plan | None:
    weight, x, *_ = given
    aligned = tuple(min(256, t.data_ptr() & -t.data_ptr()) for t in given)
    shape = x.device, x.dtype, x.numel() // x.shape[-1], *weight.shape, back, aligned
    if shape not in _plans:
        if len(_plans) >= MOST_SHAPES:
            return None
        plan = _Plan(given, back, aligned)
        _plans[shape] = plan if plan.choices else None
    return _plans[shape]


class _Choice(Structure):
    """cublasLtMatmulHeuristicResult_t"""

    _fields_ = [
        ("algorithm", c_uint64 * 8),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    ]


class _Plan:
    """A product of some shape. cuBLASLt's matrices have their columns one after another: its A, B and D are the
    transposes of weight, x and out."""

    def __init__(self, given: list[Tensor], back: bool, aligned: tuple[int, ...]) -> None:
        weight, x, out, *bias = given
        kind = TYPES[x.dtype]
        self.handle = _handle(x.device)
        self.operation = _made("cublasLtMatmulDescCreate", c_int(COMPUTE_FLOAT), c_int(FLOAT))
        self._set(TRANSPOSE_A, c_int(not back))
        self._set(EPILOGUE, c_int(WITH_BIAS if bias else PLAIN))
        self.layouts = [
            _made("cublasLtMatrixLayoutCreate", c_int(kind), c_uint64(wide), c_uint64(t.numel() // wide), c_int64(wide))
            for t in (weight, x, out)
            for wide in (t.shape[-1],)
        ]
        wish = _made("cublasLtMatmulPreferenceCreate")
        wishes = {MOST_WORKSPACE: c_uint64(WORKSPACE), REDUCTIONS: c_uint32(0)}
        wishes |= {name: c_uint32(a) for name, a in zip(ALIGNMENTS, (*aligned[:3], aligned[2]), strict=True)}
        for name, value in wishes.items():
            _call("cublasLtMatmulPreferenceSetAttribute", wish, c_int(name), byref(value), c_size_t(sizeof(value)))
        if bias:
            self._set(BIAS_POINTER, c_void_p(bias[0].data_ptr()))
        found, number = (_Choice * CHOICES)(), c_int()
        a, b, d = self.layouts
        status = _library().cublasLtMatmulAlgoGetHeuristic(
            self.handle, self.operation, a, b, d, d, wish, c_int(CHOICES), found, byref(number)
        )
        self.choices = [] if status else [choice for choice in found[: number.value] if choice.state == 0]
        self.best: int | None = None
        self.lock = Lock()  # the bias is told to the operation, which is one for all
        _call("cublasLtMatmulPreferenceDestroy", wish)

    def _set(self, name: int, value: Any) -> None:
        _call("cublasLtMatmulDescSetAttribute", self.operation, c_int(name), byref(value), c_size_t(sizeof(value)))

    def run(self, given: list[Tensor]) -> None:
        if self.best is None and not torch.cuda.is_current_stream_capturing():
            self.best = self._fastest(given)
        self.by(self.best or 0, given)

    def by(self, number: int, given: list[Tensor]) -> None:
        """The product by one of the choices."""
        weight, x, out, *bias = given
        choice, (a, b, d) = self.choices[number], self.layouts
        space = torch.empty(choice.workspace, dtype=torch.uint8, device=x.device)
        with self.lock:
            if bias:
                self._set(BIAS_POINTER, c_void_p(bias[0].data_ptr()))
            _call(
                "cublasLtMatmul",
                *(self.handle, self.operation),
                *(byref(c_float(1)), c_void_p(weight.data_ptr()), a, c_void_p(x.data_ptr()), b),
                *(byref(c_float(0)), c_void_p(out.data_ptr()), d, c_void_p(out.data_ptr()), d),
                *(byref(choice.algorithm), c_void_p(space.data_ptr()), c_size_t(choice.workspace)),
                c_void_p(torch.cuda.current_stream(x.device).cuda_stream),
            )

    def _fastest(self, given: list[Tensor], rounds: int = 4, times: int = 4) -> int:
        """Which choice was the fastest in its best round, of those that give the first one's bits."""
        alike, laps, seen = [0], [], given[2].flatten()[:COMPARED]
        self.by(0, given)
        first = seen.clone()
        for number in range(1, len(self.choices)):
            self.by(number, given)
            alike += [number] if torch.equal(seen, first) else []
        for _ in range(rounds):
            for number in alike:
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                torch.cuda._sleep(200_000)  # so that the GPU does not wait for us between small products
                begin.record()
                for _ in range(times):
                    self.by(number, given)
                end.record()
                laps.append((begin, end, number))
        torch.cuda.synchronize(given[0].device)
        return min((begin.elapsed_time(end), number) for begin, end, number in laps)[1]


@cache
def _library() -> Any:
    try:
        return ctypes.CDLL(f"libcublasLt.so.{str(torch.version.cuda).partition('.')[0]}")
    except OSError:
        return None


@cache
def _handle(device: torch.device) -> c_void_p:
    return _made("cublasLtCreate")


def _made(function: str, *given: Any) -> c_void_p:
    """What one of the library's functions makes."""
    made = c_void_p()
    _call(function, byref(made), *given)
    return made


def _call(function: str, *given: Any) -> None:
    status = getattr(_library(), function)(*given)
    if status:
        raise RuntimeError(f"{function} of cuBLASLt failed with status {status}")
