"""The delta control: the slots are the embeddings of the last L tokens of the history.

This is a plain GPT with a context of L + m and a loss on the last m tokens, the strongest form of the control.
With slots = 0 it is the plain transformer with context m.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from logpast.memory.naive import embed
from logpast.models.decoder import Transformer, TransformerConfig


@dataclass(frozen=True)
class RecentConfig(TransformerConfig):
    """GPT-2 whose slots are the last tokens of the history: the paper's delta control."""


class RecentTransformer(Transformer):
    Config = RecentConfig

    @property
    def history(self) -> int:
        return self.slots

    def make_slots(self, history: Tensor) -> Tensor:
        missing = self.slots - history.shape[1]
        if missing > 0:
            history = F.pad(history, (missing, 0), value=-1)
        return embed(self.table.weight, history[:, history.shape[1] - self.slots :])
