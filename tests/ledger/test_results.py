"""`logpast results`: rows are listed, filtered, exported and plotted."""

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

from ledger_rows import scored_row
from logpast.cli import main
from logpast.ledger import row as ledger
from logpast.ledger.results import results
from logpast.reporting.plots import line_style
from logpast.util import files
from logpast.util.errors import UserError

RESULTS = Path(__file__).parents[2] / "results"


def test_every_row_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    rows = results(folder=RESULTS)
    lines = capsys.readouterr().out.splitlines()
    files = {path.stem: path for path in [*RESULTS.glob("*.jsonl"), *RESULTS.glob("*.json")]}
    assert {row["file"] for row in rows} == set(files)
    for name, path in files.items():
        if path.suffix == ".jsonl":
            assert sum(line.startswith(f"{name} ") for line in lines) == len(path.read_text().splitlines())
        else:
            assert any(line.startswith(f"{name}.json: ") for line in lines)
    assert lines[0].split()[:6] == ["file", "run", "system", "window", "L", "k"]
    line = next(line.split() for line in lines if line.split()[:2] == ["demo-text", "memory"])
    assert " ".join(line[2:]) == "log_memory 16 33 100 kjv 813,147 0 49.34 375.6 1.6096 13c4679"


@pytest.mark.parametrize(
    ("where", "problem"),
    [
        (["sed=0"], "'sed'.*seed"),
        (["xyzzy=0"], "'xyzzy'; known: file, run"),
        (["seed"], "'seed'.*NAME=VALUE"),
        (["comparsion"], "logpast results comparison"),
        (["file=demo-text", "seed=7"], "file=demo-text seed=7; known values of seed: 0, 1, 2, 3, 4$"),
        (["file=train_gpu", "seed=0"], "have no seed"),
    ],
)
def test_wrong_conditions_are_reported(where: list[str], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        results(where, RESULTS)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"y": "ms", "plot": "p.png"}, "both L and ms"),
        ({"y": "bits_per_byte"}, "--y .*--plot"),
        ({"y": "ppl_wrd", "plot": "p.png"}, "'ppl_wrd'.*ppl_word"),
        ({"by": "k, sytem", "plot": "p.png"}, "'sytem'.*system"),
        ({"plot": "p.txt"}, r"p\.txt"),
    ],
)
def test_wrong_plots_are_reported(
    options: dict[str, Any], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=problem):
        results(folder=RESULTS, **options)


def test_folders_without_rows_are_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere.* --folder"):
        results(folder=tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"no rows; .*--record"):
        results(folder=tmp_path)
    (tmp_path / "bad.jsonl").write_text('{"a": 1}\n{"a":\n')
    with pytest.raises(UserError, match=r"bad\.jsonl, line 2"):
        results(folder=tmp_path)


def test_rows_of_a_sweep_are_shown_without_naming_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"no sweep or comparison.*--folder"):
        results()
    names = [f"runs/sweep-{number}/ledger.jsonl" for number in range(9)]
    for name in names:
        ledger.append(Path(name), scored_row(run=name[11]))
    ledger.append(Path("results/mine.jsonl"), scored_row())
    assert [row["file"] for row in results()] == ["mine", *(f"runs/sweep-{number}" for number in range(9))]
    printed = capsys.readouterr()
    assert "runs/sweep-8" in printed.out
    assert printed.err == f"rows from results/, {', '.join(names[:7])} and 2 more\n"
    assert [row["run"] for row in results(["file=runs/sweep-3"])] == ["3"]
    with pytest.raises(UserError, match=names[0]):
        results(json=names[0])
    capsys.readouterr()
    results(json="rows.json", folder=Path("runs/sweep-0"))
    assert "rows from" not in capsys.readouterr().err


def test_json_and_csv_have_full_precision(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["results", "file=demo-text", "seed=0", "--folder", str(RESULTS), "--json", "-"])
    assert not stop.value.code
    rows = json.loads(capsys.readouterr().out)
    assert [row["recipe"]["model"]["system"] for row in rows] == ["log_memory", "recent", "recent"]
    results(["file=demo-text", "seed=0"], RESULTS, csv=str(tmp_path / "rows.csv"))
    with (tmp_path / "rows.csv").open() as file:
        first = next(csv.DictReader(file))
    assert float(first["ppl_token"]) == rows[0]["scores"]["ppl_token"]
    with pytest.raises(UserError, match="is a folder"):
        results(folder=RESULTS, json=str(tmp_path))


def test_outputs_never_overwrite_rows(tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    shutil.copytree(RESULTS, folder)
    (tmp_path / "link.csv").symlink_to(folder / "demo-text.jsonl")
    kept = {path: path.read_bytes() for path in folder.glob("*.json*")}
    for target in (folder / "demo-text.jsonl", folder / "new.json", tmp_path / "link.csv"):
        for option in ("json", "csv"):
            with pytest.raises(UserError, match=target.name):
                results(folder=folder, **{option: str(target)})
    assert {path: path.read_bytes() for path in folder.glob("*.json*")} == kept
    for one, other in (("-", "-"), (str(tmp_path / "a"), str(tmp_path / "rows" / ".." / "a"))):
        with pytest.raises(UserError, match="--json and --csv"):
            results(folder=folder, json=one, csv=other)
    assert not (tmp_path / "a").exists()


def test_rows_of_the_checkout_are_never_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(RESULTS, tmp_path / "results", ignore=shutil.ignore_patterns("logs", "analyses"))
    monkeypatch.chdir(tmp_path)
    for option, name in (("json", "demo-text.jsonl"), ("csv", "README.md")):
        target = Path("results") / name
        with pytest.raises(UserError, match=name):
            results(["file=demo-text"], RESULTS, **{option: str(target)})  # type: ignore[arg-type]
        assert target.read_bytes() == (RESULTS / target.name).read_bytes()


def test_existing_outputs_stay_if_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "fsync", full)
    for option in ("json", "csv"):
        (tmp_path / option).write_text("old")
        with pytest.raises(UserError, match=f"{option}.*No space left on device"):
            results(folder=RESULTS, **{option: str(tmp_path / option)})  # type: ignore[arg-type]
        assert (tmp_path / option).read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 2


def test_rows_that_need_a_caveat_are_named_below_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def shown(**more: Any) -> str:
        (tmp_path / "r.jsonl").unlink(missing_ok=True)
        for name, changed in (("first", {}), ("second", more)):
            row = scored_row(run=name)
            ledger.append(tmp_path / "r.jsonl", row | {"scores": row["scores"] | changed})
        results(folder=tmp_path)
        return capsys.readouterr().out

    plain = shown(interval=None)
    assert plain.count("\n") == 3
    for more, caveat in (
        ({"stride": 64}, "scored in overlapping windows (scores.stride): second (a→b)"),
        (
            {"training_overlap": "it is"},
            "scored on text that the model was trained on (scores.training_overlap): second (a→b)",
        ),
    ):
        assert shown(**more) == f"{plain}{caveat}\n"


def test_names_with_wildcards_and_surrogates(tmp_path: Path) -> None:
    names = ["a[1]?", "a1b", "half \ud800"]
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "a.jsonl").write_text("".join(json.dumps(scored_row(run=name)) + "\n" for name in names))
    assert [row["run"] for row in results(["run=a[1]?"], tmp_path / "rows")] == ["a[1]?"]
    assert len(results(["run=a*"], tmp_path / "rows")) == 2
    results(folder=tmp_path / "rows", json=str(tmp_path / "r.json"), csv=str(tmp_path / "r.csv"))
    assert [row["run"] for row in json.loads((tmp_path / "r.json").read_text())][2] == "half ?"


def test_standard_output_has_only_the_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results(["file=demo-text", "seed=0"], RESULTS, json="-", csv=str(tmp_path / "c.csv"), plot=tmp_path / "p.png")
    printed = capsys.readouterr()
    assert len(json.loads(printed.out)) == 3
    assert "c.csv" in printed.err
    assert "p.png" in printed.err


def test_benchmarks_can_be_plotted(tmp_path: Path) -> None:
    results(["file=train_gpu"], RESULTS, plot=tmp_path / "p.png", x="sees", y="ms")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_plot_lines_are_means(tmp_path: Path, drawn: list[Figure]) -> None:
    rows = results(["file=demo-text"], RESULTS, plot=tmp_path / "q.png", y="bits_per_byte", by="system")
    (axis,) = drawn[0].axes
    means = {line.get_label(): line.get_xydata().tolist() for line in axis.lines if line.get_linestyle() == "-"}
    values = [row["scores"]["bits_per_byte"] for row in rows if row["recipe"]["model"]["system"] == "recent"]
    assert means["recent"] == [[33, pytest.approx(sum(values) / len(values))]]
    assert set(means) == {"log_memory", "recent"}


def test_models_of_different_windows_are_different_lines(tmp_path: Path, drawn: list[Figure]) -> None:
    """The plain window and full attention both have no slots."""
    results(["file=rivals-wiki", "system=recent"], RESULTS, plot=tmp_path / "q.png")
    labels = [line.get_label() for line in drawn[0].axes[0].lines if line.get_linestyle() == "-"]
    assert labels == ["window = 1,024", "window = 256"]


def test_lines_are_labelled_with_what_differs(tmp_path: Path, drawn: list[Figure]) -> None:
    """Wide and narrow models, counts that agree in six digits, and a file name with a formula."""
    results(["file=sweep-rereading", "corpus=kjv", "system=recent"], RESULTS, plot=tmp_path / "q.png")
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


def test_only_comparable_rows_are_averaged(tmp_path: Path, drawn: list[Figure]) -> None:
    """Different texts under one name, or different scoring, are different lines; a duplicate row counts once."""
    row = ledger.read(RESULTS / "sweep-pairs.jsonl")[0]
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
        scores = {name: value for name, value in row["scores"].items() if name != "by_document"}
        return row | {"scores": scores | changed | {"ppl_token": ppl}}

    assert [*lines(scored(row, 30), scored(row, 30), scored(other, 36)).values()] == [[33]]
    assert lines(scored(row, 30), scored(row, 36, streams="document")) == {
        "scores.streams = corpus": [30], "scores.streams = document": [36],
    }  # fmt: skip
    assert lines(scored(row, 30), scored(row, 29, stride=64)) == {"others": [30], "scores.stride = 64": [29]}
    other_text = row | {"test_data": row["test_data"] | {"sha256": "f" * 64}}
    first = f"test_data.sha256 = {row['test_data']['sha256'][:7]}"
    for ppl in (36, 30):
        assert lines(scored(row, 30), scored(other_text, ppl)) == {first: [30], "test_data.sha256 = fffffff": [ppl]}


def test_a_list_in_place_of_text_is_drawn(tmp_path: Path, drawn: list[Figure]) -> None:
    row = ledger.read(RESULTS / "sweep-pairs.jsonl")[0]
    ledger.append(tmp_path / "r.jsonl", row | {"scores": row["scores"] | {"accounting": ["all"]}})
    results(folder=tmp_path, plot=tmp_path / "q.png")
    assert len(drawn) == 1


def test_the_first_sixty_lines_have_different_styles(tmp_path: Path, drawn: list[Figure]) -> None:
    results(folder=RESULTS, plot=tmp_path / "q.png")
    lines = [line for line in drawn[0].axes[0].lines if line.get_marker() == "None"]
    assert len(lines) > 40
    styles = {(line.get_color(), str(line_style(number)["linestyle"])) for number, line in enumerate(lines[:60])}
    assert len(styles) == min(len(lines), 60)


def test_listing_rows_does_not_import_torch() -> None:
    code = f"""
import sys
from pathlib import Path
from logpast.ledger.results import results
results(folder=Path({str(RESULTS)!r}))
assert 'torch' not in sys.modules"""
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0
