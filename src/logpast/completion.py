"""Command `completion`: what the Tab key completes in bash and zsh."""

from __future__ import annotations

from typing import Literal

from logpast.cli import COMMANDS, command_parser, train_parser
from logpast.util.source import system_configs
from logpast.util.validation import validate_arguments

ZSH = "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n"
SCRIPT = """_logpast() {
    local words=""
    case "$COMP_CWORD ${COMP_WORDS[1]} ${COMP_WORDS[2]}" in
%s
    esac
    COMPREPLY=($(compgen -W "$words" -- "${COMP_WORDS[COMP_CWORD]}"))
}
complete -o default -F _logpast logpast
"""


@validate_arguments
def completion(shell: Literal["bash", "zsh"]) -> None:
    """Print a script that completes commands and options with the Tab key.

    Examples:
        logpast completion bash >> ~/.bashrc
        logpast completion zsh >> ~/.zshrc

    Args:
        shell: bash or zsh.
    """
    options = {name: command_parser(name).known for name in COMMANDS if name != "train"}
    of_train = [option for system in system_configs() for option in train_parser(system).known]
    options["train"] = ["--model", *dict.fromkeys(of_train)]
    groups = {name.split()[0]: list[str]() for name in COMMANDS}
    for first, _, second in (name.partition(" ") for name in COMMANDS):
        groups[first] += [second] if second else []
    cases = {'"1 "*': list(groups)}
    cases |= {f'"2 {first} "*': [*names, *options.get(first, [])] for first, names in groups.items() if names}
    for name in sorted(options, key=lambda name: -len(name.split())):  # `results curves` before `results`
        cases[f'*" {name}"' if " " in name else f'*" {name} "*'] = options[name]
    lines = (f'        {pattern}) words="{" ".join(words)}" ;;' for pattern, words in cases.items())
    print((ZSH if shell == "zsh" else "") + SCRIPT % "\n".join(lines))
