"""Imported when a module with a LogMemory is first compiled: to PyTorch's compiler its filters are constants.

As a decorator of the method, this would import the compiler, seconds of work, with every command.
"""

import torch

from logpast.memory import LogMemory

torch.compiler.assume_constant_result(LogMemory._make_layout)
