"""`logpast eval`: metrics, batch sizes, accounting, comparison with another model, recording, errors."""

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
from logpast.evaluation.evaluate import evaluate, result_text
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


def test_metrics_of_a_text(run: Path, books: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_eval_gives_the_validation_loss_of_training(run: Path, store: TokenStore) -> None:
    state = json.loads(next(run.glob("checkpoints/*10/state.json")).read_text())
    result = evaluate(run, str(store.path), batch_size=7)
    assert math.log(result["ppl_token"]) == pytest.approx(state["best"]["nats_per_token"], rel=1e-6)


@pytest.mark.parametrize("precision", ["float32", "float64", "bfloat16"])
def test_the_batch_size_does_not_change_the_result(run: Path, books: Path, precision: str) -> None:
    nats = [evaluate(run, str(books), batch_size=size, precision=precision)["nats"] for size in (1, 7, 64)]  # type: ignore[arg-type]
    tolerance = {"float32": 1e-6, "float64": 1e-12, "bfloat16": 1e-3}[precision]
    assert nats == pytest.approx([nats[0]] * 3, rel=tolerance)
    if precision != "float32":  # the precision has an effect
        assert nats[0] != evaluate(run, str(books))["nats"]


SCORES = {"tokens": 116_496, "unscored": 0, "ppl_token": 38.96161, "ppl_word": 2.5e12, "ppl_word_eos": 211.4,
          "bits_per_byte": 1.5121, "interval": {"ppl_token": [36.98734, 41.1697]}}  # fmt: skip
LINES = """kjv:test: 116,496 tokens scored, 0 left out
  ppl_token         38.9616 [36.9873, 41.1697] (95 %, over documents)
  ppl_word          2.5e+12
  ppl_word_eos     211.4000
  bits_per_byte      1.5121"""


def test_printed_text() -> None:
    assert result_text({"data": "kjv:test"} | SCORES) == LINES


def test_printed_text_of_both_accountings() -> None:
    result = {"data": "kjv:test"} | SCORES | {"tokens": 100_000, "unscored": 16_496, "all": SCORES}
    assert result_text(result) == LINES.replace("116,496", "100,000").replace(" 0 left", " 16,496 left") + "\n" + LINES


def test_printed_text_of_a_comparison() -> None:
    other = {"checkpoint": "runs/control", "nats_per_token": -0.0256, "documents_better": 96, "documents": 118}
    result = {"data": "kjv:test"} | SCORES | {"against": other}
    difference = "  against runs/control: -0.0256 nats per token{}, better on 96 of 118 documents"
    assert result_text(result).splitlines()[-1] == difference.format("")
    other["interval"] = [-0.0313, -0.0203]
    assert result_text(result).splitlines()[-1] == difference.format(" [-0.0313, -0.0203]")


def test_comparison_with_another_model(run: Path, train_config: TrainConfig, books: Path, tmp_path: Path) -> None:
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
    with pytest.raises(UserError, match=r"short\.npy"):
        evaluate(longer.run, str(books), against=tmp_path / "short.npy")


def test_streams_by_document_change_the_result(run: Path, books: Path) -> None:
    corpus, document = (evaluate(run, str(books), streams=streams)["nats"] for streams in ("corpus", "document"))  # type: ignore[arg-type]
    assert corpus != pytest.approx(document, rel=1e-6)


def test_paper_accounting_sums_some_of_the_same_losses(
    run: Path, store: TokenStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """17 slots: τ = 16, m = 8. Batches of ⌈16384/24⌉·3 = 2,049 windows: too long for a small text."""
    with pytest.raises(UserError, match="accounting 'paper'"):
        evaluate(run, str(store.path), accounting="paper")
    long = tmp_path / "long.txt"
    long.write_text(("And God said, Let there be light: and there was light.\n") * 1500)
    evaluate(run, str(long), save_nats=tmp_path / "nats.npy", batch_size=256)
    over_all_tokens = capsys.readouterr().out
    result = evaluate(run, str(long), accounting="paper", batch_size=256)
    assert capsys.readouterr().out.endswith(over_all_tokens)
    nats = np.load(tmp_path / "nats.npy")
    assert result["tokens"] == 8 * 2049
    assert result["unscored"] == len(nats) - 8 * 2049
    assert result["nats"] == pytest.approx(nats[16 : 16 + 8 * 2049].sum(), rel=1e-6)
    assert result["ppl_word"] == pytest.approx(math.exp(result["nats"] / (11 * 1500)), rel=1e-6)


def test_paper_accounting_of_a_control_and_of_other_filters(train_config: TrainConfig, tmp_path: Path) -> None:
    """A control with 17 slots has τ = 16, like the paper's memory with 17 slots. For a memory, τ is the last peak of
    its own filters, however far they reach beyond it.
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


def test_a_row_is_recorded_even_if_printing_fails(
    run: Path, books: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(evaluation, "result_text", fail)
    with pytest.raises(BrokenPipeError):
        evaluate(run, str(books), record=tmp_path / "rows.jsonl")
    assert len(ledger.read(tmp_path / "rows.jsonl")) == 1


def test_text_without_words_gives_valid_json(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "blank.txt").write_text(" \n" * 30)
    capsys.readouterr()
    evaluate(run, str(tmp_path / "blank.txt"), json="-", record=tmp_path / "rows.jsonl")
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["ppl_word"] is None
    assert ledger.read(tmp_path / "rows.jsonl")[0]["scores"]["ppl_word"] is None


def test_files_that_cannot_be_written_are_refused_before_scoring(run: Path, books: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for option, suffix in (("json", ".json"), ("record", ".jsonl"), ("save_nats", ".npy")):
        folder = tmp_path / f"folder{suffix}"
        folder.mkdir()
        for wrong in (folder, tmp_path / "file" / f"x{suffix}"):
            with pytest.raises(UserError, match=str(wrong)):
                evaluate(run, str(books), **{option: str(wrong)})  # type: ignore[arg-type]
    same = tmp_path / "same.jsonl"
    same.write_text("precious")
    for two in (
        {"json": str(same), "record": same},
        {"json": f"{tmp_path}/file/../same.npy", "save_nats": tmp_path / "same.npy"},
    ):
        with pytest.raises(UserError, match=r"--json.*same\."):
            evaluate(run, str(books), **two)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"--record.*table\.json"):
        evaluate(run, str(books), record=tmp_path / "table.json")
    assert same.read_text() == "precious"
    (tmp_path / "empty.npy").write_bytes(b"")
    with pytest.raises(UserError, match=r"empty\.npy"):
        evaluate(run, str(books), against=tmp_path / "empty.npy")


def test_saved_losses_must_be_finite_numbers(run: Path, store: TokenStore, tmp_path: Path) -> None:
    nats = np.full(len(store), 2.0)
    for wrong in (np.where(np.arange(len(store)) == 3, np.nan, nats), nats.astype(complex), nats > 1, nats.astype(str)):
        np.save(tmp_path / "n.npy", wrong)
        with pytest.raises(UserError, match=r"n\.npy"):
            evaluate(run, str(store.path), against=tmp_path / "n.npy")
    np.save(tmp_path / "n.npy", nats)
    assert evaluate(run, str(store.path), against=str(tmp_path / "n.npy"))["against"]  # type: ignore[arg-type]


def test_the_result_is_printed_even_if_the_disk_is_full(
    run: Path, store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "n.npy").write_text("old")
    monkeypatch.setattr(files, "fsync", full)
    with pytest.raises(UserError, match="No space left"):
        evaluate(run, str(store.path), save_nats=tmp_path / "n.npy")
    assert (tmp_path / "n.npy").read_text() == "old"
    assert "ppl_token" in capsys.readouterr().out
    with pytest.raises(UserError, match="No space left"):
        evaluate(run, str(store.path), json=str(tmp_path / "scores.json"))
    assert "ppl_token" in capsys.readouterr().out


def test_a_loss_of_nan_is_an_error(run: Path, books: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "score", lambda *args, **settings: np.array([1.0, np.nan]))
    with pytest.raises(UserError, match=r"checkpoints/step-00000010.*diverged"):
        evaluate(run, str(books))


def test_paper_accounting_needs_slots(train_config: TrainConfig, books: Path) -> None:
    config = replace(train_config, steps=1, model=RecentConfig(slots=0, window=8, layers=1, heads=1, width=8))
    train(config)
    with pytest.raises(UserError, match="slots"):
        evaluate(config.run, str(books), accounting="paper")


def test_a_recorded_row_has_all_fields(run: Path, books: Path, tmp_path: Path) -> None:
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


def test_bad_input_is_named(run: Path, books: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere"):
        evaluate(tmp_path / "nowhere", str(books))
    with pytest.raises(UserError, match=str(tmp_path)):
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


def test_a_missing_second_model_is_found_before_scoring(
    run: Path, books: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "score", lambda *_, **__: pytest.fail("scoring has started"))
    with pytest.raises(UserError, match="nowhere"):
        evaluate(run, str(books), against=Path("nowhere"))


@pytest.fixture(scope="module")
def gpt2_run(tmp_path_factory: pytest.TempPathFactory, books: Path) -> dict[int, Path]:
    """Very small models with GPT-2's tokenizer and the paper's window, trained for one step."""
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
def test_wikitext_with_three_batch_sizes(gpt2_run: dict[int, Path], data_root: Path) -> None:
    file = str(data_root / "wikitext103" / "wiki.test.raw")
    results = [evaluate(gpt2_run[53], file, batch_size=size) for size in (1, 7, 64)]
    for result in results:
        assert {name: result[name] for name in COUNTS} == COUNTS
    assert [r["nats"] for r in results] == pytest.approx([results[0]["nats"]] * 3, rel=1e-6)


@pytest.mark.parametrize(("slots", "scored", "ratio"), [(53, 270_336, 1.1207), (41, 282_880, 1.1727)])
def test_wikitext_with_both_accountings(
    gpt2_run: dict[int, Path], data_root: Path, slots: int, scored: int, ratio: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every loss is set to 1 nat: only the counts matter here, and the softmax would take minutes."""
    monkeypatch.setattr(LanguageModel, "nats", lambda model, hidden, targets: (targets >= 0) + 0 * hidden[..., 0])
    result = evaluate(gpt2_run[slots], str(data_root / "wikitext103" / "wiki.test.raw"), accounting="paper")
    assert result["tokens"] == result["nats"] == scored
    assert result["all"]["nats"] == 286_221
    assert result["unscored"] == 286_221 - scored
    assert round(math.log(result["ppl_word"]) / math.log(result["ppl_token"]), 4) == ratio
    assert {name: result["all"][name] for name in COUNTS} == COUNTS


def test_saved_losses_to_compare_with_are_not_replaced(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--save_nats.*--against.*c\.npy"):
        evaluate(tmp_path, "text", against=tmp_path / "c.npy", save_nats=tmp_path / "c.npy")


# --- the ledger (logpast.ledger.row)


def test_recipe_hash_depends_on_what_changes_the_result(train_config: TrainConfig) -> None:
    def hashed(config: TrainConfig) -> str:
        return ledger.hash_recipe(recorded_settings(config))

    assert hashed(train_config) == hashed(replace(train_config, run=Path("x"), log_every=7, keep=9))
    assert hashed(train_config) != hashed(replace(train_config, seed=1))
    # the best of the validated checkpoints is scored, so how often to validate matters if there is a validation text
    often, unvalidated = replace(train_config, validate_every=7), replace(train_config.data, validation=None)
    assert hashed(train_config) != hashed(often)
    assert hashed(replace(train_config, data=unvalidated)) == hashed(replace(often, data=unvalidated))
    assert hashed(train_config) != hashed(replace(train_config, model=LogMemoryConfig(slots=5)))


def _append_many(path: Path, who: int) -> None:
    for number in range(50):
        ledger.append(path, {"who": who, "number": number, "filler": "x" * 3000})


def test_many_processes_can_append_to_one_ledger(tmp_path: Path) -> None:
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


def test_nothing_is_appended_to_a_damaged_ledger(tmp_path: Path) -> None:
    path = tmp_path / "damaged.jsonl"
    path.write_text('{"a": 1}\n{"b": ')
    with pytest.raises(UserError, match=r"damaged\.jsonl"):
        ledger.append(path, {"c": 3})
    assert path.read_text() == '{"a": 1}\n{"b": '


def test_a_full_disk_leaves_the_ledger_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.jsonl"
    ledger.append(path, {"seed": 0})
    before = path.read_bytes()
    half = SimpleNamespace(**vars(os) | {"write": lambda handle, data: os.write(handle, data[: len(data) // 2])})
    monkeypatch.setattr(ledger, "os", half)
    with pytest.raises(UserError, match=r"rows\.jsonl"):
        ledger.append(path, {"seed": 1})
    assert path.read_bytes() == before
