"""The command line: verbs only. Each is one function that a notebook can call too; its typed signature is the verb's
options and its docstring the help. Nothing heavy is imported before a verb is chosen.
"""

from __future__ import annotations

import importlib
import io
import os
import re
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from logpast.util.errors import DISK_FULL, UserError, one_line, suggest
from logpast.version import __version__

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser


class Verb(NamedTuple):
    module: str
    function: str
    about: str
    positional: str | None = None
    metavar: str = "SOURCE …"


VERBS = {
    "demo": Verb("logpast.demo.demo", "demo", "train a memory model and its control in a few minutes, and compare"),
    "data prepare": Verb("logpast.data.prepare", "prepare", "turn text into a token store", "sources"),
    "train": Verb("logpast.training.loop", "train", "train a model from a recipe"),
    "eval": Verb("logpast.evaluation.evaluate", "evaluate", "score a model on a text: perplexity, bits per byte"),
    "compare": Verb("logpast.comparison.compare", "compare", "train and score rivals side by side", "recipe", "RECIPE"),
    "analyze": Verb(
        "logpast.analysis.analyze", "analyze", "show how much of its past a model uses", "checkpoint", "CHECKPOINT"
    ),
    "sweep": Verb("logpast.sweeps.sweep", "sweep", "train and score every cell of a grid", "page", "PAGE"),
    "generate": Verb("logpast.generation", "generate", "write on from a prompt"),
    "filters": Verb("logpast.paper.filters_figure", "draw_filters", "draw the filters (the paper's Figures 1 and A1)"),
    "results": Verb(
        "logpast.ledger.results", "results", "print, filter and plot what was measured", "where", "[WHERE …]"
    ),
    "results curves": Verb("logpast.ledger.curves", "curves", "draw what runs learned on their way", "logs", "LOG …"),
    "results comparison": Verb(
        "logpast.comparison.table", "show", "print and draw a comparison made before", "rows", "ROWS"
    ),
    "paper fig1": Verb("logpast.paper.filters_figure", "fig1", "draw the paper's Figure 1: the filters"),
    "paper figA1": Verb("logpast.paper.filters_figure", "fig_a1", "draw its Figure A1: wider and narrower filters"),
    "paper results-figure": Verb(
        "logpast.paper.results_figure", "results_figure", "draw its results, and ours", "where", "[WHERE …]"
    ),
    "paper table1": Verb("logpast.paper.tables", "table1", "its Table 1: systems of similar size"),
    "paper tableA1": Verb(
        "logpast.paper.tables", "table_a1", "its Table A1: WikiText-103, and ours", "where", "[WHERE …]"
    ),
    "paper tableA2": Verb("logpast.paper.tables", "table_a2", "its Table A2: PG-19, and ours", "where", "[WHERE …]"),
    "paper accounting": Verb("logpast.paper.accounting", "accounting", "what its per-word figures appear to count"),
}

OVERVIEW = """logpast {version}: a long past for transformers at the price of a short window

usage: logpast VERB [options]        logpast VERB --help tells more

{verbs}

From a text to a model that goes on writing it:

  logpast data prepare mybooks/ --out data/mine --tokenizer bpe-4096
  logpast train --config small-cpu --data.train data/mine --data.validation other.txt --run runs/mine
  logpast eval --checkpoint runs/mine --data unseen.txt
  logpast generate --checkpoint runs/mine --prompt "Once upon a time"
"""


def main(argv: list[str] | None = None) -> None:
    """Run one verb. Exit code 2 is a mistake in what was asked for, told in one line; 130 is Ctrl-C."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without τ shall have the rest
    try:
        code = run(sys.argv[1:] if argv is None else argv)
    except UserError as error:
        print(f"logpast: {error}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        print("logpast: interrupted", file=sys.stderr)
        code = 130
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except OSError as error:
        if error.filename is None and error.errno not in DISK_FULL:
            raise  # not about a file: a fault of ours
        fix = "; make room, or write elsewhere" if error.errno in DISK_FULL else ""
        print(f"logpast: {error.filename or 'the disk'}: {error.strerror}{fix}", file=sys.stderr)
        code = 2
    sys.exit(code)


def run(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(OVERVIEW.format(version=__version__, verbs=_listed(list(VERBS))))
        return 0
    group = _group(argv[0])
    if group and argv[0] not in VERBS and argv[1:] in ([], ["-h"], ["--help"]):
        print(_listed(group))
        return 0
    if argv[0] == "--version":
        print(__version__)
        return 0
    name = _verb_in(argv)
    verb, rest = VERBS[name], [_underscored(word) for word in argv[len(name.split()) :]]
    function = getattr(importlib.import_module(verb.module), verb.function)
    if name == "train":
        function(_train_config(function, rest))
    else:
        parser = _parser(name, function)
        if verb.positional:
            many = ("*" if verb.metavar.startswith("[") else "+") if "…" in verb.metavar else None
            none: dict[str, Any] = {"default": []} if many == "*" else {}
            parser.add_argument(
                verb.positional,
                nargs=many,
                **none,
                type=str if many else Path,
                metavar=verb.metavar.strip("[ …]"),
                help=_help_of(function, verb.positional),
            )
        parser.add_function_arguments(function, skip={verb.positional} if verb.positional else set(), fail_untyped=True)
        function(**_parse(parser, rest))
    return 0


def _verb_in(argv: list[str]) -> str:
    """The verb that the words begin with; of two words where there is such a one."""
    for name in (" ".join(argv[:2]), argv[0]):
        if name in VERBS:
            return name
    *first, word = argv[:2] if _group(argv[0]) else argv[:1]
    known = [name.removeprefix(f"{argv[0]} ") for name in _group(argv[0])] or list(VERBS)  # of two words, the second
    raise UserError(f"unknown verb {' '.join([*first, word])!r}; {suggest(word, known)}")


def _group(word: str) -> list[str]:
    """The verbs of two words that begin with this one."""
    return [name for name in VERBS if name.startswith(f"{word} ")]


def _listed(names: list[str]) -> str:
    width = max(map(len, names))
    return "\n".join(f"  {name:{width}}  {VERBS[name].about}" for name in names)


def _parser(name: str, function: Callable[..., Any]) -> ArgumentParser:
    import argparse
    import inspect

    import jsonargparse

    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)
    text = inspect.cleandoc(function.__doc__ or "")
    about = text.partition("\n\nArgs:")[0].partition("\n\nReturns:")[0]

    class AsWritten(argparse.RawDescriptionHelpFormatter, jsonargparse.DefaultHelpFormatter):
        """Keeps the line breaks of the docstring, so that its examples can be copied."""

    return jsonargparse.ArgumentParser(
        prog=f"logpast {name}", description=about, formatter_class=AsWritten, exit_on_error=False
    )


def _parse(parser: ArgumentParser, argv: list[str]) -> dict[str, Any]:
    """Options as plain values; a mistake becomes one line, with the nearest name for an unknown option."""
    from argparse import SUPPRESS, ArgumentError

    for group in parser._action_groups:
        section = next((action for action in group._group_actions if action.metavar == "CONFIG"), None)
        if section:  # whose settings are given one by one, or by a recipe
            section.help = SUPPRESS
            group.title = f"settings of {section.dest}: {group.title}"
        elif group.title not in ("positional arguments", "options"):  # of the first line, which is above already
            group.title = "settings"
    known = [option for action in parser._actions for option in action.option_strings]
    yes_or_no = [a for a in parser._actions if getattr(a, "_typehint", None) in (bool, bool | None)]
    bools = [name for a in yes_or_no for name in a.option_strings]
    texts = {name for a in parser._actions if a.nargs is None for name in a.option_strings} - set(bools)
    for option, word in pairwise(argv):  # a text that looks like an option; a number, or one with a space, does not
        if option in texts and re.match(r"--?[^-\s\d.]\S*$", word) and word.partition("=")[0] not in known:
            raise UserError(f"{option} is given without a value; write {option}={word} if that is meant")
    for word in argv:
        option = word.partition("=")[0].removesuffix("+")
        if option.startswith("--") and " " not in word and option not in known:
            raise UserError(f"unknown option {option}; {suggest(option, known)}")
    for place, word in enumerate(argv):
        if word in bools and [*argv, ""][place + 1] not in ("true", "false"):
            argv[place] = f"{word}=true"  # --dry_run alone is enough
    try:
        values = parser.parse_args(argv).as_dict()
    except ArgumentError as error:
        raise UserError(f"{one_line(error, '--')}; see {parser.prog} --help") from None
    values.pop("config", None)
    return values


def _train_config(function: Callable[..., Any], argv: list[str]) -> Any:
    """`train`'s options: those of a run, and those of the one system that recipe or command line names."""
    import yaml

    from logpast.models import SYSTEMS, known_system
    from logpast.training.config import TrainConfig
    from logpast.training.recipes import add_settings, fit_to_system, read_recipe

    such = {"--data": "--data.train TEXT", "--optimizer": "--optimizer.learning_rate NUMBER"}
    system, recipes, rest = None, [], []
    words = iter(argv)
    for word in words:
        option, given, value = word.partition("=")
        if option in ("--model", "--model.system", "--config"):
            value = value if given else next(words, "")
            if not value:
                raise UserError(f"{option} is given without a value; name one, or leave it out")
            if option == "--config":
                recipes.append((value, read_recipe(Path(value))))
            else:
                system = value
        elif option in such:
            raise UserError(f"{option} has settings of its own; write {such[option]}, or see logpast train --help")
        else:
            rest.append(word)
    named = [recipe["model"]["system"] for _, recipe in recipes if "system" in recipe["model"]]
    system = known_system(system or (named[-1] if named else "log_memory"))

    parser = _parser("train", function)
    parser.add_argument("--config", action="config", help="a recipe (YAML); options and later recipes override it")
    parser.add_argument(
        "--model.system", default=system, type=str, help=f"--model NAME for short: {', '.join(SYSTEMS)}"
    )
    add_settings(parser, system)
    for file, recipe in recipes[::-1]:
        rest = ["--config", yaml.safe_dump(fit_to_system(recipe, system, parser, file)), *rest]
    values = _parse(parser, rest)
    values["model"]["system"] = system
    return TrainConfig.from_dict(values)


def _help_of(function: Callable[..., Any], parameter: str) -> str:
    from docstring_parser import parse

    parameters = {p.arg_name: p.description or "" for p in parse(function.__doc__ or "").params}
    return " ".join(parameters[parameter].split())


def _underscored(word: str) -> str:
    """--batch-size is --batch_size."""
    option, given, value = word.partition("=")
    if not option.startswith("--") or " " in option:  # a text that begins so
        return word
    return "--" + option[2:].replace("-", "_") + given + value
