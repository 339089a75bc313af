"""CONTRIBUTING.md describes every package and module; every module has a test file of its name."""

import re
from pathlib import Path

from markdown_pages import ROOT, code_blocks

SOURCE = ROOT / "src" / "logpast"
MODULES = sorted(path for path in SOURCE.rglob("*.py") if path.name not in ("__init__.py", "__main__.py", "version.py"))
(TREE,) = [block for block in code_blocks(ROOT / "CONTRIBUTING.md") if block.startswith("src/logpast/")]


def entries(tree: str) -> dict[str, str]:
    """Entry of the tree at the level of packages -> its text, with the lines below it."""
    below = tree[: tree.index("\ntools/")]
    found = re.findall(r"^  (\S+)(.*\n(?:    .*\n)*)", below + "\n", re.M)
    return {name.rstrip("/"): text for name, text in found}


def relative(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def test_layout_names_every_module() -> None:
    missing = []
    for module in MODULES:
        package, *rest = module.relative_to(SOURCE).parts
        text = entries(TREE).get(package, "")
        if package not in entries(TREE) or not all(re.search(rf"\b{Path(part).stem}\b", text) for part in rest):
            missing.append(relative(module))
    assert not missing, missing


def test_layout_names_every_folder() -> None:
    folders = {path.name for path in SOURCE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders <= set(entries(TREE))
    top = {path.name for path in ROOT.iterdir() if path.is_dir() and path.name in TREE}
    assert (
        set(re.findall(r"^(\w+)/ ", TREE, re.M)) == top - {"src"} == {"tools", "docs", "results", "benchmarks", "tests"}
    )


def test_layout_names_nothing_that_does_not_exist() -> None:
    for name, text in entries(TREE).items():
        assert (SOURCE / name).exists(), name
        files = re.findall(r"[\w/]+\.(?:py|yaml)\b", text)
        for file in files:
            assert list((SOURCE / name).rglob(file)), f"{name}/ has no {file}"
        folders = re.findall(r"\b(\w+)/ ", text)
        assert all((SOURCE / name / folder).is_dir() for folder in folders), f"{name}/: {folders}"
    listed = re.findall(r"\w+", entries(TREE)["util"])  # by name, without .py
    assert all((SOURCE / "util" / f"{module}.py").exists() for module in listed), listed
    for file in re.findall(r"\w+\.py", TREE[TREE.index("\ntools/") :].splitlines()[1]):
        assert (ROOT / "tools" / file).exists(), file


def test_every_module_has_a_test_file_of_its_name() -> None:
    expected = [module.relative_to(SOURCE).with_name(f"test_{module.name}") for module in MODULES]
    missing = [file.as_posix() for file in expected if not (ROOT / "tests" / file).exists()]
    assert not missing, missing
