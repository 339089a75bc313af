"""Small real parts that many tests share: a text, its token store, a config to train on it in seconds."""

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.explore import CHROMIUM, find_chromium
from matplotlib.figure import Figure

from logpast.data import TokenStore
from logpast.data.prepare import prepare
from logpast.ledger.row import append
from logpast.models import LogMemoryConfig, RecentConfig
from logpast.training.config import DataConfig, OptimizerConfig, TrainConfig
from logpast.util.errors import UserError
from paper_rows import row

TEXT = """In the beginning God created the heaven and the earth. And the earth was without form, and void; and
darkness was upon the face of the deep. And the Spirit of God moved upon the face of the waters.
And God said, Let there be light: and there was light. And God saw the light, that it was good: and God divided
the light from the darkness. And God called the light Day, and the darkness he called Night.
"""


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("interpreter") and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("runs in Triton's interpreter: see tests/test_interpreter.py")


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """For each process, those that tests start included: how a sum is shared out among threads shows in its bits."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _little_to_collect() -> Iterator[None]:
    """What is imported stays; each run that frees its memory would look through all of it for garbage."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()  # or some libraries complain at the end


@pytest.fixture(autouse=True)
def _library_as_it_was() -> Iterator[None]:
    """Where a CPU has no bf16, PyTorch gives up oneDNN for the rest of the process when it is first asked for some,
    and what is computed afterwards has other bits."""
    enabled = torch.backends.mkldnn.enabled
    yield
    torch._C._set_mkldnn_enabled(enabled)  # the public way warns of Intel's GPUs


@pytest.fixture(scope="session", autouse=True)
def _can_be_interrupted() -> None:
    """What a shell starts in the background ignores Ctrl-C, and so would all that tests start and interrupt."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _hangup_as_before() -> Iterator[None]:
    """SIGHUP is ignored under `nohup`, and after a test in which it has arrived."""
    before = signal.signal(signal.SIGHUP, lambda *_: pytest.fail("not handled"))
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Nothing that a test tokenises is kept, or found, in the user's cache."""
    os.environ["LOGPAST_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def data_root() -> Path:
    """The folder with the real corpora; tests that want it are skipped where there is none."""
    if not os.environ.get("LOGPAST_DATA"):
        pytest.skip("LOGPAST_DATA is not set: no real corpora here")
    return Path(os.environ["LOGPAST_DATA"])


@pytest.fixture(scope="session")
def books(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of three small documents with different lengths."""
    folder = tmp_path_factory.mktemp("books")
    lines = TEXT.splitlines(keepends=True)
    for number in range(3):
        (folder / f"{number}.txt").write_text("".join(lines[number:] * (number + 2)))
    return folder


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory, books: Path) -> TokenStore:
    """The books as tokens of a small BPE of their own."""
    (made,) = prepare([str(books)], tmp_path_factory.mktemp("store") / "books", tokenizer="bpe-300", workers=1)
    return made


@pytest.fixture
def memory_config() -> LogMemoryConfig:
    return LogMemoryConfig(slots=17, sharpness=20, window=8, layers=2, heads=2, width=16)


@pytest.fixture
def control_config() -> RecentConfig:
    return RecentConfig(slots=5, window=8, layers=2, heads=2, width=16)


@pytest.fixture
def train_config(tmp_path: Path, store: TokenStore, memory_config: LogMemoryConfig) -> TrainConfig:
    """A run of 30 steps that crosses several epochs, validates and saves often."""
    return TrainConfig(
        run=tmp_path / "run",
        data=DataConfig(train=str(store.path), validation=str(store.path)),
        model=memory_config,
        optimizer=OptimizerConfig(learning_rate=3e-3, final_learning_rate=3e-4, warmup_steps=5),
        steps=30,
        batch_size=16,
        validate_every=10,
        checkpoint_every=4,
        log_every=1,
        accelerator="cpu",
        tensorboard=False,
    )


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that would be saved."""
    found: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *given, **how: found.append(figure))
    return found


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    folder = tmp_path / "ledger"
    for slots, sharpness, seed, ppl in (
        (5, None, 0, 40.0),
        (5, None, 1, 41.0),
        (53, None, 0, 39.0),
        (5, 100, 0, 38.0),
        (53, 200, 0, 37.0),
    ):
        append(folder / "sweep.jsonl", row(slots, sharpness, seed, ppl))
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium, driven by Playwright; tests of pages are skipped where one of them is missing.

    Per module, because as long as Playwright runs, no other event loop can run in this thread.
    """
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    try:
        path = find_chromium()
    except UserError as error:
        pytest.skip(str(error))
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=path, args=CHROMIUM)
        yield opened
        opened.close()


@pytest.fixture(scope="session")
def axe() -> Path:
    """axe-core, which finds what people with disabilities cannot use."""
    path = Path(os.environ.get("LOGPAST_AXE", Path(__file__).parents[1] / "node_modules" / "axe-core" / "axe.min.js"))
    if not path.is_file():
        pytest.skip("no axe-core here: `npm install --no-save axe-core`, or name its axe.min.js in LOGPAST_AXE")
    return path
