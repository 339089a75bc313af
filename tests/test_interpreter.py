"""Runs the tests marked `interpreter` in Triton's interpreter, in a process of their own.

It must be switched on (TRITON_INTERPRET=1) before the kernels are imported. To run some of these tests directly:
TRITON_INTERPRET=1 pytest -m interpreter tests/kernels
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest


@pytest.mark.parametrize("folder", ["kernels", "memory"])
def test_kernels_pass_their_tests_in_the_interpreter(folder: str) -> None:
    triton = pytest.importorskip("triton", reason="Triton is for Linux")
    version = tuple(map(int, triton.__version__.split(".")[:2]))
    if version < (3, 8) and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        pytest.skip("the interpreter of Triton before 3.8 cannot loop under NumPy 2.4")
    tests = Path(__file__).with_name(folder)
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "interpreter", tests]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "skipped" not in done.stdout.splitlines()[-1]
