"""A download from the hub that breaks off, again and again. The next one succeeds; no part is taken for the whole."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from faults.commands import Done
from faults.hub import serve
from logpast.data import TokenStore

pyarrow = pytest.importorskip("pyarrow")

DATASET = "Salesforce/wikitext"
README = """---
configs:
- config_name: wikitext-103-raw-v1
  data_files:
  - split: train
    path: train-*
---
"""


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files as on the hub."""
    from pyarrow import parquet

    folder, random = tmp_path_factory.mktemp("dataset"), Random(0)
    words = [" ".join(random.choices("abcdefghijklmnop", k=30)) + " \n" for _ in range(3000)]
    parquet.write_table(pyarrow.table({"text": ["", " = A = \n", "", *words]}), folder / "train-0.parquet")
    (folder / "README.md").write_text(README)
    return folder


def prepare(url: str, home: Path, cwd: Path) -> Done:
    """In a process of its own: the library reads its settings when it is imported."""
    environment = os.environ | {"HF_ENDPOINT": url, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"}
    for name in ("LOGPAST_DATA", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
        environment.pop(name, None)
    words = ["data", "prepare", "wikitext103:train", "--out", "out", "--tokenizer", "bpe-300"]
    command = [sys.executable, "-m", "logpast", *words]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    return Done(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="module")
def undisturbed(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    cwd = tmp_path_factory.mktemp("undisturbed")
    with serve(DATASET, dataset, Random(0)) as hub:
        done = prepare(hub.url, cwd / "cache", cwd)
    assert done.code == 0, done.err
    return TokenStore.open(cwd / "out")


def test_an_interrupted_download(
    dataset: Path, undisturbed: TokenStore, tmp_path: Path, random: Random, outcome: Callable[..., None]
) -> None:
    with serve(DATASET, dataset, random) as hub:
        hub.broken = True
        done = prepare(hub.url, tmp_path / "cache", tmp_path)
        assert hub.broke > 0
        assert (done.code, len(done.errors)) == (2, 1), done.err
        assert "could not be downloaded" in done.errors[0]
        assert not [*tmp_path.glob("out*"), *tmp_path.glob(".out*")]
        hub.broken = False
        done = prepare(hub.url, tmp_path / "cache", tmp_path)
    assert done.code == 0, done.err
    assert TokenStore.open(tmp_path / "out").identity == undisturbed.identity
    outcome("interrupted download", "equal")
