"""`logpast eval`: metrics, batch sizes, accounting, comparison with another model, recording, errors."""

import errno
import json
import math
import multiprocessing
import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from logpast.cli import main
from logpast.data import TokenStore, open_tokens
from logpast.data.prepare import prepare
from logpast.evaluation import evaluate as evaluation
from logpast.evaluation.evaluate import evaluate, result_text
from logpast.ledger import row as ledger
from logpast.models import LanguageModel, LogMemoryConfig, RecentConfig, TransformerXLConfig
from logpast.training.checkpoint import find_checkpoint
from logpast.training.config import DataConfig, OptimizerConfig, TrainConfig, recorded_settings
from logpast.training.loop import train
from logpast.util import files, progress
from logpast.util.errors import UserError

UNSEEN = "And God saw every thing that he had made, and, behold, it was very good. And it was evening. "


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, store: TokenStore) -> Path:
    """A memory model trained for ten steps; no test changes it."""
    config = TrainConfig(
        run=tmp_path_factory.mktemp("evaluate") / "run",
        data=DataConfig(train=str(store.path), validation=str(store.path)),
        model=LogMemoryConfig(slots=17, sharpness=20, window=8, layers=2, heads=2, width=16),
        optimizer=OptimizerConfig(learning_rate=3e-3, final_learning_rate=3e-4, warmup_steps=5),
        steps=10,
        batch_size=16,
        validate_every=10,
        accelerator="cpu",
        tensorboard=False,
    )
    train(config)
    return config.run


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


SCORES = {"documents": 118, "tokens": 116_496, "unscored": 0, "ppl_token": 38.96161, "ppl_word": 2.5e12,
          "ppl_word_eos": 211.4, "bits_per_byte": 1.5121, "interval": {"ppl_token": [36.98734, 41.1697]}}  # fmt: skip
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


def test_printed_text_says_that_there_are_too_few_documents_for_an_interval() -> None:
    lines = result_text({"data": "kjv:test"} | SCORES | {"interval": None, "documents": 2}).splitlines()
    assert "[" not in "".join(lines)
    assert lines[-1].startswith("  too few documents (2) for an interval")


def test_printed_text_of_a_comparison() -> None:
    other = {"checkpoint": "runs/control", "nats_per_token": -0.0256, "documents_better": 96, "documents": 118}
    result = {"data": "kjv:test"} | SCORES | {"against": other | {"interval": [-0.0313, -0.0203]}}
    assert result_text(result).splitlines()[-1] == (
        "  against runs/control: loss lower by 0.0256 nats/token (2.5 %), 95 % interval: 0.0203 to 0.0313 lower; "
        "lower on 96 of 118 documents"
    )
    result["against"] = other | {"nats_per_token": 0.5, "interval": None, "documents_better": 0, "documents": 2}
    assert result_text(result).splitlines()[-1] == (
        "  against runs/control: loss higher by 0.5000 nats/token (64.9 %); "
        "lower on 0 of 2 documents, too few for an interval"
    )


def test_comparison_with_another_model(run: Path, train_config: TrainConfig, books: Path, tmp_path: Path) -> None:
    longer = replace(train_config, run=tmp_path / "longer", steps=40)
    train(longer)
    many = tmp_path / "many"
    many.mkdir()
    for number in range(12):
        shutil.copy(books / f"{number % 3}.txt", many / f"{number}.txt")
    result = evaluate(longer.run, str(many), against=run)["against"]
    assert result["nats_per_token"] < 0
    assert result["interval"][1] < 0
    assert result["documents_better"] == 12
    result = evaluate(longer.run, str(books), against=run)["against"]
    assert result["interval"] is None  # three documents
    evaluate(run, str(books), save_nats=tmp_path / "nats.npy")
    assert evaluate(longer.run, str(books), against=tmp_path / "nats.npy")["against"][
        "nats_per_token"
    ] == pytest.approx(result["nats_per_token"], rel=1e-6)
    np.save(tmp_path / "short.npy", np.ones(5))
    with pytest.raises(UserError, match=r"short\.npy"):
        evaluate(longer.run, str(books), against=tmp_path / "short.npy")


def test_scoring_the_training_text_is_a_warning_and_recorded(
    run: Path, books: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def scored(text: Path) -> tuple[str, dict[str, Any]]:
        capsys.readouterr()
        with pytest.raises(SystemExit, match="0"):
            main(["eval", "--checkpoint", str(run), "--data", str(text), "--record", str(tmp_path / "rows.jsonl")])
        return capsys.readouterr().err, ledger.read(tmp_path / "rows.jsonl")[-1]["scores"]

    warning, scores = scored(books)
    assert warning.startswith("logpast: warning: ")
    assert warning.count("\n") == 1
    assert scores["training_overlap"] == "it is the training text"
    (tmp_path / "mixed").mkdir()
    (tmp_path / "mixed" / "new.txt").write_text(UNSEEN)
    warning, scores = scored(tmp_path / "mixed" / "new.txt")
    assert warning == ""
    assert "training_overlap" not in scores
    shutil.copy(books / "1.txt", tmp_path / "mixed")
    warning, scores = scored(tmp_path / "mixed")
    assert "1 of its 2 documents" in warning
    assert "1 of its 2 documents" in scores["training_overlap"]


def test_tokens_that_never_occur_in_the_training_text_are_counted_if_it_is_there(
    run: Path, books: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over all tokens, also where the paper's accounting leaves some out."""
    (folder := tmp_path / "texts").mkdir()
    shutil.copy(books / "2.txt", folder / "a.txt")
    (folder / "b.txt").write_text("ÿ" * 20)
    counts = evaluate(run, str(folder), record=tmp_path / "rows.jsonl")["by_document"]
    assert counts["unseen"] == [0, counts["tokens"][1]]
    assert ledger.read(tmp_path / "rows.jsonl")[0]["scores"]["by_document"] == counts
    monkeypatch.setattr(evaluation, "_scored_span", lambda *_: slice(100))
    paper = evaluate(run, str(folder), accounting="paper")
    assert paper["all"]["by_document"]["unseen"] == counts["unseen"]
    assert "unseen" not in paper["by_document"]
    monkeypatch.setattr(evaluation, "open_training_text", lambda *_: None)
    assert "unseen" not in evaluate(run, str(folder))["by_document"]


def test_a_damaged_training_text_does_not_prevent_scoring(
    run: Path, books: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(*_: object) -> None:
        raise UserError("damaged")

    monkeypatch.setattr(evaluation, "open_training_text", damaged)
    assert evaluate(run, str(books))["training_overlap"] == "it is the training text"


def test_stride_1_scores_each_token_with_a_whole_window_before_it(run: Path, tmp_path: Path) -> None:
    (tmp_path / "new.txt").write_text(UNSEEN)
    options: dict[str, Any] = {"precision": "float64", "save_nats": tmp_path / "nats.npy"}
    default = evaluate(run, str(tmp_path / "new.txt"), **options)
    disjoint = np.load(tmp_path / "nats.npy")
    result = evaluate(run, str(tmp_path / "new.txt"), stride=1, **options)
    nats = np.load(tmp_path / "nats.npy")
    assert (default["tokens"], default["unscored"]) == (result["tokens"], result["unscored"])
    checkpoint = find_checkpoint(run)
    store = open_tokens(tmp_path / "new.txt", checkpoint.load_tokenizer())
    model = checkpoint.load_model().double().eval()
    stream = [store.tokenizer.eot, *map(int, store.tokens)]
    window, history = model.window, model.history
    np.testing.assert_allclose(nats[:window], disjoint[:window], rtol=1e-12)  # the first window
    assert len(nats) > 2 * history
    for target in range(window, len(stream) - 1):
        first = target + 1 - window  # of the window that ends just before the target
        past = [-1] * max(0, history - first) + stream[max(0, first - history) : first]
        batch = (past, stream[first : target + 1], stream[first + 1 : target + 2])
        with torch.no_grad():
            losses = model(*(torch.tensor([ids]) for ids in batch))
        assert nats[target] == pytest.approx(float(losses[0, -1]), rel=1e-9)
    assert not np.allclose(nats[window:], disjoint[window:])


def test_stride_is_recorded_and_printed_unless_it_is_the_default(
    run: Path, books: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = []
    for stride in (None, 8, 3):  # the window is 8
        capsys.readouterr()
        evaluate(run, str(books), stride=stride, record=tmp_path / "rows.jsonl")
        printed.append(capsys.readouterr().out)
    default, same, overlapping = (row["scores"] for row in ledger.read(tmp_path / "rows.jsonl"))
    assert printed[0] == printed[1]
    assert "stride" not in default.keys() | same.keys()
    assert default["nats"] == same["nats"] != overlapping["nats"]
    assert overlapping["stride"] == 3
    assert "(stride 3, not the default)" in printed[2].splitlines()[0]


def test_stride_must_fit_the_windows(run: Path, books: Path, train_config: TrainConfig, tmp_path: Path) -> None:
    for wrong in (0, 9):
        with pytest.raises(UserError, match=f"--stride .*got {wrong}"):
            evaluate(run, str(books), stride=wrong)
    model = TransformerXLConfig(memory=8, window=8, layers=1, heads=1, width=8)
    recurrent = replace(train_config, run=tmp_path / "xl", steps=1, model=model)
    train(recurrent)
    for options in ({"checkpoint": recurrent.run}, {"checkpoint": run, "against": recurrent.run}):
        with pytest.raises(UserError, match=r"--stride .*xl.*transformer_xl is recurrent"):
            evaluate(data=str(books), stride=4, **options)


def test_quiet_shows_only_the_result(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "BAR_SECONDS", -1.0)  # a line at every update
    shown = []
    for quiet in (False, True):
        (tmp_path / f"{quiet}.txt").write_text(UNSEEN)
        capsys.readouterr()
        evaluate(run, str(tmp_path / f"{quiet}.txt"), quiet=quiet)
        shown.append(capsys.readouterr())
    assert "tokenizing" in shown[0].err
    assert "scoring" in shown[0].err
    assert shown[1].err == ""
    assert shown[1].out == shown[0].out.replace("False.txt", "True.txt")


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
        "schema", "recorded", "logpast", "scored_at_revision", "trained_at_revision", "run", "recipe", "recipe_hash",
        "seed", "step", "parameters", "train_tokens", "train_seconds", "train_data", "validation_data", "hardware",
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
    monkeypatch.setattr(LanguageModel, "nats", lambda model, hidden, targets, _: (targets >= 0) + 0 * hidden[..., 0])
    result = evaluate(gpt2_run[slots], str(data_root / "wikitext103" / "wiki.test.raw"), accounting="paper")
    assert result["tokens"] == result["nats"] == scored
    assert result["all"]["nats"] == 286_221
    assert result["unscored"] == 286_221 - scored
    assert round(math.log(result["ppl_word"]) / math.log(result["ppl_token"]), 4) == ratio
    assert {name: result["all"][name] for name in COUNTS} == COUNTS


def test_saved_losses_to_compare_with_are_not_replaced(tmp_path: Path) -> None:
    for options in ({"against": tmp_path / "c.npy"}, {"data": str(tmp_path / "c.npy")}):
        with pytest.raises(UserError, match=r"--save_nats would replace .*c\.npy"):
            evaluate(tmp_path, **{"data": "text"} | options, save_nats=tmp_path / "c.npy")


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
