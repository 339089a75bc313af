"""`logpast explore`: one HTML page on which a text is read token by token, with what the past contributes to each."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import Any

from logpast.data.batching import Streams
from logpast.evaluation.evaluate import Precision, device_for, find_other, load, open_text, open_training_text
from logpast.evaluation.overlap import training_overlap, warn
from logpast.explore.compute import (
    Array,
    Details,
    Text,
    choose,
    closed_memory,
    details_of,
    plan,
    score_text,
)
from logpast.explore.pack import pack
from logpast.models import LanguageModel, system_of
from logpast.reporting.html import render_page
from logpast.training.checkpoint import Checkpoint, find_model
from logpast.training.memory_check import check_scoring
from logpast.util.errors import UserError
from logpast.util.files import atomic_write, ensure_writable
from logpast.util.progress import progress_bar
from logpast.util.validation import PositiveInt, validate_arguments

HERE = Path(__file__).parent
SCRIPTS = ("data", "recall", "text", "panel", "main")  # in this order
#: what the losses are compared with -> its name on the page. The first that there is comes first
COMPARISONS = {
    "control": "the control",
    "no recall": "the same model without recall",
    "no memory": "the same model without memory",
}


@validate_arguments
def explore(
    checkpoint: Path,
    data: str,
    control: Path | None = None,
    out: Path | None = None,
    limit: PositiveInt = 200_000,
    details: PositiveInt = 20_000,
    streams: Streams | None = None,
    batch_size: PositiveInt = 16,
    device: str = "auto",
    precision: Precision = "float32",
    cache: Path | None = None,
) -> Path:
    """Write a page on which you read a text token by token, and see what the past contributed to each prediction.

    The page is one HTML file that needs no server and no network. The text is coloured by how likely each token was, or
    by how much likelier than to the control. Point at a token, tap it or move to it with the arrow keys: its
    probability with and without memory and recall, the passages that recall copied from, the slots that attention
    looked at and the words in them, and the most likely tokens.

    Without --control the model is compared with itself: without recall if it has recall, else without its memory.

    Examples:
        logpast explore runs/mine --data book.txt --out book.html
        logpast explore runs/mine --control runs/control --data pg19:test[:1]
        logpast explore attached/mine --data book.txt --details 5000

    Args:
        checkpoint: a run folder (its best checkpoint is used), one checkpoints/step-… folder, or a folder that
            `logpast attach` wrote.
        data: the text: a file, folder or glob, a token store, or a split of a corpus such as pg19:test.
        control: a second model with the same tokenizer to compare with.
        out: the page, a name that ends in .html; by default runs/ and the name of the run and -explore.html. An
            existing page is replaced.
        limit: show the first tokens of the text, at most this many. The page has about 50 bytes per token.
        details: compute candidates and attention for this many tokens: those that gain or lose most. The other tokens
            have all the rest.
        streams: corpus reads the text as one stream; document starts anew at every document; by default as the model
            was trained.
        batch_size: windows at a time; changes speed and memory, not the result.
        device: auto, cpu, cuda or mps.
        precision: arithmetic of the model.
        cache: folder for tokenized texts; by default $LOGPAST_CACHE, else ~/.cache/logpast.

    Returns:
        The path of the page.
    """
    found = find_model(checkpoint)
    out = out or Path("runs") / f"{found.config.run.name}-explore.html"
    if out.suffix != ".html":
        raise UserError(f"--out must name a page, a file that ends in .html, got {out}")
    ensure_writable(out)
    on = device_for(device, precision)
    store = open_text(data, found, cache)
    other = find_other(control, store) if control else None
    model = load(found, on, precision)
    if not (other or model.config.recall or closed_memory(model)):
        raise UserError(
            f"{checkpoint} has neither memory nor recall, so there is no past to look into; give a model that has one "
            "(logpast train --model.recall 8192), or a --control to compare it with"
        )
    reference = load(other, on, precision) if other else None
    tokens = min(limit, len(store))
    text = Text(store, tokens, streams or found.config.data.streams, batch_size, on, precision)
    for each in filter(None, (model, reference)):
        check_scoring(each, store, batch_size, text.streams, on, precision)
    overlap = training_overlap(store, found.state["data"], open_training_text(found, cache))
    if overlap:
        warn(store, overlap, "the page does not show how the model predicts other text")
    scores, chosen = _compute(model, reference, text, details)
    about: dict[str, Any] = {"model": _describe(found, model), "control": None, "overlap": overlap}
    if other and reference:
        about["control"] = _describe(other, reference)
    atomic_write(out, render(model, text, scores, chosen, about))
    size = out.stat().st_size / 1e6
    print(f"{tokens:,} of {len(store):,} tokens, {len(chosen.tokens):,} with details, {size:.1f} MB")
    print(f"open {quote(str(out))}")
    return out


def _compute(
    model: LanguageModel, control: LanguageModel | None, text: Text, number: int
) -> tuple[dict[str, Array], Details]:
    """All scores and details, behind one progress bar; a detailed token counts as one that is scored."""
    number = min(number, text.tokens)
    with progress_bar("exploring", len(plan(model, control)) * text.tokens + number) as bar:
        finished, last = 0, ""

        def progress(name: str, done: int) -> None:
            nonlocal finished, last
            finished, last = finished + text.tokens * (last not in ("", name)), name
            bar.update(finished + min(done, text.tokens), name)

        scores = score_text(model, control, text, progress)
        gains = [scores[name] - scores["model"] for name in COMPARISONS if name in scores]
        return scores, details_of(model, text, choose(gains, number), progress)


def _describe(found: Checkpoint, model: LanguageModel) -> dict[str, Any]:
    """What the page says about a model."""
    return {
        "name": found.config.run.name,
        "system": system_of(found.config.model),
        "parameters": model.parameter_count(),
        "step": found.step,
        "window": model.window,
        "history": model.history,
        "recall": model.config.recall,
    }


def render(model: LanguageModel, text: Text, scores: dict[str, Array], details: Details, about: dict[str, Any]) -> str:
    """The whole page."""
    index, columns = pack(model, text, scores, details)
    comparisons = {"comparisons": [each for each in COMPARISONS.items() if each[0] in scores]}
    return render_data(about | index | comparisons, {name: column.content for name, column in columns.items()})


def render_data(index: dict[str, Any], columns: dict[str, str]) -> str:
    """The whole page, from the data in it."""
    return render_page(
        "explore.html",
        index=index,
        columns=columns,
        style=(HERE / "explore.css").read_text(encoding="utf-8"),
        script="\n".join((HERE / f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS),
    )
