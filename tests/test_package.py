"""The package as a whole: what can be imported from it, what that costs, and that its floors hold."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import logpast

SOURCE = Path(logpast.__file__).parent
# the floors, ground first; a module may import from its own floor and from those below
FLOORS = [
    ["errors", "version", "filters", "files"],
    ["memory", "environment", "progress"],
    ["models", "data"],
    ["metrics"],
    ["scoring"],
    ["training"],
    ["generation", "experiments"],
    ["cli"],
]


@pytest.mark.parametrize("name", logpast.__all__)
def test_public_names_are_there(name: str) -> None:
    assert getattr(logpast, name) is not None


def test_unknown_names_are_not() -> None:
    with pytest.raises(AttributeError, match="no attribute 'LogMemry'"):
        logpast.LogMemry  # noqa: B018


@pytest.mark.parametrize("module", ["logpast", "logpast.filters", "logpast.cli", "logpast.data"])
def test_light_modules_do_not_import_torch(module: str) -> None:
    code = f"import sys, {module}; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_no_arrow_runs_back_up() -> None:
    floor_of = {name: number for number, names in enumerate(FLOORS) for name in names}
    for file in SOURCE.rglob("*.py"):
        room = file.relative_to(SOURCE).parts[0].removesuffix(".py")
        if room.startswith("__"):
            continue
        assert room in floor_of, f"{room} is on no floor"
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("logpast."):
                used = str(node.module).split(".")[1]
                assert floor_of[used] <= floor_of[room], f"{file.name} imports {node.module}"
