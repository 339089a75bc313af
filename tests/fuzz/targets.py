"""All targets by name; each makes its valid documents below a folder of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fuzz.commands import command_lines
from fuzz.folders import checkpoints, token_stores, tokenizers
from fuzz.harness import Target
from fuzz.pages import comparisons, recipes, sweeps
from fuzz.rows import analyses, ledger_rows
from fuzz.texts import stream_states, texts

TARGETS: dict[str, Callable[[Path], Target]] = {
    "recipes": recipes,
    "sweeps": sweeps,
    "comparisons": comparisons,
    "token stores": token_stores,
    "tokenizers": tokenizers,
    "checkpoints": checkpoints,
    "ledger rows": ledger_rows,
    "analyses": analyses,
    "text": texts,
    "stream states": stream_states,
    "command lines": command_lines,
}
