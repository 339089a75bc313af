"""The Triton kernels without a GPU: their tests (fused_cases.py) run in Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest


def test_kernels_in_the_interpreter() -> None:
    triton = pytest.importorskip("triton", reason="Triton is for Linux")
    version = tuple(map(int, triton.__version__.split(".")[:2]))
    if version < (3, 8) and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        pytest.skip("the interpreter of Triton before 3.8 cannot loop under NumPy 2.4")
    cases = Path(__file__).with_name("fused_cases.py")
    words = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(cases)]
    done = subprocess.run(words, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
