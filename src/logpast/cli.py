"""The command line. Each command is one Python function: its typed signature gives the options, its docstring the help.
Nothing slow is imported before a command is chosen.
"""

from __future__ import annotations

import _thread
import errno
import importlib
import io
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from logpast.util.errors import DISK_FULL, OUT_OF_MEMORY, UserError, is_out_of_memory, one_line, suggest
from logpast.util.signals import SIGHUP, handle_signals, silence_closed_terminal
from logpast.version import __version__

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser


class Command(NamedTuple):
    module: str
    function: str
    help: str
    positional: str | None = None  # the parameter that is given without an option
    metavar: str | None = None
    nargs: str | None = None  # as in argparse: "+" or "*" for several
    texts: str | None = None  # the option that takes one or more texts, whatever they look like


SECTIONS = {
    "Start here": {
        "demo": Command(
            "logpast.demo.demo", "demo", "train a memory model and its control in a few minutes, and compare them"
        ),
    },
    "Train and use a model": {
        "data prepare": Command(
            "logpast.data.prepare", "prepare", "turn text into a token store", "sources", "SOURCE", "+"
        ),
        "train": Command("logpast.training.loop", "train", "train a model from a recipe"),
        "eval": Command("logpast.evaluation.evaluate", "evaluate", "score a model: perplexity, bits per byte"),
        "generate": Command("logpast.generation", "generate", "continue a prompt", texts="stop"),
        "analyze": Command(
            "logpast.analysis.analyze", "analyze", "show where a model gains and how far back it looks",
            "checkpoint", "CHECKPOINT",
        ),
        "export": Command(
            "logpast.models.hf.export", "export", "write a model as a Hugging Face model, and back",
            "checkpoint", "CHECKPOINT",
        ),
    },
    "Use a pretrained model": {
        "attach": Command("logpast.training.attach", "attach", "give a Hugging Face model a long past"),
    },
    "Experiments": {
        "compare": Command(
            "logpast.comparison.compare", "compare", "train and score several systems at equal size and budget",
            "recipe", "RECIPE",
        ),
        "sweep": Command(
            "logpast.sweeps.sweep", "sweep", "train and score every cell of a grid", "recipe", "RECIPE"
        ),
    },
    "Results": {
        "results": Command(
            "logpast.ledger.results", "results", "print, filter and plot all measured rows", "where", "WHERE", "*"
        ),
        "results curves": Command(
            "logpast.ledger.curves", "curves", "plot the losses of runs over training", "logs", "LOG", "+"
        ),
        "results comparison": Command(
            "logpast.comparison.table", "show", "print and plot an earlier comparison", "rows", "ROWS"
        ),
    },
    "The paper": {
        "filters": Command("logpast.paper.filters_figure", "draw_filters", "draw filters"),
        "paper fig1": Command("logpast.paper.filters_figure", "fig1", "draw Figure 1: the filters"),
        "paper figA1": Command("logpast.paper.filters_figure", "fig_a1", "draw Figure A1: wide and narrow filters"),
        "paper results-figure": Command(
            "logpast.paper.results_figure", "results_figure", "draw the results figure, with our results",
            "where", "WHERE", "*",
        ),
        "paper table1": Command("logpast.paper.tables", "table1", "print Table 1: systems of similar size"),
        "paper tableA1": Command(
            "logpast.paper.tables", "table_a1", "print Table A1: WikiText-103, with our results", "where", "WHERE", "*"
        ),
        "paper tableA2": Command(
            "logpast.paper.tables", "table_a2", "print Table A2: PG-19, with our results", "where", "WHERE", "*"
        ),
        "paper accounting": Command(
            "logpast.paper.accounting", "accounting", "show which tokens the per-word perplexities appear to count"
        ),
    },
}  # fmt: skip
COMMANDS: dict[str, Command] = {name: command for section in SECTIONS.values() for name, command in section.items()}

SECTION_EXAMPLES = {"--data": "--data.train TEXT", "--optimizer": "--optimizer.learning_rate NUMBER"}  # of a recipe

OVERVIEW = """logpast {version}: log-compressed memory for transformers

usage: logpast COMMAND [options]; logpast COMMAND --help says more

{commands}

From a text to a model that continues it:

  logpast data prepare mybooks/ --out data/mine --tokenizer bpe-4096
  logpast train --config small-cpu --data.train data/mine --data.validation validation.txt --run runs/mine
  logpast eval --checkpoint runs/mine --data test.txt
  logpast generate --checkpoint runs/mine --prompt "Once upon a time"
"""


def main(argv: list[str] | None = None) -> None:
    """Run one command. Exit code 2 is a mistake of the user, reported in one line; 130 is Ctrl-C, SIGTERM or SIGHUP."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot print τ still gets the rest
    sys.unraisablehook = _deliver_again
    with handle_signals(_interrupt, signal.SIGTERM, SIGHUP):  # Python itself handles Ctrl-C
        code = _run_and_report(sys.argv[1:] if argv is None else argv)
    sys.exit(code)


def _interrupt(number: int) -> None:
    raise KeyboardInterrupt


def _deliver_again(problem: sys.UnraisableHookArgs) -> None:
    """Python drops an exception that is raised in a destructor or a callback. Ctrl-C must not be lost there."""
    if issubclass(problem.exc_type, KeyboardInterrupt):
        threading.Timer(0.01, _thread.interrupt_main).start()  # raised at once, it would be dropped again
    else:
        sys.__unraisablehook__(problem)


def _run_and_report(argv: list[str]) -> int:
    """Run one command and print its error, if there is one. Returns the exit code."""
    try:
        return run(argv)
    except UserError as error:
        print(f"logpast: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("logpast: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has closed it, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno == errno.EIO and silence_closed_terminal():
            return 0
        if error.filename is None and error.errno not in DISK_FULL:
            raise  # not about a file: a bug
        fix = "; free some space, or write elsewhere" if error.errno in DISK_FULL else ""
        print(f"logpast: {error.filename or 'the disk'}: {error.strerror}{fix}", file=sys.stderr)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        print(f"logpast: {OUT_OF_MEMORY}", file=sys.stderr)
    return 2


def run(argv: list[str]) -> int:
    """Run one command and return the exit code; mistakes raise UserError."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        sections = (f"{title}:\n{_list(list(commands))}" for title, commands in SECTIONS.items())
        print(OVERVIEW.format(version=__version__, commands="\n\n".join(sections)))
        return 0
    if argv[0] == "--version":
        print(__version__)
        return 0
    group = _group(argv[0])
    if group and argv[0] not in COMMANDS and argv[1:] in ([], ["-h"], ["--help"]):
        print(_list(group))
        return 0
    name = _find_command(argv)
    options = [_with_underscores(word) for word in argv[len(name.split()) :]]
    function = getattr(importlib.import_module(COMMANDS[name].module), COMMANDS[name].function)
    if name == "train":
        function(_train_config(function, options))
    else:
        function(**_parse(_command_parser(name, function), options))
    return 0


def _find_command(argv: list[str]) -> str:
    """The command that the arguments start with, of two words if there is one."""
    for name in (" ".join(argv[:2]), argv[0]):
        if name in COMMANDS:
            return name
    group = _group(argv[0])
    *first, word = argv[:2] if group else argv[:1]
    known = [name.removeprefix(f"{argv[0]} ") for name in group] or list(COMMANDS)
    raise UserError(f"unknown command {' '.join([*first, word])!r}; {suggest(word, known)}")


def _group(word: str) -> list[str]:
    """The commands of two words that start with this one."""
    return [name for name in COMMANDS if name.startswith(f"{word} ")]


def _list(names: list[str]) -> str:
    width = max(map(len, COMMANDS))
    return "\n".join(f"  {name:{width}}  {COMMANDS[name].help}" for name in names)


def _command_parser(name: str, function: Callable[..., Any]) -> ArgumentParser:
    """The parser of a command other than `train`: the parameters of its function."""
    parser, command = _parser(name, function), COMMANDS[name]
    default: dict[str, Any] = {"default": []} if command.nargs == "*" else {}
    if command.positional:
        parser.add_argument(
            command.positional,
            nargs=command.nargs,
            type=str if command.nargs else Path,
            metavar=command.metavar,
            help=_help_of(function, command.positional),
            **default,
        )
    if command.texts:
        parser.add_argument(
            f"--{command.texts}",
            nargs="+",
            action="extend",
            type=str,
            metavar="TEXT",
            help=_help_of(function, command.texts),
        )
    skip: set[str | int] = {name for name in (command.positional, command.texts) if name}
    parser.add_function_arguments(function, skip=skip, fail_untyped=True)
    return parser


def _parser(name: str, function: Callable[..., Any]) -> ArgumentParser:
    import argparse
    import inspect

    import jsonargparse

    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)
    text = inspect.cleandoc(function.__doc__ or "")
    description = text.partition("\n\nArgs:")[0].partition("\n\nReturns:")[0]

    class HelpFormatter(argparse.RawDescriptionHelpFormatter, jsonargparse.DefaultHelpFormatter):
        """Keeps the line breaks of the docstring, so that its examples can be copied."""

    return jsonargparse.ArgumentParser(
        prog=f"logpast {name}", description=description, formatter_class=HelpFormatter, exit_on_error=False
    )


def _parse(parser: ArgumentParser, argv: list[str]) -> dict[str, Any]:
    """The values of the options. A mistake is a UserError of one line."""
    from argparse import ArgumentError

    _title_groups(parser)
    _check_options(parser, argv)
    try:
        values = parser.parse_args(_expand_flags(parser, argv)).as_dict()
    except ArgumentError as error:
        raise UserError(f"{one_line(error, '--')}; see {parser.prog} --help") from None
    values.pop("config", None)
    return values


def _title_groups(parser: ArgumentParser) -> None:
    """Headings of the help: the settings of each section of a recipe. `--data CONFIG` itself is not offered."""
    from argparse import SUPPRESS

    for group in parser._action_groups:
        section = next((action for action in group._group_actions if action.metavar == "CONFIG"), None)
        if section:
            section.help = SUPPRESS
            group.title = f"settings of {section.dest}: {group.title}"
        elif group.title not in ("positional arguments", "options"):  # the function's first line, printed above
            group.title = "settings"


def _check_options(parser: ArgumentParser, argv: list[str]) -> None:
    """An error for an option without its value, and for an unknown option, with the nearest name."""
    known = [option for action in parser._actions for option in action.option_strings]
    with_value = {name for a in parser._actions if a.nargs in (None, "+") for name in a.option_strings} - _flags(parser)
    for option, word in pairwise(argv):  # a value may start with a dash if it is a number or contains a space
        if option in with_value and re.match(r"--?[^-\s\d.]\S*$", word) and word.partition("=")[0] not in known:
            raise UserError(f"{option} is given without a value; write {option}={word} if {word} is the value")
    for word in argv:
        option = word.partition("=")[0].removesuffix("+")
        if option.startswith("--") and " " not in word and option not in known:
            raise UserError(f"unknown option {option}; {suggest(option, known)}")


def _expand_flags(parser: ArgumentParser, argv: list[str]) -> list[str]:
    """`--dry_run` alone means `--dry_run=true`."""
    flags = _flags(parser)
    return [
        f"{word}=true" if word in flags and following not in ("true", "false") else word
        for word, following in zip(argv, [*argv, ""][1:], strict=True)
    ]


def _join_lists(parser: ArgumentParser, argv: list[str]) -> list[str]:
    """`--freeze table norm` as `--freeze=["table", "norm"]`. Only for parsers without positional arguments."""
    actions = [action for action in parser._actions if getattr(action, "_typehint", None) == list[str]]
    for action in actions:
        action.metavar = "NAME ..."  # in the help
    lists = {name for action in actions for name in action.option_strings}
    joined, words = list[str](), list(argv)
    while words:
        word = words.pop(0)
        values = list[str]()
        while word in lists and words and not words[0].startswith("-"):
            values.append(words.pop(0))
        given_as_list = len(values) == 1 and values[0].startswith("[") and values[0].endswith("]")
        joined += [word, *values] if given_as_list or not values else [f"{word}={json.dumps(values)}"]
    return joined


def _flags(parser: ArgumentParser) -> set[str]:
    """The options that are true or false."""
    actions = [a for a in parser._actions if getattr(a, "_typehint", None) in (bool, bool | None)]
    return {name for action in actions for name in action.option_strings}


def _train_config(function: Callable[..., Any], argv: list[str]) -> Any:
    """The config of `train`: recipes and options. Which model options there are depends on the system they name."""
    import yaml

    from logpast.models import SYSTEMS
    from logpast.training.config import LENGTH, TrainConfig
    from logpast.training.recipes import add_settings, fit_to_system, shipped_recipes

    system, recipes, options = _system_and_recipes(argv)
    parser = _parser("train", function)
    shipped = [name for name in shipped_recipes() if not name.startswith(("rivals-", "sweep-"))]  # not for train
    parser.add_argument(
        "--config",
        action="config",
        help=f"a YAML file, or the name of a shipped recipe: {', '.join(shipped)}; options and later recipes override "
        "earlier ones",
    )
    parser.add_argument(
        "--model.system", default=system, type=str, help=f"or --model NAME: the system, {', '.join(SYSTEMS)}"
    )
    add_settings(parser, system)
    options = _join_lists(parser, options)
    has_length = any(word.partition("=")[0] in ("--steps", "--epochs") for word in options)
    for file, recipe in recipes[::-1]:
        if has_length:  # steps replace the epochs of an earlier recipe, and the reverse
            recipe = {name: value for name, value in recipe.items() if name not in LENGTH}
        has_length = has_length or any(recipe.get(name) is not None for name in LENGTH)
        options = ["--config", yaml.safe_dump(fit_to_system(recipe, system, parser, file)), *options]
    values = _parse(parser, options)
    values["model"]["system"] = system
    return TrainConfig.from_dict(values)


def _system_and_recipes(argv: list[str]) -> tuple[str, list[tuple[str, dict[str, Any]]], list[str]]:
    """The system that options or recipes name, the recipes, and all other options.

    Without a recipe, that of the model that --init_from names.
    """
    from logpast.models import known_system
    from logpast.training.init_from import open_source
    from logpast.training.recipes import read_recipe

    system, source, recipes, options = None, None, [], []
    words = iter(argv)
    for word in words:
        option, given, value = word.partition("=")
        if option in SECTION_EXAMPLES:
            raise UserError(f"{option} holds several settings; write {SECTION_EXAMPLES[option]}, or see train --help")
        if option not in ("--model", "--model.system", "--config", "--init_from"):
            options.append(word)
            continue
        value = value if given else next(words, "")
        if not value:
            raise UserError(f"{option} is given without a value; give one, or leave it out")
        if option == "--config":
            recipes.append((value, read_recipe(Path(value))))
        elif option == "--init_from":
            source = value
            options.append(f"--init_from={value}")
        else:
            system = value
    if source and not recipes and not {"-h", "--help"} & set(options):
        recipes = [(source, open_source(source).recipe)]
    named = [recipe["model"]["system"] for _, recipe in recipes if "system" in recipe["model"]]
    return known_system(system or (named[-1] if named else "log_memory")), recipes, options


def _help_of(function: Callable[..., Any], parameter: str) -> str:
    from docstring_parser import parse

    parameters = {p.arg_name: p.description or "" for p in parse(function.__doc__ or "").params}
    return " ".join(parameters[parameter].split())


def _with_underscores(word: str) -> str:
    """--batch-size is --batch_size."""
    option, given, value = word.partition("=")
    if not option.startswith("--") or " " in option:  # a text, such as a prompt
        return word
    return "--" + option[2:].replace("-", "_") + given + value
