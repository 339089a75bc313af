"""`logpast results`: measured rows, filtered, printed, exported or plotted."""

from __future__ import annotations

import json as json_library
import statistics
import sys
from collections.abc import Collection
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from logpast.ledger.query import (
    COLUMNS,
    DIGITS,
    NOTHING_FOUND,
    Entry,
    as_condition_value,
    check_name,
    find_files,
    is_number,
    is_run,
    parse_condition,
    read,
    select,
)
from logpast.ledger.row import RESULTS
from logpast.reporting.plots import check_plot_path, escape_label, line_style, remove_frame, write_plot
from logpast.reporting.tables import Table, as_csv, as_text, protect_ledger
from logpast.util.errors import UserError, first_few
from logpast.util.files import atomic_write, ensure_all_writable
from logpast.util.validation import validate_arguments

LINES = ("system", "k", "corpus", "window", "file")  # rows that agree in these are one line of a plot
TEXTS = ("train_data.sha256", "test_data.sha256")  # two texts may have the same name
#: how a model is scored changes its scores
SCORING = ("scores.accounting", "scores.streams", "scores.precision", "scores.stride")
#: scores that are not what they seem -> what to say of their rows
CAVEATS = {
    "scores.training_overlap": "scored on text that the model was trained on",
    "scores.stride": "scored in overlapping windows",
}
WIDEST = 34  # characters of a cell


@validate_arguments
def results(
    where: list[str] | None = None,
    folder: Path | None = None,
    json: str | None = None,
    csv: str | None = None,
    plot: Path | None = None,
    x: str | None = None,
    y: str | None = None,
    by: str | None = None,
) -> list[dict[str, Any]]:
    """Print measured rows, scored runs and benchmarks: all of them, or those that match.

    They are found in results/ and in the folders of sweeps and comparisons, up to two levels below the current folder.

    Examples:
        logpast results
        logpast results system=log_memory seed=0
        logpast results file=runs/sweep-toy                # the rows of one sweep
        logpast results file=demo-text recipe.batch_size=64 --csv demo.csv
        logpast results corpus="*wikitext103" --plot length.png --x L --y ppl_word
        logpast results file=train_gpu case="full*" --plot speed.png --x sees --y loss_tokens_per_s

    Args:
        where: conditions NAME=VALUE; only rows that meet all of them. NAME is a column or a path in a row, such as
            recipe.model.kernel. In VALUE, * matches anything: k=* selects rows that have a k. Write true, false and
            null as in JSON.
        folder: read the .jsonl and .json files of this folder only.
        json: write the complete rows as JSON to this file, or to standard output for "-". Replaces an existing file.
        csv: write the printed columns as comma-separated values, at full precision, to this file, or "-". Replaces an
            existing file.
        plot: plot the rows to this file: one point per row, a line through the means. Replaces an existing file.
        x: column on the x axis; by default L.
        y: column on the y axis; by default ppl_token.
        by: columns, separated by commas: rows that agree in them form one line, labelled with those that differ. By
            default system,k,corpus,window,file and every other setting of the recipes that differs, except the seed.

    Returns:
        The complete rows, each with the name of its file.
    """
    if plot is not None:
        check_plot_path(plot)
    elif x or y or by:
        raise UserError("--x, --y and --by need --plot FILE")
    conditions = [_condition(word) for word in where or []]
    files = find_files(folder)
    _check_targets({"--json": json, "--csv": csv, "--plot": plot}, folder, files)
    entries = read(files)
    if not entries:
        problem = NOTHING_FOUND if folder is None else f"{folder} has no rows"
        record = f"`logpast eval … --record {folder or RESULTS}/NAME.jsonl`"
        raise UserError(f"{problem}; give another --folder, or write a row with {record}")
    entries = select(entries, conditions)
    if plot is not None:
        _draw(entries, plot, x or "L", y or "ppl_token", [name.strip() for name in by.split(",")] if by else None)
    rows = [{"file": entry.file} | entry.row for entry in entries]
    if json is not None:
        _output(json, json_library.dumps(rows, indent=2, ensure_ascii=False) + "\n")
    if csv is not None:
        heads = _names(entries)
        values = [[entry.values.get(name) for name in heads] for entry in entries]
        cells = [["" if value is None else str(value) for value in line] for line in values]
        _output(csv, as_csv(Table(heads, cells)))
    if "-" not in (json, csv):
        print("\n\n".join(as_text(table) for table in tables(entries)))
    if folder is None:
        print(f"rows from {_describe(files)}", file=sys.stderr)
    return rows


def _describe(files: Collection[Path]) -> str:
    """The files that were read: results/ as one, the first few others by name."""
    others = [str(file) for file in files if file.parent != RESULTS]
    return first_few([f"{RESULTS}/"] * (len(others) < len(files)) + others)


def _condition(word: str) -> tuple[str, str]:
    near = get_close_matches(word, ["comparison", "curves"], 1)  # subcommands
    if near and "=" not in word:
        raise UserError(f"{word!r} is not a condition NAME=VALUE; did you mean `logpast results {near[0]}`?")
    return parse_condition(word)


def _check_targets(targets: dict[str, Path | str | None], folder: Path | None, files: Collection[Path]) -> None:
    """Outputs must not overwrite the rows read, files of the results folder, or each other."""
    ensure_all_writable(targets)
    for target in targets.values():
        if target not in (None, "-"):
            protect_ledger(folder or RESULTS, Path(target))
            protect_ledger(RESULTS, Path(target))
            if Path(target).resolve() in [file.resolve() for file in files]:
                raise UserError(f"{target} holds rows that are read here; write to another file")


def tables(entries: list[Entry]) -> list[Table]:
    """One table of all scored runs, then one per benchmark."""
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(entry.title, []).append(entry)
    found = []
    for title, group in groups.items():
        heads = _names(group)
        rows = [[_text(name, entry.values.get(name)) for name in heads] for entry in group]
        if title:  # which names the file
            heads, rows = heads[1:], [row[1:] for row in rows]
        found.append(Table(heads, rows, title, _notes(group)))
    return found


def _notes(entries: list[Entry]) -> list[str]:
    """Which rows must not be compared with the others as they are."""
    runs = {
        name: dict.fromkeys(f"{e.get('run', '?')} ({e.get('corpus')})" for e in entries if e.get(name) is not None)
        for name in CAVEATS
    }
    return [f"{CAVEATS[name]} ({name}): {', '.join(each)}" for name, each in runs.items() if each]


def _names(entries: list[Entry]) -> list[str]:
    """The columns: short names for scored runs, all values for benchmarks."""
    return list(dict.fromkeys(n for e in entries for n in (["file", *COLUMNS] if is_run(e.row) else e.values)))


def _text(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name in DIGITS and is_number(value):
        return f"{value:,.{DIGITS[name]}f}"
    if is_number(value):
        return f"{value:,}" if isinstance(value, int) else f"{value:,.6g}" if abs(value) < 1e6 else f"{value:,.0f}"
    text = str(value)
    return text if len(text) <= WIDEST else text[: WIDEST - 1] + "…"


def _output(target: str, text: str) -> None:
    if target == "-":
        sys.stdout.write(text)
        return
    atomic_write(Path(target), text)
    print(f"wrote {target}", file=sys.stderr)  # standard output may hold the rows


def _draw(entries: list[Entry], out: Path, x: str, y: str, by: list[str] | None) -> None:
    for name in (x, y, *(by or ())):
        check_name(entries, name)
    entries = _without_duplicates([e for e in entries if is_number(e.get(x)) and is_number(e.get(y))], x, y)
    if not entries:
        raise UserError(f"no row has numbers for both {x} and {y}; choose others with --x and --y")
    by = [name for name in by or _line_columns(entries, x) if len({str(entry.get(name)) for entry in entries}) > 1]
    lines, labels = dict[tuple[str, ...], dict[float, list[float]]](), dict[tuple[str, ...], str]()
    for entry in entries:
        line = tuple(as_condition_value(entry.get(name)) for name in by)
        labels[line] = escape_label(_label(by, entry))
        lines.setdefault(line, {}).setdefault(entry.get(x), []).append(entry.get(y))
    from matplotlib.figure import Figure

    legend_width = max(map(len, labels.values())) * 0.062 if len(lines) > 1 else 0  # inches
    figure = Figure(figsize=(8 + legend_width, max(5, 0.18 * len(lines))), layout="constrained")
    axis = figure.subplots()
    for number, line in enumerate(sorted(lines, key=labels.__getitem__)):
        points, style = sorted(lines[line].items()), line_style(number)
        axis.plot([at for at, _ in points], [statistics.mean(ys) for _, ys in points], label=labels[line], **style)
        for at, ys in points:
            axis.plot([at] * len(ys), ys, "o", color=style["color"], markersize=4)
    axis.set(xlabel=x, ylabel=y)
    if len(lines) > 1:
        figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    elif len(files := {entry.file for entry in entries}) == 1:
        axis.set_title(escape_label(*files), fontsize=9)
    remove_frame(axis)
    write_plot(figure, out)
    print(f"wrote {out}", file=sys.stderr)


def _without_duplicates(entries: list[Entry], x: str, y: str) -> list[Entry]:
    """Each scored run once: a row that is there twice would count twice in a mean."""
    names = ("file", "recipe_hash", *TEXTS, *SCORING, x, y)
    found: dict[Any, Entry] = {}
    for entry in entries:
        found[tuple(as_condition_value(entry.get(name)) for name in names) if is_run(entry.row) else id(entry)] = entry
    return list(found.values())


def _line_columns(entries: list[Entry], x: str) -> list[str]:
    """LINES, and every part of recipe, texts or scoring in which rows differ that would share a point."""
    same_as_x = {x, COLUMNS.get(x, x), f"recipe.{x}", "recipe.seed"}
    points: dict[tuple[str, ...], list[Entry]] = {}
    for entry in entries:
        points.setdefault(tuple(as_condition_value(entry.get(name)) for name in (*LINES, x)), []).append(entry)
    prefixes = ("recipe.", *TEXTS, *SCORING)
    paths = dict.fromkeys(n for e in entries for n in e.values if n.startswith(prefixes) and n not in same_as_x)
    short_names = {path: name for name, path in COLUMNS.items()}
    differing = [n for n in paths if any(len({str(e.get(n)) for e in group}) > 1 for group in points.values())]
    return [*LINES, *(short_names.get(n, n.removeprefix("recipe.")) for n in differing)]


def _label(names: list[str], entry: Entry) -> str:
    """A line's label: NAME = VALUE, without the name where the value speaks for itself."""
    values = {name: value for name in names if (value := entry.get(name)) is not None}
    texts = {name: _text(name, value) if is_number(value) else str(value) for name, value in values.items()}
    texts |= {name: texts[name][:7] for name in TEXTS if name in texts}
    clear = ("system", "corpus", "file")
    return ", ".join(text if name in clear else f"{name} = {text}" for name, text in texts.items()) or "others"
