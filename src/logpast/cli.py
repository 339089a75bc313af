"""The command line. Each command is one Python function: its typed signature gives the options, its docstring the help.
Nothing slow is imported before a command is chosen.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import io
import os
import re
import signal
import sys
import threading
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, get_args, get_origin

from logpast.util.errors import (
    DISK_FULL,
    LOST_PROCESS,
    OUT_OF_MEMORY,
    UserError,
    is_lost_process,
    is_out_of_memory,
    one_line,
    suggest,
)
from logpast.util.signals import SIGHUP, handle_signals, silence_closed_terminal
from logpast.util.source import Parameter, class_fields, function_parameters, system_configs
from logpast.version import __version__

if TYPE_CHECKING:
    from logpast.training.config import TrainConfig


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
        "completion": Command(
            "logpast.completion", "completion", "print a script that completes commands and options in a shell",
            "shell", "SHELL",
        ),
    },
    "Train and use a model": {
        "data prepare": Command(
            "logpast.data.prepare", "prepare", "turn text into a token store", "sources", "SOURCE", "+"
        ),
        "train": Command("logpast.training.loop", "train", "train a model from a recipe"),
        "eval": Command("logpast.evaluation.evaluate", "evaluate", "score a model: perplexity, bits per byte"),
        "generate": Command("logpast.generation", "generate", "continue a prompt", texts="stop"),
        "serve": Command(
            "logpast.serving.serve", "serve", "answer requests over HTTP, with OpenAI's interface",
            "checkpoint", "CHECKPOINT",
        ),
        "analyze": Command(
            "logpast.analysis.analyze", "analyze", "show where a model gains and how far back it looks",
            "checkpoint", "CHECKPOINT",
        ),
        "explore": Command(
            "logpast.explore.explore", "explore", "read a text in the browser and see what the past contributes",
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

FLAGS = ("bool", "bool | None")  # types of options that may have no value

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
        main_thread = threading.main_thread().ident  # where the signal also ends a wait
        again = threading.Timer(0.01, signal.pthread_kill, [main_thread, signal.SIGINT])
        again.start()  # raised at once, it would be dropped again
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
        fixes = dict.fromkeys(DISK_FULL, "; free some space, or write elsewhere") | {errno.EROFS: "; write elsewhere"}
        where, fix = one_line(str(error.filename or "the disk")), fixes.get(error.errno or 0, "")
        print(f"logpast: {where}: {error.strerror}{fix}", file=sys.stderr)
    except (MemoryError, RuntimeError) as error:
        if not (is_out_of_memory(error) or is_lost_process(error)):
            raise
        print(f"logpast: {OUT_OF_MEMORY if is_out_of_memory(error) else LOST_PROCESS}", file=sys.stderr)
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
    config, arguments = ([_train_config(options)], {}) if name == "train" else ([], _arguments(name, options))
    getattr(importlib.import_module(COMMANDS[name].module), COMMANDS[name].function)(*config, **arguments)
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


class CommandParser(argparse.ArgumentParser):
    """Options with dots in their names. Only what is given is in the result."""

    def __init__(self, name: str, description: str = "", add_help: bool = True) -> None:
        super().__init__(
            prog=f"logpast {name}",
            description=description.replace("%", "%%"),
            formatter_class=argparse.RawDescriptionHelpFormatter,  # examples in the docstring can be copied
            argument_default=argparse.SUPPRESS,
            allow_abbrev=False,
            add_help=add_help,
        )
        self.flags: set[str] = {"--help"}
        self.known = ["--help"]

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help")

    def add(self, title: str, parameters: dict[str, Parameter], several: bool, required: bool = True) -> None:
        """A group of options. With `several`, lists may be several words; else they need brackets."""
        group = self.add_argument_group(title)
        for name, (kind, default, text) in parameters.items():
            choices = re.match(r"Literal\[(.*?)\]", kind)
            a_list = several and kind.startswith("list[str]")
            facts = [] if choices else [kind.removesuffix(" | None")]
            if default is None:
                facts.append("required")
            elif value := re.fullmatch(r"(?:Path\()?'?([^'()]+)'?\)?", default.replace("None", "")):
                facts.append(f"default: {value[1]}")
            metavar = "{" + re.sub("[' ]", "", choices[1]) + "}" if choices else name.rpartition(".")[2].upper()
            group.add_argument(
                f"--{name}",
                dest=name,
                nargs="+" if a_list else None,
                action="extend" if a_list else "store",
                required=required and default is None,
                metavar="{true,false}" if kind in FLAGS else metavar,
                help=f"{text} ({', '.join(facts)})".removesuffix(" ()").replace("%", "%%"),
            )
            self.known.append(f"--{name}")
            if kind in FLAGS:
                self.flags.add(f"--{name}")

    def parse(self, words: list[str]) -> dict[str, Any]:
        """The words of each option."""
        return vars(self.parse_args([self._checked(*pair) for pair in pairwise([*words, ""])]))

    def _checked(self, word: str, following: str) -> str:
        """The word; `--dry_run` alone becomes `--dry_run=true`. An unknown option or one without value is an error."""
        option, given, _ = word.partition("=")
        if not option.startswith("--") or " " in word or option == "--help":
            return word
        if option not in self.known:
            if section := [name for name in self.known if name.startswith(f"{option}.")]:
                raise UserError(f"{option} holds several settings; write {section[0]} VALUE, or see {self.prog} --help")
            raise UserError(f"unknown option {option}; {suggest(option, self.known)}")
        if option in self.flags:
            return word if given or following in ("true", "false") else f"{option}=true"
        # a value may start with a dash if it is a number or contains a space
        is_option = re.match(r"--?[^-\s\d.]\S*$", following) and following.partition("=")[0] not in self.known
        if is_option and not given:
            raise UserError(
                f"{option} is given without a value; write {option}={following} if {following} is the value"
            )
        return word


def command_parser(name: str) -> CommandParser:
    """The options of a command other than `train`."""
    command = COMMANDS[name]
    description, parameters = function_parameters(command.module, command.function)
    parser = CommandParser(name, description)
    if command.positional:
        text = parameters.pop(command.positional).help.replace("%", "%%")
        parser.add_argument(command.positional, nargs=command.nargs, metavar=command.metavar, help=text)
    parser.add("settings", parameters, several=not command.positional)
    return parser


def _arguments(name: str, words: list[str]) -> dict[str, Any]:
    """The arguments of a command other than `train`."""
    from logpast.util.validation import types_of

    command, given = COMMANDS[name], command_parser(name).parse(words)
    kinds = types_of(getattr(importlib.import_module(command.module), command.function))
    return {
        key: _value(key if key == command.positional else f"--{key}", word, kinds[key], literal=key == command.texts)
        for key, word in given.items()
    }


def _value(option: str, given: str | list[str], kind: Any, literal: bool = False) -> Any:
    """The value of an option: [a, b] is a list, and true, false and null are no texts, unless it is `literal`."""
    import yaml

    from logpast.util.validation import validate_value
    from logpast.util.yaml_text import parse_yaml

    word = given[0] if isinstance(given, list) and len(given) == 1 else given
    members = (kind, *get_args(kind))
    a_list = any(get_origin(each) is list for each in members)
    if isinstance(word, str) and not literal:
        constant = {"true": bool, "false": bool, "null": type(None)}.get(word)
        if constant in members or (a_list and word.startswith("[") and word.endswith("]")):
            try:
                return validate_value(option, parse_yaml(word), kind, text=True)
            except yaml.YAMLError:
                raise UserError(f"{option} cannot be {word!r}; put names with special characters in quotes") from None
    try:
        return validate_value(option, given, kind, text=True)
    except UserError as error:
        problem = error
        if a_list and isinstance(given, str) and not given.startswith("["):
            with suppress(UserError):
                _value(option, f"[{given}]", kind)
                problem = UserError(f'{option} cannot be {given!r}; write "[{given}]"')
        raise problem from None


def _train_config(words: list[str]) -> TrainConfig:
    """The config of `train`, from recipes and options.

    Which model options there are depends on the system that options or recipes name.
    """
    from logpast.training.recipes import read_recipe

    first = CommandParser("train", add_help=False)
    first.add_argument("--config", action="append", default=[])
    first.add_argument("--model", "--model.system", dest="system", default=None)
    first.add_argument("--init_from", default=None)
    chosen, options = first.parse_known_args(words)
    recipes, source = [(name, read_recipe(Path(name))) for name in chosen.config], chosen.init_from
    if source and not recipes and not {"-h", "--help"} & set(words):
        from logpast.training.init_from import open_source

        recipes = [(source, open_source(source).recipe)]
    named = [recipe["model"]["system"] for _, recipe in recipes if "system" in recipe["model"]]
    system = ["log_memory", *named][-1] if chosen.system is None else chosen.system
    if system not in system_configs():
        raise UserError(f"unknown model {system!r}; {suggest(system, list(system_configs()))}")
    given = train_parser(system).parse(options)
    if source is not None:
        given["init_from"] = source
    return _merged(system, recipes, given)


def train_parser(system: str) -> CommandParser:
    """The options of `train` with this system."""
    from logpast.training.recipes import shipped_recipes

    description, _ = function_parameters(COMMANDS["train"].module, COMMANDS["train"].function)
    fields = class_fields("logpast.training.config", "TrainConfig")
    names = ", ".join(name for name in shipped_recipes() if not name.startswith(("rivals-", "sweep-")))  # not for train
    parser = CommandParser("train", description)
    parser.add(
        "recipe and system",
        {
            "config": Parameter(
                "str", "None", f"a YAML file, or the name of a shipped recipe: {names}; options and later recipes "
                "override earlier ones",
            ),
            "model.system": Parameter("str", system, f"or --model NAME: the system, {', '.join(system_configs())}"),
            "print_config": Parameter("bool", "False", "print all settings as a recipe, and do not train"),
        },
        several=True,
    )  # fmt: skip
    sections = {
        "data": ("logpast.training.config", "DataConfig"),
        "optimizer": ("logpast.training.config", "OptimizerConfig"),
        "model": system_configs()[system],
    }
    parser.add("settings", {key: each for key, each in fields.items() if key not in sections}, True, required=False)
    for section, config in sections.items():
        settings = {f"{section}.{key}": each for key, each in class_fields(*config).items()}
        parser.add(f"settings of {section}: {fields[section].help}", settings, several=True, required=False)
    return parser


def _merged(system: str, recipes: list[tuple[str, dict[str, Any]]], given: dict[str, Any]) -> TrainConfig:
    """The config of recipes and options, which override them. With --print_config, print it and exit."""
    from logpast.training.config import LENGTH
    from logpast.training.recipes import config_from_settings, default_settings, recipe_settings, setting_types
    from logpast.util.serialization import unflatten

    print_config = given.pop("print_config", "false") == "true"
    kinds, settings = setting_types(system), dict[str, Any]()
    options = {name: _value(f"--{name}", word, kinds[name]) for name, word in given.items()}
    for later in (*(recipe_settings(recipe, system, file, options) for file, recipe in recipes), options):
        if any(later.get(name) is not None for name in LENGTH):  # steps replace the epochs of an earlier recipe
            settings = {name: value for name, value in settings.items() if name not in LENGTH}
        settings |= later
    if not print_config:
        return config_from_settings(settings, system)
    import yaml

    plain = {name: str(value) if isinstance(value, Path) else value for name, value in settings.items()}
    print(yaml.safe_dump(unflatten({"model.system": system} | default_settings(system) | plain), sort_keys=False))
    raise SystemExit(0)


def _with_underscores(word: str) -> str:
    """--batch-size is --batch_size."""
    option, given, value = word.partition("=")
    if not option.startswith("--") or " " in option:  # a text, such as a prompt
        return word
    return "--" + option[2:].replace("-", "_") + given + value
