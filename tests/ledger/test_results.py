"""`logpast results`: every row, the right ones, in every form."""

import csv
import errno
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from logpast.cli import main
from logpast.ledger import row as ledger
from logpast.ledger.results import results
from logpast.reporting.plots import line_style
from logpast.util import files
from logpast.util.errors import UserError

HERE = Path(__file__).parents[2] / "results"


def test_every_row_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    rows = results(folder=HERE)
    lines = capsys.readouterr().out.splitlines()
    there = {path.stem: path for path in [*HERE.glob("*.jsonl"), *HERE.glob("*.json")]}
    assert {row["file"] for row in rows} == set(there)
    for name, path in there.items():
        if path.suffix == ".jsonl":
            assert sum(line.startswith(f"{name} ") for line in lines) == len(path.read_text().splitlines())
        else:
            assert any(line.startswith(f"{name}.json: ") for line in lines)
    assert lines[0].split()[:6] == ["file", "run", "system", "window", "L", "k"]
    line = next(line.split() for line in lines if line.split()[:2] == ["demo-text", "log_memory-0"])
    assert " ".join(line[2:]) == "log_memory 16 33 100 kjv 1,228,788 0 38.96 262.3 1.5121 1d4c68c"


def test_mistakes_are_named(tmp_path: Path) -> None:
    for where, told in (("sed=0", "did you mean seed"), ("xyzzy=0", "known: file, run"), ("seed", "NAME=VALUE")):
        with pytest.raises(UserError, match=told):
            results([where], HERE)
    with pytest.raises(UserError, match=r"no folder .* give --folder"):
        results(folder=tmp_path / "nowhere")
    with pytest.raises(UserError, match="did you mean `logpast results pages`"):
        results(["page"], tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"holds no rows; .*--record"):
        results(folder=tmp_path)
    with pytest.raises(UserError, match=r"fits file=demo-text seed=7; its seed may be 0, 1, 2, 3, 4$"):
        results(["file=demo-text", "seed=7"], HERE)
    with pytest.raises(UserError, match="those that fit the rest have no seed"):
        results(["file=train_gpu", "seed=0"], HERE)
    with pytest.raises(UserError, match="both L and ms"):
        results(folder=HERE, plot=tmp_path / "p.png", y="ms")
    with pytest.raises(UserError, match="--x, --y and --by are of a picture; give --plot FILE too"):
        results(folder=HERE, y="bits_per_byte")
    with pytest.raises(UserError, match="did you mean ppl_word"):
        results(folder=HERE, plot=tmp_path / "p.png", y="ppl_wrd")
    with pytest.raises(UserError, match="did you mean system"):
        results(folder=HERE, plot=tmp_path / "p.png", by="k, sytem")
    (tmp_path / "bad.jsonl").write_text('{"a": 1}\n{"a":\n')
    with pytest.raises(UserError, match=r"bad\.jsonl, line 2"):
        results(folder=tmp_path)
    (tmp_path / "bad.jsonl").unlink()
    (tmp_path / "bad.json").write_text("[1]")
    with pytest.raises(UserError, match=r"bad\.json is not a table"):
        results(folder=tmp_path)


RUN: dict[str, Any] = {
    "trained_at_revision": "0", "train_data": {"name": "a"}, "test_data": {"name": "a"}, "recipe": {}, "scores": {},
}  # fmt: skip


def test_json_and_csv(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["results", "file=demo-text", "seed=0", "--folder", str(HERE), "--json", "-"])
    assert not stop.value.code
    rows = json.loads(capsys.readouterr().out)
    assert [row["recipe"]["model"]["system"] for row in rows] == ["log_memory", "recent"]
    results(["file=demo-text", "seed=0"], HERE, csv=str(tmp_path / "rows.csv"))
    with (tmp_path / "rows.csv").open() as file:
        first = next(csv.DictReader(file))
    assert float(first["ppl_token"]) == rows[0]["scores"]["ppl_token"]
    with pytest.raises(UserError, match="is a folder"):
        results(folder=HERE, json=str(tmp_path))


def test_rows_are_never_written_over(tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    shutil.copytree(HERE, folder)
    (tmp_path / "link.csv").symlink_to(folder / "demo-text.jsonl")
    before = {path: path.read_bytes() for path in folder.glob("*.json*")}
    for target in (folder / "demo-text.jsonl", folder / "new.json", tmp_path / "link.csv"):
        for option in ("json", "csv"):
            with pytest.raises(UserError, match="to another folder"):
                results(folder=folder, **{option: str(target)})
    assert {path: path.read_bytes() for path in folder.glob("*.json*")} == before
    for one, other in (("-", "-"), (str(tmp_path / "a"), str(tmp_path / "rows" / ".." / "a"))):
        with pytest.raises(UserError, match="each its own place"):
            results(folder=folder, json=one, csv=other)
    assert not (tmp_path / "a").exists()


def test_rows_of_the_checkout_are_kept_whatever_folder_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(HERE, tmp_path / "results", ignore=shutil.ignore_patterns("logs", "analyses"))
    monkeypatch.chdir(tmp_path)
    for option, told in (("json", "to another folder"), ("csv", "among what results keeps")):
        target = Path("results") / {"json": "demo-text.jsonl", "csv": "README.md"}[option]
        with pytest.raises(UserError, match=told):
            results(["file=demo-text"], HERE, **{option: str(target)})  # type: ignore[arg-type]
        assert target.read_bytes() == (HERE / target.name).read_bytes()


def test_what_is_there_stays_if_the_new_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "sync", full)
    for option in ("json", "csv"):
        (tmp_path / option).write_text("old")
        with pytest.raises(UserError, match="No space left on device; make room"):
            results(folder=HERE, **{option: str(tmp_path / option)})  # type: ignore[arg-type]
        assert (tmp_path / option).read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 2


def test_odd_names(tmp_path: Path) -> None:
    names = ["a[1]?", "a1b", "half \ud800"]
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "a.jsonl").write_text("".join(json.dumps(RUN | {"run": name}) + "\n" for name in names))
    assert [row["run"] for row in results(["run=a[1]?"], tmp_path / "rows")] == ["a[1]?"]
    assert len(results(["run=a*"], tmp_path / "rows")) == 2
    results(folder=tmp_path / "rows", json=str(tmp_path / "r.json"), csv=str(tmp_path / "r.csv"))
    assert [row["run"] for row in json.loads((tmp_path / "r.json").read_text())][2] == "half ?"


def test_standard_output_holds_nothing_but_the_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results(["file=demo-text"], HERE, json="-", csv=str(tmp_path / "c.csv"), plot=tmp_path / "p.png")
    told = capsys.readouterr()
    assert len(json.loads(told.out)) == 10
    assert "c.csv" in told.err
    assert "p.png" in told.err


def test_a_plot_of_a_benchmark(tmp_path: Path) -> None:
    results(["file=train_gpu"], HERE, plot=tmp_path / "p.png", x="sees", y="ms")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_has_the_means(tmp_path: Path, drawn: list[Figure]) -> None:
    rows = results(["file=demo-text"], HERE, plot=tmp_path / "q.png", y="bits_per_byte", by="system")
    (axis,) = drawn[0].axes
    means = {line.get_label(): line.get_xydata().tolist() for line in axis.lines if line.get_linestyle() == "-"}
    values = [row["scores"]["bits_per_byte"] for row in rows if row["recipe"]["model"]["system"] == "recent"]
    assert means["recent"] == [[33, pytest.approx(sum(values) / 5)]]
    assert set(means) == {"log_memory", "recent"}


def test_lines_are_of_models_that_are_alike(tmp_path: Path, drawn: list[Figure]) -> None:
    """The plain window and full attention are both without slots; no line has both."""
    results(["file=rivals-wiki", "system=recent"], HERE, plot=tmp_path / "q.png")
    labels = [line.get_label() for line in drawn[0].axes[0].lines if line.get_linestyle() == "-"]
    assert labels == ["window = 1,024", "window = 256"]


def test_lines_are_told_apart_by_whatever_differs(tmp_path: Path, drawn: list[Figure]) -> None:
    """Wide and narrow models, counts that are the same in six digits, and a file whose name is a formula."""
    results(["file=sweep-rereading", "corpus=kjv", "system=recent"], HERE, plot=tmp_path / "q.png")
    (tmp_path / "_$x$.json").write_text(json.dumps({"rows": [{"n": n, "v": n % 7} for n in (39_995_076, 39_995_120)]}))
    results(folder=tmp_path, plot=tmp_path / "q.png", x="v", y="v", by="n")
    results(folder=tmp_path, plot=tmp_path / "q.png", x="v", y="v", by="n,file")
    results(folder=tmp_path, plot=tmp_path / "q.png", x="v", y="v")
    found = [
        [str(line.get_label()) for line in figure.axes[0].lines if line.get_linestyle() == "-"] for figure in drawn
    ]
    numbers = ["n = 39,995,076", "n = 39,995,120"]
    assert found[:3] == [["model.width = 192", "model.width = 96"], numbers, numbers]
    assert drawn[3].axes[0].get_title() == r" _\$x\$"
    names = ["long " * 9 + end for end in "ab"]
    rows = [{"n": [1, 2], "v": 1, "w": name} for name in names]
    (tmp_path / "b.json").write_text(json.dumps({"rows": rows}))
    results(["file=b"], tmp_path, plot=tmp_path / "q.png", x="v", y="v", by="n,w")
    assert [line.get_label() for line in drawn[4].axes[0].lines][::2] == [f"w = {name}" for name in names]


def test_rows_that_are_not_alike_are_not_averaged(tmp_path: Path, drawn: list[Figure]) -> None:
    """Other texts under one name, or another way to count words, make another line; a row twice weighs once."""
    row = ledger.read(HERE / "sweep-pairs.jsonl")[0]
    other = row | {"recipe": row["recipe"] | {"seed": 1}, "recipe_hash": "1", "seed": 1}

    def lines(*rows: dict[str, Any]) -> dict[str, list[float]]:
        (tmp_path / "r.jsonl").unlink(missing_ok=True)
        for each in rows:
            ledger.append(tmp_path / "r.jsonl", each)
        results(folder=tmp_path, plot=tmp_path / "q.png")
        return {
            str(line.get_label()): list(line.get_ydata())
            for line in drawn[-1].axes[0].lines
            if line.get_marker() == "None"
        }

    def scored(row: dict[str, Any], ppl: float, **changed: object) -> dict[str, Any]:
        return row | {"scores": row["scores"] | changed | {"ppl_token": ppl}}

    assert [*lines(scored(row, 30), scored(row, 30), scored(other, 36)).values()] == [[33]]
    assert lines(scored(row, 30), scored(row, 36, streams="document")) == {
        "scores.streams = corpus": [30], "scores.streams = document": [36],
    }  # fmt: skip
    anew = row | {"test_data": row["test_data"] | {"sha256": "f" * 64}}
    first = f"test_data.sha256 = {row['test_data']['sha256'][:7]}"
    for ppl in (36, 30):
        assert lines(scored(row, 30), scored(anew, ppl)) == {first: [30], "test_data.sha256 = fffffff": [ppl]}


def test_a_row_with_a_list_where_a_word_belongs_is_drawn(tmp_path: Path, drawn: list[Figure]) -> None:
    row = ledger.read(HERE / "sweep-pairs.jsonl")[0]
    ledger.append(tmp_path / "r.jsonl", row | {"scores": row["scores"] | {"accounting": ["all"]}})
    results(folder=tmp_path, plot=tmp_path / "q.png")
    assert len(drawn) == 1


def test_no_two_lines_look_alike(tmp_path: Path, drawn: list[Figure]) -> None:
    results(folder=HERE, plot=tmp_path / "q.png")
    lines = [line for line in drawn[0].axes[0].lines if line.get_marker() == "None"]
    assert len(lines) > 40
    assert len({str(line_style(number)) for number in range(len(lines))}) == len(lines)


def test_reading_does_not_wait_for_torch() -> None:
    code = f"""
import sys
from pathlib import Path
from logpast.ledger.results import results
results(folder=Path({str(HERE)!r}))
assert 'torch' not in sys.modules"""
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0
