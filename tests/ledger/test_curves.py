"""`logpast results curves`: loss curves from logs."""

import json
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from logpast.cli import main
from logpast.ledger.curves import curves
from logpast.util.errors import UserError


def log(path: Path, above: float = 0.0, steps: int = 40) -> Path:
    """A loss that falls by a tenth a step, logged every second step, and validated every tenth."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = []
    for step in range(2, steps + 1, 2):
        lines.append({"step": step, "loss": 9 - step / 10 + above, "tokens": 1_000_000 * step})
        if step % 10 == 0:
            lines.append({"step": step, "validation_loss": 10 - step / 10 + 2 * above})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": ')  # the last was cut off by a kill
    return path


def lines(axis: Axes) -> list[tuple[list[float], list[float]]]:
    return [tuple(np.asarray(part, float).tolist() for part in line.get_data()) for line in axis.lines]  # type: ignore[misc]


def test_plot_has_losses_and_their_differences(tmp_path: Path, drawn: list[Figure]) -> None:
    one, other = log(tmp_path / "a" / "log.jsonl"), log(tmp_path / "b.jsonl", above=0.5)
    found = curves([str(one.parent), str(other)], tmp_path / "plot.png")
    assert [curve.name for curve in found] == ["a", "b"]
    losses, differences = drawn[0].axes
    training, validation = lines(losses)[:2]
    assert training == (list(range(2, 41, 2)), pytest.approx([9 - step / 10 for step in range(2, 41, 2)]))
    assert validation == ([10, 20, 30, 40], pytest.approx([9, 8, 7, 6]))
    assert losses.get_ylim()[0] < 5
    assert losses.get_ylim()[1] > 10  # the highest dot, of the other, is whole
    assert lines(differences)[0] == (list(range(2, 41, 2)), pytest.approx([0.5] * 20))
    assert lines(differences)[1] == ([10, 20, 30, 40], pytest.approx([1.0] * 4))


def test_the_second_of_each_pair_is_compared_with_the_first(tmp_path: Path, drawn: list[Figure]) -> None:
    aboves = {"a": 0.0, "b": 0.5, "c": 3.0, "d": 2.0}
    logs = [str(log(tmp_path / f"{name}.jsonl", above)) for name, above in aboves.items()]
    curves(logs, tmp_path / "plot.png", pairs=True)
    losses, differences = drawn[0].axes
    assert len(lines(losses)) == 8
    assert [text.get_text() for text in drawn[0].legends[0].get_texts()] == list(aboves)
    assert [up[0] for _, up in lines(differences)[:4]] == pytest.approx([0.5, 1.0, -1.0, -2.0])
    with pytest.raises(UserError, match=r"--pairs .* 3"):
        curves(logs[:3], tmp_path / "plot.png", pairs=True)


def test_a_control_in_several_pairs_is_drawn_once(
    tmp_path: Path, drawn: list[Figure], capsys: pytest.CaptureFixture[str]
) -> None:
    a, b, c = (str(log(tmp_path / f"{name}.jsonl", above)) for name, above in (("a", 1.0), ("b", 0.5), ("c", 3.0)))
    found = curves([a, b, a, c], tmp_path / "plot.png", pairs=True)
    assert [curve.name for curve in found] == ["a", "b", "a", "c"]
    assert [text.get_text() for text in drawn[0].legends[0].get_texts()] == ["a", "b", "c"]
    _, differences = drawn[0].axes
    assert [up[0] for _, up in lines(differences)[:4]] == pytest.approx([-0.5, -1.0, 2.0, 4.0])
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:4]] == ["a", "b", "c"]


def test_steps_on_the_x_axis_without_validation(tmp_path: Path, drawn: list[Figure]) -> None:
    curves([str(log(tmp_path / "a.jsonl", steps=8))], tmp_path / "plot.png", x="step")
    assert len(drawn[0].axes) == 1
    assert lines(drawn[0].axes[0]) == [([2, 4, 6, 8], pytest.approx([8.8, 8.6, 8.4, 8.2]))]


def test_training_losses_are_a_running_mean(tmp_path: Path, drawn: list[Figure]) -> None:
    curves([str(log(tmp_path / "a.jsonl", steps=80))], tmp_path / "plot.png")
    across, up = lines(drawn[0].axes[0])[0]
    assert across == pytest.approx(list(range(3, 80, 2)))  # means of two neighbours
    assert up == pytest.approx([9 - step / 10 for step in range(3, 80, 2)])


def test_logs_without_common_steps_are_drawn_without_a_warning(
    tmp_path: Path, drawn: list[Figure], recwarn: pytest.WarningsRecorder
) -> None:
    one, other = log(tmp_path / "a.jsonl", steps=2), log(tmp_path / "b.jsonl", steps=20)
    text = other.read_text().replace('"step": 2,', '"step": 3,').splitlines()[:1]
    other.write_text(
        "\n".join([*text, '{"step": 3, "validation_loss": NaN}', '{"step": 3, "validation_loss": Infinity}'])
    )
    found = curves([str(one), str(other)], tmp_path / "plot.png")
    assert found[1].validation == {}
    assert [text.get_text() for text in drawn[0].axes[1].texts] == ["no logged step in common"]
    assert not recwarn.list


def test_command_line_prints_a_table_and_writes_the_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [log(tmp_path / group / "same" / "log.jsonl").parent for group in ("x", "y")]
    with pytest.raises(SystemExit) as stop:
        main(["results", "curves", *map(str, runs), "--plot", str(tmp_path / "new" / "plot.png")])
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    assert "x/same" in printed
    assert "403.429" in printed  # e^6
    assert (tmp_path / "new" / "plot.png").stat().st_size > 10_000


def test_labels_are_escaped(tmp_path: Path, drawn: list[Figure], monkeypatch: pytest.MonkeyPatch) -> None:
    log(tmp_path / r"a$\x$.jsonl")
    (here := tmp_path / "_here").mkdir()
    log(here / "log.jsonl")
    monkeypatch.chdir(here)
    curves([".", str(tmp_path / r"a$\x$.jsonl")], tmp_path / "c.png")
    assert [text.get_text() for text in drawn[0].legends[0].get_texts()] == [" _here", r"a\$\x\$"]
    drawn[0].draw_without_rendering()
    assert "loss of  _here" in drawn[0].axes[1].get_title()


def test_differences_of_pairs_have_a_wider_axis_and_the_legend_is_opaque(tmp_path: Path, drawn: list[Figure]) -> None:
    logs = [str(log(tmp_path / f"{name}.jsonl")) for name in "abcd"]
    curves(logs, tmp_path / "plot.png", pairs=True)
    curves(logs, tmp_path / "plot.png")
    assert [figure.axes[0].get_gridspec().get_width_ratios() for figure in drawn] == [[2, 3], [1, 1]]  # type: ignore
    assert {handle.get_alpha() for handle in drawn[0].legends[0].legend_handles if handle} == {1}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"loss": 3}\n', "line 1 .* step"),
        ('{"step": 1, "loss": 3, "tokens": NaN}\n', "tokens"),
        ('{"step": 1, "loss": 3}\n', "tokens"),
        ('{"step": 1, "loss": "x", "tokens": 1}\n', "not a run's log"),
        ('{"step": 1}\n', "training loss"),
    ],
)
def test_damaged_logs_are_reported(text: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "odd.jsonl").write_text(text)
    with pytest.raises(UserError, match=rf"odd\.jsonl.*{problem}"):
        curves([str(tmp_path / "odd.jsonl")], tmp_path / "plot.png")


def test_missing_logs_and_unknown_formats_are_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere does not exist"):
        curves([str(tmp_path / "nowhere")], tmp_path / "plot.png")
    with pytest.raises(UserError, match=r"plot\.xyz"):
        curves([str(tmp_path)], tmp_path / "plot.xyz")


def test_validation_before_the_first_step_is_in_the_table(
    tmp_path: Path, drawn: list[Figure], capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "a.jsonl"
    place.write_text('{"step": 0, "validation_loss": 0}\n{"step": 1, "loss": 3, "tokens": 5}\n')
    curves([str(place)], tmp_path / "plot.png")
    assert capsys.readouterr().out.splitlines()[1].split() == ["a", "1", "5", "3.0000", "1.000", "0"]
