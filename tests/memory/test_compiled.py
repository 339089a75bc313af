"""To PyTorch's compiler, the filters of a memory are constants."""

import torch

from logpast.filters import FilterBank
from logpast.memory import LogMemory


def test_a_memory_is_compiled_as_one_graph_without_its_filters() -> None:
    memory, embeddings = LogMemory(6, FilterBank(slots=5, sharpness=20)), torch.randn(2, 40, 6)
    compiled = torch.compile(memory, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(embeddings), memory(embeddings))
