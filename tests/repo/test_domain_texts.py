"""benchmarks/domain_texts.py: what is taken as recent, and which documents are held out."""

from pathlib import Path

import pytest
from benchmarks import domain_texts as texts

CHANGELOG = """# Project
Made on 2026-01-01, not a heading.
## 2.0 (2026-03-04)
new
* since Mar 5, 2026 also this
## 1.0 (2023-03-04)
old
v1.1, January 3, 2025
newer
"""


def test_recent_part_of_a_changelog_is_below_headings_with_a_date() -> None:
    found = texts.dated_part(CHANGELOG, 2025).splitlines()
    assert found == ["## 2.0 (2026-03-04)", "new", "* since Mar 5, 2026 also this", "v1.1, January 3, 2025", "newer"]
    assert texts.dated_part(CHANGELOG, 2027) == ""


@pytest.mark.parametrize("notice", ["# Copyright 2026 me", "# copyright (c) 2025 you"])
def test_docstrings_are_those_of_files_with_a_recent_copyright(notice: str) -> None:
    source = (
        '"""Module."""\nclass A:\n    """Class."""\n    def f(self):\n        """Method."""\n        return "text"\n'
    )
    assert texts.docstrings(f"{notice}\n{source}", 2025) == "Module.\n\nClass.\n\nMethod."
    assert texts.docstrings(f"{notice}\n{source}", 2027) == ""
    assert texts.docstrings(source, 2025) == ""


def test_code_is_without_tests_and_split_by_name(tmp_path: Path) -> None:
    for name in ("a.py", "b/c.py", "b/test/d.py", "b/e.txt", *(f"m{number}.py" for number in range(40))):
        (tmp_path / "lib" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "lib" / name).write_text(f"# {name}\n")
    sizes = texts.write(texts.code(tmp_path / "lib"), tmp_path / "out", "here")
    train, test = ({file.stem for file in (tmp_path / "out" / split).iterdir()} for split in ("train", "test"))
    assert train | test == {"a.py", "b.c.py", *(f"m{number}.py" for number in range(40))}
    assert not train & test
    assert test == {name for name in train | test if texts.held_out(name)}
    assert 2 < len(test) < 16
    assert sizes["train"] > sizes["test"] > 0
