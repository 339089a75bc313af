"""`logpast eval` end to end: counts, batch sizes, accounting, comparison, ledger."""

import errno
import json
import math
import multiprocessing
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from logpast.data import TokenStore
from logpast.data.prepare import prepare
from logpast.evaluation import evaluate as evaluation
from logpast.evaluation.evaluate import evaluate
from logpast.ledger import row as ledger
from logpast.models import LanguageModel, LogMemoryConfig, RecentConfig
from logpast.training.config import DataConfig, TrainConfig, recorded_settings
from logpast.training.loop import train
from logpast.util import files
from logpast.util.errors import UserError


@pytest.fixture
def run(train_config: TrainConfig) -> Path:
    train(replace(train_config, steps=10))
    return train_config.run


def test_figures_of_a_text_file(run: Path, books: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    result = evaluate(run, str(books), json="-")
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(json.dumps(result))
    text = "".join(file.read_text() for file in sorted(books.glob("*.txt")))
    assert result["words"] == len(text.split())
    assert result["bytes"] == len(text.encode())
    assert result["words_eos"] == result["words"] + text.count("\n")
    assert result["unscored"] == 0
    assert result["documents"] == 3
    assert result["ppl_token"] == pytest.approx(math.exp(result["nats"] / result["tokens"]))


def test_validation_while_training_is_what_eval_finds(run: Path, store: TokenStore) -> None:
    state = json.loads(next(run.glob("checkpoints/*10/state.json")).read_text())
    result = evaluate(run, str(store.path), batch_size=7)
    assert math.log(result["ppl_token"]) == pytest.approx(state["best"]["nats_per_token"], rel=1e-6)


@pytest.mark.parametrize("precision", ["float32", "float64", "bfloat16"])
def test_batch_size_changes_nothing(run: Path, books: Path, precision: str) -> None:
    nats = [evaluate(run, str(books), batch_size=size, precision=precision)["nats"] for size in (1, 7, 64)]  # type: ignore[arg-type]
    bound = {"float32": 1e-6, "float64": 1e-12, "bfloat16": 1e-3}[precision]
    assert nats == pytest.approx([nats[0]] * 3, rel=bound)
    if precision != "float32":  # and it is not float32 under another name
        assert nats[0] != evaluate(run, str(books))["nats"]


def test_human_readable_report(run: Path, books: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evaluate(run, str(books))
    out = capsys.readouterr().out
    assert "ppl_token" in out
    assert "95 %" in out


def test_paired_comparison(run: Path, train_config: TrainConfig, books: Path, tmp_path: Path) -> None:
    longer = replace(train_config, run=tmp_path / "longer", steps=40)
    train(longer)
    result = evaluate(longer.run, str(books), against=run)["against"]
    assert result["nats_per_token"] < 0
    assert result["interval"][1] < 0
    assert result["documents_better"] == 3
    evaluate(run, str(books), save_nats=tmp_path / "nats.npy")
    assert evaluate(longer.run, str(books), against=tmp_path / "nats.npy")["against"][
        "nats_per_token"
    ] == pytest.approx(result["nats_per_token"], rel=1e-6)
    np.save(tmp_path / "short.npy", np.ones(5))
    with pytest.raises(UserError, match="save them anew"):
        evaluate(longer.run, str(books), against=tmp_path / "short.npy")


def test_streams_per_document(run: Path, books: Path) -> None:
    corpus, document = (evaluate(run, str(books), streams=streams)["nats"] for streams in ("corpus", "document"))  # type: ignore[arg-type]
    assert corpus != pytest.approx(document, rel=1e-6)


def test_paper_accounting_selects_from_the_same_nats(
    run: Path, store: TokenStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """17 slots: τ = 16, m = 8. Batches of ⌈16384/24⌉·3 = 2,049 windows: too long for a small text."""
    with pytest.raises(UserError, match="scores nothing"):
        evaluate(run, str(store.path), accounting="paper")
    long = tmp_path / "long.txt"
    long.write_text(("And God said, Let there be light: and there was light.\n") * 1500)
    evaluate(run, str(long), save_nats=tmp_path / "nats.npy", batch_size=256)
    honest = capsys.readouterr().out
    result = evaluate(run, str(long), accounting="paper", batch_size=256)
    assert capsys.readouterr().out.endswith(honest)  # below
    nats = np.load(tmp_path / "nats.npy")
    assert result["tokens"] == 8 * 2049
    assert result["unscored"] == len(nats) - 8 * 2049
    assert result["nats"] == pytest.approx(nats[16 : 16 + 8 * 2049].sum(), rel=1e-6)
    assert result["ppl_word"] == pytest.approx(math.exp(result["nats"] / (11 * 1500)), rel=1e-6)


def test_paper_accounting_takes_the_control_by_its_slots(train_config: TrainConfig, tmp_path: Path) -> None:
    """17 slots of the control, like 17 of the memory, stand for τ = 16; the memory's own bank decides for it: its last
    peak, however far beyond that it reaches.
    """
    long = tmp_path / "long.txt"
    long.write_text(("And God said, Let there be light: and there was light.\n") * 1500)
    sizes = {"slots": 17, "window": 8, "layers": 1, "heads": 1, "width": 8}
    models = {"control": RecentConfig(**sizes), "wide": LogMemoryConfig(spacing=0.3, reach=3.0, **sizes)}
    unscored = {}
    for name, model in models.items():
        config = replace(train_config, run=tmp_path / name, steps=1, model=model)
        train(config)
        evaluate(config.run, str(long), save_nats=tmp_path / f"{name}.npy", batch_size=256)
        result = evaluate(config.run, str(long), accounting="paper", batch_size=256)
        horizon = 16 if name == "control" else 67  # 1.3^16 = 66.5
        scored = result["tokens"]
        nats = np.load(tmp_path / f"{name}.npy")
        assert result["nats"] == pytest.approx(nats[horizon : horizon + scored].sum(), rel=1e-6)
        unscored[name] = result["unscored"]
    assert unscored["control"] != unscored["wide"]


def test_a_row_is_kept_though_nobody_reads_the_output(
    run: Path, books: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(evaluation, "_report", gone)
    with pytest.raises(BrokenPipeError):
        evaluate(run, str(books), record=tmp_path / "rows.jsonl")
    assert len(ledger.read(tmp_path / "rows.jsonl")) == 1


def test_text_without_words_gives_valid_json(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "blank.txt").write_text(" \n" * 30)
    capsys.readouterr()
    evaluate(run, str(tmp_path / "blank.txt"), json="-", record=tmp_path / "rows.jsonl")
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["ppl_word"] is None
    assert ledger.read(tmp_path / "rows.jsonl")[0]["scores"]["ppl_word"] is None


def test_places_that_cannot_be_written_are_told_before_scoring(run: Path, books: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for option, suffix in (("json", ".json"), ("record", ".jsonl"), ("save_nats", ".npy")):
        folder = tmp_path / f"folder{suffix}"
        folder.mkdir()
        for wrong, why in ((folder, "is a folder"), (tmp_path / "file" / f"x{suffix}", "")):
            with pytest.raises(UserError, match=f"{wrong}.*{why}"):
                evaluate(run, str(books), **{option: str(wrong)})  # type: ignore[arg-type]
    same = tmp_path / "same.jsonl"
    same.write_text("precious")
    for two in (
        {"json": str(same), "record": same},
        {"json": f"{tmp_path}/file/../same.npy", "save_nats": tmp_path / "same.npy"},
    ):
        with pytest.raises(UserError, match=r"would both be written to .*same\..*; give each its own place"):
            evaluate(run, str(books), **two)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"ends in \.jsonl"):
        evaluate(run, str(books), record=tmp_path / "table.json")
    assert same.read_text() == "precious"
    (tmp_path / "empty.npy").write_bytes(b"")
    with pytest.raises(UserError, match="cannot read saved nats"):
        evaluate(run, str(books), against=tmp_path / "empty.npy")


def test_saved_nats_are_numbers(run: Path, store: TokenStore, tmp_path: Path) -> None:
    nats = np.full(len(store), 2.0)
    for wrong in (np.where(np.arange(len(store)) == 3, np.nan, nats), nats.astype(complex), nats > 1, nats.astype(str)):
        np.save(tmp_path / "n.npy", wrong)
        with pytest.raises(UserError, match="does not hold the nats of"):
            evaluate(run, str(store.path), against=tmp_path / "n.npy")
    np.save(tmp_path / "n.npy", nats)
    assert evaluate(run, str(store.path), against=str(tmp_path / "n.npy"))["against"]  # type: ignore[arg-type]


def test_a_full_disk_takes_no_scores_away(
    run: Path, books: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "n.npy").write_text("old")
    monkeypatch.setattr(files, "sync", full)
    with pytest.raises(UserError, match="No space left"):
        evaluate(run, str(books), save_nats=tmp_path / "n.npy")
    assert (tmp_path / "n.npy").read_text() == "old"
    assert "ppl_token" in capsys.readouterr().out
    with pytest.raises(UserError, match="No space left"):
        evaluate(run, str(books), json=str(tmp_path / "scores.json"))
    assert "ppl_token" in capsys.readouterr().out


def test_a_model_without_numbers_is_told(run: Path, books: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "score", lambda *args, **settings: np.array([1.0, np.nan]))
    with pytest.raises(UserError, match="gives no numbers: its training diverged"):
        evaluate(run, str(books))


def test_paper_accounting_needs_slots(train_config: TrainConfig, books: Path) -> None:
    config = replace(train_config, steps=1, model=RecentConfig(slots=0, window=8, layers=1, heads=1, width=8))
    train(config)
    with pytest.raises(UserError, match="slots"):
        evaluate(config.run, str(books), accounting="paper")


def test_ledger_row_has_all_that_is_needed(run: Path, books: Path, tmp_path: Path) -> None:
    path = tmp_path / "results" / "books.jsonl"
    for _ in range(2):
        evaluate(run, str(books), record=path)
    rows = ledger.read(path)
    assert len(rows) == 2
    row = rows[0]
    assert {
        "recorded", "logpast", "scored_at_revision", "trained_at_revision", "run", "recipe", "recipe_hash", "seed",
        "step", "parameters", "train_tokens", "train_seconds", "train_data", "validation_data", "hardware",
        "test_data", "scores",
    } == set(row)  # fmt: skip
    assert row["recipe"]["model"]["slots"] == 17
    assert len(row["test_data"]["sha256"]) == 64
    assert row["train_data"]["sha256"] == row["validation_data"]["sha256"] == row["test_data"]["sha256"]
    assert row["hardware"]["cores"] >= 1
    assert {"nats", "tokens", "words", "words_eos", "bytes", "ppl_token", "ppl_word", "bits_per_byte"} <= set(
        row["scores"]
    )
    assert rows[0]["recipe_hash"] == rows[1]["recipe_hash"]


def test_recipe_hash_ignores_where_and_how_often_and_nothing_else(train_config: TrainConfig) -> None:
    def named(config: TrainConfig) -> str:
        return ledger.hash_recipe(recorded_settings(config))

    assert named(train_config) == named(replace(train_config, run=Path("x"), log_every=7, keep=9))
    assert named(train_config) != named(replace(train_config, seed=1))
    # of the weights that were validated the best are scored
    often, blind = replace(train_config, validate_every=7), replace(train_config.data, validation=None)
    assert named(train_config) != named(often)
    assert named(replace(train_config, data=blind)) == named(replace(often, data=blind))
    assert named(train_config) != named(replace(train_config, model=LogMemoryConfig(slots=5)))


def _append_many(path: Path, who: int) -> None:
    for number in range(50):
        ledger.append(path, {"who": who, "number": number, "filler": "x" * 3000})


def test_many_processes_may_write_to_one_ledger(tmp_path: Path) -> None:
    path = tmp_path / "shared.jsonl"
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_append_many, args=(path, who)) for who in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    rows = ledger.read(path)
    assert len(rows) == 200
    assert {(row["who"], row["number"]) for row in rows} == {(w, n) for w in range(4) for n in range(50)}


def test_damaged_ledger_is_not_made_worse(tmp_path: Path) -> None:
    path = tmp_path / "damaged.jsonl"
    path.write_text('{"a": 1}\n{"b": ')
    with pytest.raises(UserError, match="damaged"):
        ledger.append(path, {"c": 3})
    assert path.read_text() == '{"a": 1}\n{"b": '


def test_a_row_that_does_not_fit_leaves_the_ledger_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "rows.jsonl"
    ledger.append(place, {"seed": 0})
    before = place.read_bytes()
    half = SimpleNamespace(**vars(os) | {"write": lambda handle, data: os.write(handle, data[: len(data) // 2])})
    monkeypatch.setattr(ledger, "os", half)
    with pytest.raises(UserError, match="the disk is full; it is as it was before"):
        ledger.append(place, {"seed": 1})
    assert place.read_bytes() == before


def test_mistakes_are_named(run: Path, books: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no checkpoint at"):
        evaluate(tmp_path / "nowhere", str(books))
    with pytest.raises(UserError, match="no whole checkpoint"):
        evaluate(tmp_path, str(books))
    with pytest.raises(UserError, match="nothing-here"):
        evaluate(run, "nothing-here.txt")
    with pytest.raises(UserError, match="batch_size"):
        evaluate(run, str(books), batch_size=0)
    with pytest.raises(UserError, match="device"):
        evaluate(run, str(books), device="tpu")


def test_another_tokenizer_is_refused(run: Path, books: Path, tmp_path: Path) -> None:
    prepare([str(books)], tmp_path / "gpt2")
    with pytest.raises(UserError, match="tokenizer"):
        evaluate(run, str(tmp_path / "gpt2"))


def test_a_rival_that_is_not_there_costs_no_scoring(run: Path, books: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "score", lambda *_, **__: pytest.fail("it has begun to score"))
    with pytest.raises(UserError, match="no checkpoint at nowhere"):
        evaluate(run, str(books), against=Path("nowhere"))


@pytest.fixture(scope="module")
def gpt2_run(tmp_path_factory: pytest.TempPathFactory, books: Path) -> dict[int, Path]:
    """Runs with GPT-2's tokenizer and the paper's window, as small as they come, hardly trained."""
    folder = tmp_path_factory.mktemp("gpt2")
    prepare([str(books)], folder / "store")
    runs = {}
    for slots in (41, 53):
        config = TrainConfig(
            run=folder / f"L{slots}",
            data=DataConfig(train=str(folder / "store")),
            model=LogMemoryConfig(slots=slots, layers=1, heads=1, width=8),
            steps=1,
            batch_size=2,
            accelerator="cpu",
            tensorboard=False,
        )
        train(config)
        runs[slots] = config.run
    return runs


COUNTS = {
    "tokens": 286_221,
    "words": 241_211,
    "words_eos": 245_569,
    "bytes": 1_290_590,
    "unscored": 0,
    "documents": 60,
}


@pytest.mark.slow
def test_wikitext_at_three_batch_sizes(gpt2_run: dict[int, Path], data_root: Path) -> None:
    file = str(data_root / "wikitext103" / "wiki.test.raw")
    results = [evaluate(gpt2_run[53], file, batch_size=size) for size in (1, 7, 64)]
    for result in results:
        assert {name: result[name] for name in COUNTS} == COUNTS
    assert [r["nats"] for r in results] == pytest.approx([results[0]["nats"]] * 3, rel=1e-6)


@pytest.mark.parametrize(("slots", "scored", "ratio"), [(53, 270_336, 1.1207), (41, 282_880, 1.1727)])
def test_wikitext_by_both_accountings(
    gpt2_run: dict[int, Path], data_root: Path, slots: int, scored: int, ratio: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One nat a token, whatever the model says of it: minutes of softmax would change no count."""
    monkeypatch.setattr(LanguageModel, "nats", lambda model, hidden, targets: (targets >= 0) + 0 * hidden[..., 0])
    result = evaluate(gpt2_run[slots], str(data_root / "wikitext103" / "wiki.test.raw"), accounting="paper")
    assert result["tokens"] == result["nats"] == scored
    assert result["all"]["nats"] == 286_221
    assert result["unscored"] == 286_221 - scored
    assert round(math.log(result["ppl_word"]) / math.log(result["ppl_token"]), 4) == ratio
    assert {name: result["all"][name] for name in COUNTS} == COUNTS


def test_the_controls_nats_are_not_replaced_by_ones_own(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"--save_nats would replace what --against reads, .*c\.npy; give it another name"
    ):
        evaluate(tmp_path, "text", against=tmp_path / "c.npy", save_nats=tmp_path / "c.npy")
