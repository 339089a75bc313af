"""Batches: every token is a target once, with the right history; every window occurs once per epoch."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from logpast.data import TokenStore
from logpast.data.batching import Batches, Lanes, Windows
from logpast.recall import RecallForm, naive
from logpast.util.errors import UserError

EOT = 60_000 - 1


def store_of(*lengths: int) -> TokenStore:
    """Documents of consecutive numbers: token j is at position j."""
    ids = np.arange(1, sum(lengths) + 1)
    return TokenStore.in_memory(np.split(ids, np.cumsum(lengths)[:-1]), size=60_000, eot=EOT)


def expected_windows(
    store: TokenStore, streams: str, window: int, history: int, shift: int
) -> list[tuple[list[int], ...]]:
    """The definition of windows, position by position."""
    documents = (
        np.split(np.asarray(store.tokens), store.documents.start[1:]) if streams == "document" else [store.tokens]
    )
    windows = []
    for document in documents:
        stream = [store.tokenizer.eot, *map(int, document)]

        def at(position: int, stream: list[int] = stream) -> int:
            return stream[position] if 0 <= position < len(stream) else -1

        count = -(-(len(stream) - 1) // window) + (1 if shift else 0)
        for start in range(-shift, count * window - shift, window):
            targets = [at(p) if p > 0 else -1 for p in range(start + 1, start + window + 1)]
            past = [at(p) for p in range(start - history, start)]
            windows.append((past, [at(p) for p in range(start, start + window)], targets))
    return windows


shapes = st.tuples(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(1, 12), st.integers(0, 30))


@given(shapes, st.sampled_from(["corpus", "document"]), st.data())
@settings(deadline=None)
def test_windows_equal_their_definition(shape: tuple[list[int], int, int], streams: str, data: st.DataObject) -> None:
    lengths, window, history = shape
    shift = data.draw(st.integers(0, window))
    store = store_of(*lengths)
    windows = Windows(store, window, history, streams, shift)  # type: ignore[arg-type]
    expected = expected_windows(store, streams, window, history, shift)
    assert len(windows) == len(expected)
    batch = windows.batch(np.arange(len(windows)))
    assert batch.history.tolist() == [past for past, _, _ in expected]
    assert batch.tokens.tolist() == [tokens for _, tokens, _ in expected]
    assert batch.targets.tolist() == [targets for _, _, targets in expected]


@given(shapes, st.sampled_from(["corpus", "document"]), st.data())
@settings(deadline=None)
def test_every_token_is_a_target_once(shape: tuple[list[int], int, int], streams: str, data: st.DataObject) -> None:
    lengths, window, history = shape
    store = store_of(*lengths)
    windows = Windows(store, window, history, streams, data.draw(st.integers(0, window)))  # type: ignore[arg-type]
    targets = windows.batch(np.arange(len(windows))).targets.numpy()
    assert targets[targets >= 0].tolist() == list(range(1, sum(lengths) + 1))
    for index, row in enumerate(targets):
        assert row[row >= 0].tolist() == list(store.tokens[windows.targets(index)])


@given(shapes, st.sampled_from(["corpus", "document"]), st.data())
@settings(deadline=None)
def test_overlapping_windows_score_every_token_once(
    shape: tuple[list[int], int, int], streams: str, data: st.DataObject
) -> None:
    lengths, window, history = shape
    stride = data.draw(st.integers(1, window))
    store = store_of(*lengths)
    windows = Windows(store, window, history, streams, stride=stride)  # type: ignore[arg-type]
    batch = windows.batch(np.arange(len(windows)))
    scored = []
    for index, row in enumerate(batch.targets.numpy()):
        new = row[windows.overlap(index) :]
        assert new[new >= 0].tolist() == list(store.tokens[windows.targets(index)]) != []
        assert len(new) in (window, stride)
        scored += new[new >= 0].tolist()
    assert scored == list(range(1, sum(lengths) + 1))


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ({"stride": 0}, "stride"),
        ({"stride": 5}, "stride"),
        ({"stride": 2, "shift": 1}, "stride"),
        ({"shift": 5}, "shift"),
    ],
)
def test_illegal_strides_and_shifts_are_refused(wrong: dict[str, int], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        Windows(store_of(9), 4, 0, **wrong)  # type: ignore[arg-type]


@given(st.integers(1, 60), st.integers(1, 7), st.integers(1, 20), st.integers(0, 3), st.booleans())
@settings(deadline=None)
def test_every_window_occurs_once_per_epoch(tokens: int, window: int, batch_size: int, seed: int, jitter: bool) -> None:
    if tokens < window:
        return
    batches = Batches(store_of(tokens), window, 2, batch_size, seed, jitter=jitter)
    per_epoch = batches.windows_per_epoch
    rows: list[list[int]] = []
    step = 0
    while len(rows) < 3 * per_epoch:
        rows += batches.at(step).targets.tolist()
        step += 1
    for epoch in range(3):
        seen = [t for row in rows[epoch * per_epoch : (epoch + 1) * per_epoch] for t in row if t >= 0]
        assert sorted(seen) == list(range(1, tokens + 1))


def test_batches_are_a_function_of_seed_and_step() -> None:
    def rows(seed: int, step: int) -> list[list[int]]:
        return Batches(store_of(1000), 8, 4, 16, seed).at(step).tokens.tolist()

    assert rows(0, 9) == rows(0, 9)  # in any order, from a new object
    assert rows(0, 9) != rows(1, 9)
    assert rows(0, 0) != rows(0, 1)
    epochs = [Batches(store_of(1000), 8, 4, 125, 0).at(step).tokens.tolist() for step in range(2)]
    assert epochs[0] != epochs[1]


def test_ranks_get_parts_of_one_batch() -> None:
    batches = Batches(store_of(100), 4, 3, 8, 0)
    whole = batches.at(2)
    halves = [batches.at(2, slice(0, 4)), batches.at(2, slice(4, 8))]
    for part in range(3):
        assert whole[part].tolist() == halves[0][part].tolist() + halves[1][part].tolist()


def test_jitter_shifts_the_windows_in_each_epoch() -> None:
    batches = Batches(store_of(4000), 64, 0, 1000, 0, jitter=True)
    phases = set()
    for epoch in range(4):
        rows = Batches(store_of(4000), 64, 0, batches.windows_per_epoch, 0, jitter=True).at(epoch).targets
        full = rows[(rows >= 0).all(1)]
        phases.add(int(full[0, 0]) % 64)
    assert len(phases) > 1


def test_text_shorter_than_a_window_is_refused() -> None:
    for make in (lambda: Batches(store_of(5), 8, 0, 1, 0), lambda: Lanes(store_of(5), 8, 1, 1, 0)):
        with pytest.raises(UserError, match="memory has 5 tokens, less than one window of 8"):
            make()


@given(shapes, st.sampled_from(["corpus", "document"]), st.integers(1, 4), st.integers(1, 3), st.booleans())
@settings(deadline=None)
def test_lanes_give_consecutive_windows(
    shape: tuple[list[int], int, int], streams: str, size: int, segments: int, jitter: bool
) -> None:
    """Every window occurs once per epoch, in order within its lane; a window that continues no other is fresh."""
    lengths, window, _ = shape
    store = store_of(*lengths)
    if len(store) < window:
        return
    lanes = Lanes(store, window, size, segments, 0, streams, jitter)  # type: ignore[arg-type]
    for epoch in range(2):
        steps = range(epoch * lanes.steps_per_epoch, (epoch + 1) * lanes.steps_per_epoch)
        batches = [lanes.at(step) for step in steps]
        scored = []
        for lane in range(size):
            previous, started = None, False
            for batch in batches:
                assert batch.tokens.shape == batch.targets.shape == (size, segments, window)
                for tokens, targets, fresh in zip(*(part[lane].tolist() for part in batch.inputs), strict=True):
                    scored += [token for token in targets if token >= 0]
                    if max(tokens) < 0:
                        continue
                    real = [token for token in tokens if 0 <= token < EOT]
                    if not fresh and real:
                        assert started
                        assert previous in (None, real[0] - 1)  # continues where the last window ended
                    if EOT in tokens:
                        assert fresh
                        previous, started = None, True
                    if real:
                        previous, started = real[-1], True
        assert sorted(scored) == list(range(1, len(store) + 1))


def test_ranks_get_some_of_the_lanes() -> None:
    lanes = Lanes(store_of(200), 4, 6, 2, 0)
    whole = lanes.at(3)
    for start in (0, 3):
        for part, rows in zip(lanes.at(3, slice(start, start + 3)).inputs, whole.inputs, strict=True):
            assert part.tolist() == rows[start : start + 3].tolist()


@pytest.mark.parametrize("streams", ["corpus", "document"])
def test_counts_and_followers_for_recall_equal_their_definition(streams: str) -> None:
    parts = [np.random.default_rng(n).integers(0, 5, n) for n in (100, 1, 50)]
    store, form = TokenStore.in_memory(parts, size=6, eot=5), RecallForm(reach=40, orders=2, bins=3, input=True)
    texts = parts if streams == "document" else [np.concatenate(parts)]
    expected = np.concatenate([naive.counts(text.tolist(), form.orders, form.edges) for text in texts])
    before = [text[:length].tolist() for text in texts for length in range(len(text))]
    latest = np.array([naive.latest(tokens, form.orders, form.reach) for tokens in before])
    windows = Windows(store, 16, 4, streams, recall=form)  # type: ignore[arg-type]
    batch = windows.batch(np.arange(len(windows)))
    assert batch.counts is not None
    assert batch.followers is not None
    assert not batch.counts[batch.targets < 0].any()
    for index, (counts, followers) in enumerate(zip(batch.counts, batch.followers, strict=True)):
        targets = windows.targets(index)
        assert np.array_equal(counts[: targets.stop - targets.start].numpy(), expected[targets])
        assert np.array_equal(followers[: targets.stop - targets.start].numpy(), latest[targets])


def test_lanes_give_counts_for_recall() -> None:
    store, form = TokenStore.in_memory([np.arange(90) % 7], size=8, eot=7), RecallForm(40, 2, 3, input=True)
    segments, plain = (Lanes(store, 16, 2, 2, seed=0, recall=recall).at(0) for recall in (form, None))
    assert plain.counts is None
    batch = Windows(store, 16, 0, recall=form).batch(np.arange(2))
    for part, expected in ((segments.counts, batch.counts), (segments.followers, batch.followers)):
        assert part is not None
        assert expected is not None
        assert part[0].equal(expected)
