"""`logpast results`: the rows of results/, filtered, printed, handed on or drawn."""

from __future__ import annotations

import json as json_library
import statistics
import sys
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from logpast.ledger.query import (
    COLUMNS,
    DIGITS,
    Entry,
    as_asked,
    check_name,
    is_number,
    is_run,
    parse_condition,
    read,
    select,
)
from logpast.ledger.row import RESULTS
from logpast.reporting.plots import check_plot_path, escape_label, line_style, remove_frame, write_plot
from logpast.reporting.tables import Table, as_csv, as_text, protect_ledger
from logpast.util.errors import UserError
from logpast.util.files import atomic_write, ensure_all_writable
from logpast.util.validation import validate_arguments

LINES = "system,k,corpus,window,file"  # what tells one line of a picture from another
TEXTS = ("train_data.sha256", "test_data.sha256")  # two may have one name
SCORING = ("scores.accounting", "scores.streams", "scores.precision")  # in other ways the same weights score otherwise
WIDEST = 34  # characters of a cell


@validate_arguments
def results(
    where: list[str] | None = None,
    folder: Path = RESULTS,
    json: str | None = None,
    csv: str | None = None,
    plot: Path | None = None,
    x: str | None = None,
    y: str | None = None,
    by: str | None = None,
) -> list[dict[str, Any]]:
    """Print the rows of results/: scored runs and benchmarks, a line each, all of them or those that fit.

    Examples:
        logpast results
        logpast results system=log_memory seed=0
        logpast results file=demo-text recipe.batch_size=64 --csv demo.csv
        logpast results corpus="*wikitext103" --plot length.png --x L --y ppl_word
        logpast results file=train_gpu case="full*" --plot speed.png --x sees --y loss_tokens_per_s

    Args:
        where: NAME=VALUE, as many as wanted: only rows of which all hold. A name is a column, or a place in a row such
            as recipe.model.kernel; in a value, * stands for anything, so that k=* asks for rows that have a k. Other
            words are as in JSON: true, false, null.
        folder: where the rows are.
        json: write the rows, whole, as JSON to this file, or to standard output for "-". An existing one is replaced.
        csv: write what is printed as comma-separated values, at full precision, to this file, or "-". An existing one
            is replaced.
        plot: draw the rows into this picture: a point a row, a line through the means. An existing one is replaced.
        x: the column along the bottom of the picture; by default L.
        y: the column up its side; by default ppl_token.
        by: columns, with commas: rows that agree in them make one line of the picture, named by those that differ. By
            default system,k,corpus,window,file, and whatever else of their recipes differs but the seed.

    Returns:
        The rows, whole, each with the name of its file.
    """
    if plot is not None:
        check_plot_path(plot)
    elif x or y or by:
        raise UserError("--x, --y and --by are of a picture; give --plot FILE too")
    _check_targets({"--json": json, "--csv": csv, "--plot": plot}, folder)
    conditions = [_condition(word) for word in where or []]
    entries = read(folder)
    if not entries:
        raise UserError(f"{folder} holds no rows; `logpast eval … --record {folder}/NAME.jsonl` writes one")
    entries = select(entries, conditions)
    if plot is not None:
        _draw(entries, plot, x or "L", y or "ppl_token", [name.strip() for name in by.split(",")] if by else None)
    rows = [{"file": entry.file} | entry.row for entry in entries]
    if json is not None:
        _give(json, json_library.dumps(rows, indent=2, ensure_ascii=False) + "\n")
    if csv is not None:
        heads = _names(entries)
        values = [[entry.values.get(name) for name in heads] for entry in entries]
        cells = [["" if value is None else str(value) for value in line] for line in values]
        _give(csv, as_csv(Table(heads, cells)))
    if "-" not in (json, csv):
        print("\n\n".join(as_text(table) for table in tables(entries)))
    return rows


def _condition(word: str) -> tuple[str, str]:
    near = get_close_matches(word, ["comparison", "curves", "pages"], 1)  # verbs below this one
    if near and "=" not in word:
        raise UserError(f"{word!r} is no condition NAME=VALUE; did you mean `logpast results {near[0]}`?")
    return parse_condition(word)


def _check_targets(targets: dict[str, Path | str | None], folder: Path) -> None:
    """Nothing is written over what is read, nor over what our own folder keeps, nor over each other."""
    ensure_all_writable(targets)
    for target in targets.values():
        if target not in (None, "-"):
            protect_ledger(folder, Path(target))
            protect_ledger(RESULTS, Path(target))


def tables(entries: list[Entry]) -> list[Table]:
    """One of all scored runs, then one of each benchmark."""
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(entry.title, []).append(entry)
    found = []
    for title, group in groups.items():
        heads = _names(group)
        rows = [[_text(name, entry.values.get(name)) for name in heads] for entry in group]
        if title:  # it names the file
            heads, rows = heads[1:], [row[1:] for row in rows]
        found.append(Table(heads, rows, title))
    return found


def _names(entries: list[Entry]) -> list[str]:
    """The columns of rows: the short names of a scored run, all there is of a benchmark."""
    return list(dict.fromkeys(n for e in entries for n in (["file", *COLUMNS] if is_run(e.row) else e.values)))


def _text(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name in DIGITS:
        return f"{value:,.{DIGITS[name]}f}"
    if is_number(value):
        return f"{value:,}" if isinstance(value, int) else f"{value:,.6g}" if abs(value) < 1e6 else f"{value:,.0f}"
    text = str(value)
    return text if len(text) <= WIDEST else text[: WIDEST - 1] + "…"


def _give(target: str, text: str) -> None:
    if target == "-":
        sys.stdout.write(text)
        return
    atomic_write(Path(target), text)
    print(f"wrote {target}", file=sys.stderr)  # standard output may be carrying rows


def _draw(entries: list[Entry], out: Path, x: str, y: str, by: list[str] | None) -> None:
    for name in (x, y, *(by or ())):
        check_name(entries, name)
    entries = [entry for entry in entries if all(is_number(entry.get(name)) for name in (x, y))]
    of_one = ("file", "recipe_hash", *TEXTS, *SCORING, x, y)
    once = {tuple(as_asked(e.get(name)) for name in of_one) if is_run(e.row) else id(e): e for e in entries}
    entries = list(once.values())  # else a row that is there twice would weigh more in a mean
    if not entries:
        raise UserError(f"no row has numbers for both {x} and {y}; choose others with --x and --y")
    by = [name for name in by or _telling_apart(entries, x) if len({str(entry.get(name)) for entry in entries}) > 1]
    lines, labels = dict[tuple[str, ...], dict[float, list[float]]](), dict[tuple[str, ...], str]()
    for entry in entries:
        line = tuple(as_asked(entry.get(name)) for name in by)
        labels[line] = escape_label(_label(by, entry))
        lines.setdefault(line, {}).setdefault(entry.get(x), []).append(entry.get(y))
    from matplotlib.figure import Figure

    wide = max(map(len, labels.values())) * 0.062 if len(lines) > 1 else 0  # inches of the legend
    figure = Figure(figsize=(8 + wide, max(5, 0.18 * len(lines))), layout="constrained")
    axis = figure.subplots()
    for number, line in enumerate(sorted(lines, key=labels.__getitem__)):
        points, how = lines[line], line_style(number)
        places = sorted(points)
        axis.plot(places, [statistics.mean(points[place]) for place in places], label=labels[line], **how)
        for place in places:
            axis.plot([place] * len(points[place]), points[place], "o", color=how["color"], markersize=4)
    axis.set(xlabel=x, ylabel=y)
    if len(lines) > 1:
        figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    elif len(files := {entry.file for entry in entries}) == 1:
        axis.set_title(escape_label(*files), fontsize=9)
    remove_frame(axis)
    write_plot(figure, out)
    print(f"wrote {out}", file=sys.stderr)


def _telling_apart(entries: list[Entry], x: str) -> list[str]:
    """What tells lines from each other: LINES, and what else differs in recipe, texts or scoring at one place."""
    by, along = LINES.split(","), {x, COLUMNS.get(x, x), f"recipe.{x}", "recipe.seed"}
    groups: dict[tuple[str, ...], list[Entry]] = {}
    for entry in entries:
        groups.setdefault(tuple(as_asked(entry.get(name)) for name in (*by, x)), []).append(entry)
    told = ("recipe.", *TEXTS, *SCORING)
    places = {n: None for entry in entries for n in entry.values if n.startswith(told) and n not in along}
    named = {place: name for name, place in COLUMNS.items()}
    differing = [n for n in places if any(len({str(e.get(n)) for e in group}) > 1 for group in groups.values())]
    return [*by, *(named.get(n, n.removeprefix("recipe.")) for n in differing)]


def _label(names: list[str], entry: Entry) -> str:
    """A line's name: words as they are where their columns are well known, else with what they are of."""
    told = {name: value for name in names if (value := entry.get(name)) is not None}
    texts = {name: _text(name, value) if is_number(value) else str(value) for name, value in told.items()}
    texts |= {name: texts[name][:7] for name in TEXTS if name in texts}
    bare = ("system", "corpus", "file")
    return ", ".join(text if name in bare else f"{name} = {text}" for name, text in texts.items())
