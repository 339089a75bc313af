"""One token of the unseen text that recall predicted better than the control, and the passage it was copied from."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from logpast.data import TokenStore
from logpast.models import RecentConfig
from logpast.training.checkpoint import find_checkpoint

SHOWN = 16  # tokens of each passage


def find_example(home: Path) -> dict[str, Any] | None:
    """The token with the largest gain among those that followed the same tokens earlier in their chapter, too far back
    for the control to see them. None if there is no such token.

    Args:
        home: folder of the text part, with its runs, the test text and the losses of all tokens.
    """
    checkpoint = find_checkpoint(home / "recall")
    model, tokenizer, store = checkpoint.config.model, checkpoint.load_tokenizer(), TokenStore.open(home / "data/test")
    assert isinstance(model, RecentConfig)
    control, recall = (np.load(home / f"{name}.npy") for name in ("control", "recall"))
    tokens, starts = store.tokens.astype(np.int64), store.documents.start

    def text(start: int, stop: int) -> str:
        return re.sub(r"\s+", " ", tokenizer.decode(tokens[start:stop]))

    def passage(end: int) -> str:
        return text(max(0, end - SHOWN), end).strip(" ")

    order = np.argsort(recall - control)
    for target in order[: np.count_nonzero(recall < control)].tolist():
        document = int(np.searchsorted(starts, target, side="right")) - 1
        seen = target - model.slots - model.window  # the control may see from here on
        copies = _copies(tokens[starts[document] : target + 1], model.recall_orders) + starts[document]
        copies = copies[(copies < seen) & (copies >= target - model.recall)]
        if len(copies):
            return {
                "chapter": store.documents.names[document], "token": text(target, target + 1),
                "context": passage(target), "earlier": passage(int(copies[-1])), "tokens_ago": target - int(copies[-1]),
                "control": math.exp(-control[target]), "recall": math.exp(-recall[target]),
            }  # fmt: skip
    return None


def _copies(stream: NDArray[np.int64], orders: int) -> NDArray[np.int64]:
    """Earlier positions of the last token of a stream at which the same `orders` tokens preceded it."""
    if len(stream) <= orders:
        return np.zeros(0, np.int64)
    views = np.lib.stride_tricks.sliding_window_view(stream, orders + 1)
    return np.flatnonzero((views[:-1] == views[-1]).all(axis=1)) + orders


def as_text(example: dict[str, Any] | None) -> str:
    """Three lines for the terminal."""
    if example is None:
        return "recall copied nothing that the control did not see"
    return (
        f"where recall helped: probability {example['recall']:.2f}, control {example['control']:.2g}\n"
        f"  here:                 … {example['context']}«{example['token']}»\n"
        f"  {example['tokens_ago']:>5,} tokens earlier: … {example['earlier']}«{example['token']}»"
    )
