"""The paper's model: the slots are the history, compressed on a logarithmic time axis."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

from torch import Tensor

from logpast.filters import PAPER_SPACING, FilterBank, Kernel, Normalize
from logpast.memory import LogMemory
from logpast.models.decoder import Transformer, TransformerConfig
from logpast.util.errors import UserError


@dataclass(frozen=True)
class LogMemoryConfig(TransformerConfig):
    """GPT-2 with a log-compressed history."""

    sharpness: float = 100
    """k of the filters: larger is narrower (100, 150 and 200 in the paper)"""
    spacing: float = PAPER_SPACING
    """c: each filter's peak is 1 + c times as far back as the one before (the paper's "0.19" is 2^(1/4) − 1)"""
    first_peak: float = 1.0
    """τ* of the nearest filter, in tokens"""
    kernel: Kernel = "paper"
    """impulse response: paper, isith (exponent k + 1, area 1) or binned (exact mass of the gamma density)"""
    normalize: Normalize = "none"
    """scale of each filter: none (paper), area (weights sum to 1) or peak (largest weight is 1)"""
    reach: float = 1.0
    """horizon / last peak; 1 truncates all filters at the last peak, as the paper does"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.slots:
            try:
                self.bank  # noqa: B018  the bank checks its settings
            except ValueError as error:
                raise UserError(f"model.{error}") from None

    @cached_property
    def bank(self) -> FilterBank:
        return FilterBank(**{field.name: getattr(self, field.name) for field in fields(FilterBank)})


class LogMemoryTransformer(Transformer):
    Config = LogMemoryConfig

    def __init__(self, config: LogMemoryConfig) -> None:
        super().__init__(config)
        try:
            self.memory = LogMemory(config.width, config.bank) if config.slots else None
        except ValueError as error:
            raise UserError(f"model: {error}") from None

    @property
    def history(self) -> int:
        return self.memory.bank.horizon if self.memory else 0

    def make_slots(self, history: Tensor) -> Tensor:
        if self.memory is None:
            return self.table.weight.new_empty(len(history), 0, self.config.width)
        return self.memory.from_ids(history, self.table.weight)
