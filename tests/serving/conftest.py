"""A tiny model, and servers of it on loopback with clients of the official `openai` package."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from logpast.data import TokenStore
from logpast.generation import load
from logpast.models import LogMemoryConfig
from logpast.training.config import DataConfig, OptimizerConfig, TrainConfig
from logpast.training.loop import train
from serving.helpers import Serving


@pytest.fixture(scope="package")
def run(tmp_path_factory: pytest.TempPathFactory, store: TokenStore) -> Path:
    """A run whose model has seen a little text."""
    config = TrainConfig(
        run=tmp_path_factory.mktemp("serving") / "tiny",
        data=DataConfig(train=str(store.path)),
        model=LogMemoryConfig(slots=17, sharpness=20, window=8, layers=1, heads=2, width=16, recall=64),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=5),
        steps=30,
        batch_size=8,
        accelerator="cpu",
        tensorboard=False,
    )
    train(config)
    return config.run


@pytest.fixture(scope="package")
def parts(run: Path) -> Any:
    """The model and its tokenizer, as `serve` loads them."""
    model, tokenizer = load(run, "cpu", None, recall_own=False)
    return SimpleNamespace(model=model, tokenizer=tokenizer)


@pytest.fixture(scope="package")
def serving(parts: Any) -> Serving:
    """Starts a server in a thread: `with serving(seconds=5) as server`."""
    openai = pytest.importorskip("openai")
    pytest.importorskip("uvicorn")
    from logpast.serving.app import Api
    from logpast.serving.completions import Completions
    from logpast.serving.engine import Engine
    from logpast.serving.serve import make_server

    @contextmanager
    def start(
        text: str = "", active: int = 4, waiting: int = 60, max_bytes: int = 100_000, seconds: float = 60,
        prompt_tokens: int = 5000, tokens: int = 5000, stored: int = 3, api_key: str | None = None,
    ) -> Iterator[Any]:  # fmt: skip
        stream = parts.model.stream(parts.tokenizer.eot)
        stream.push(parts.tokenizer.encode(text))
        completions = Completions(parts.model, parts.tokenizer, stream.state(), stored, prompt_tokens, tokens)
        engine = Engine(active, waiting, threads=1)
        server = make_server(Api(completions, engine, "tiny", max_bytes, seconds, api_key), engine)
        listening = socket.create_server(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
        thread.start()
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=api_key or "none", max_retries=0)

        def stop() -> None:
            server.should_exit = True
            thread.join()

        try:
            yield SimpleNamespace(port=port, client=client, engine=engine, completions=completions, stop=stop)
        finally:
            stop()
            client.close()

    return start


@pytest.fixture(scope="package")
def server(serving: Serving) -> Iterator[Any]:
    with serving() as started:
        yield started
