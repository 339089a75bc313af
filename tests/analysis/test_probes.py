"""The past changed in one way at a time, against the definition; kinds of tokens, against a search through the text."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from logpast.analysis import probes
from logpast.data import TokenStore
from logpast.evaluation.scoring import score
from logpast.models import LogMemoryConfig, LogMemoryTransformer, RecentConfig, Transformer, build

SIZES = {"window": 4, "layers": 2, "heads": 2, "width": 8, "vocabulary": 13}
CONFIGS = {
    "log_memory": LogMemoryConfig(slots=9, spacing=0.3, sharpness=10, **SIZES),
    "recent": RecentConfig(slots=5, **SIZES),
}


def model_of(name: str) -> Transformer:
    torch.manual_seed(0)
    model = build(CONFIGS[name]).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    assert isinstance(model, Transformer)
    return model


def store_of(*lengths: int) -> TokenStore:
    ids = np.random.default_rng(1).integers(0, 12, sum(lengths))
    return TokenStore.in_memory(np.split(ids, np.cumsum(lengths)[:-1]), size=13, eot=12)


def scored(model: Transformer, store: TokenStore, batch_size: int = 5) -> np.ndarray:
    return score(model, store, model.window, model.history, batch_size)


@torch.no_grad()
def by_hand(model: Transformer, store: TokenStore, reach: int, silent: tuple[int, ...] = ()) -> list[float]:
    """Token by token: only the `reach` tokens before the window make slots, and some slots are zero."""
    stream, table, m = [12, *map(int, store.tokens)], model.table.weight, model.window
    nats = []
    for target in range(1, len(stream)):
        start = (target - 1) // m * m
        front = torch.zeros(model.slots, 8, dtype=table.dtype)
        for lag in range(1, min(start, reach, model.history) + 1):
            if isinstance(model, LogMemoryTransformer):
                weights = torch.from_numpy(model.config.bank.weights[::-1, lag - 1].copy())
                front += weights[:, None] * table[stream[start - lag]]
            else:
                front[model.slots - lag] = table[stream[start - lag]]
        if isinstance(model, LogMemoryTransformer):
            front = model.memory.norm(front)
        for place in silent:
            front[place] = 0
        hidden = model.hidden(torch.cat([front, table[stream[start:target]]]).unsqueeze(0))[0, -1]
        nats.append(-float(torch.log_softmax(table @ hidden, 0)[stream[target]]))
    return nats


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("lag", [0, 1, 3])
def test_a_past_cut_off(name: str, lag: int) -> None:
    model, store = model_of(name), store_of(45)
    with probes.changed_past(model, ids=probes.cut_beyond(lag)):
        ours = scored(model, store)
    np.testing.assert_allclose(ours, by_hand(model, store, lag), rtol=1e-11)
    assert not np.allclose(ours, scored(model, store), rtol=1e-6)


@pytest.mark.parametrize("name", CONFIGS)
def test_beyond_the_horizon_there_is_nothing_to_change(name: str) -> None:
    model, store = model_of(name), store_of(45)
    whole, reach = scored(model, store), model.history
    assert reach == {"log_memory": 8, "recent": 5}[name]
    for lag in (reach, reach + 3):
        for change in (
            probes.cut_beyond(lag),
            probes.shuffled_beyond(lag, probes.random_keys(reach, seed=0)),
            probes.replaced_beyond(lag, probes.random_pasts(store, reach, seed=0)),
        ):
            with probes.changed_past(model, ids=change):
                np.testing.assert_array_equal(scored(model, store), whole)
    with probes.changed_past(model, ids=probes.cut_beyond(reach - 1)):
        assert not np.array_equal(scored(model, store), whole)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("places", [[0], [4], [1, 3]])
def test_silent_slots(name: str, places: list[int]) -> None:
    model, store = model_of(name), store_of(45)
    with probes.changed_past(model, slots=probes.silent(places)):
        ours = scored(model, store)
    np.testing.assert_allclose(ours, by_hand(model, store, 99, tuple(places)), rtol=1e-11)
    assert not np.allclose(ours, scored(model, store), rtol=1e-6)


def test_the_model_is_as_it_was_afterwards() -> None:
    model, store = model_of("log_memory"), store_of(30)
    whole = scored(model, store)

    def interrupted() -> None:
        with probes.changed_past(model, slots=probes.silent([0])):
            assert not np.array_equal(scored(model, store), whole)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    np.testing.assert_array_equal(scored(model, store), whole)


def test_shuffling_keeps_what_is_near_what_is_there_and_what_is_missing() -> None:
    ids = torch.arange(1, 41).repeat(3, 1)
    ids[1, :25] = -1
    ids[2] += 1001
    done = probes.shuffled_beyond(6, probes.random_keys(40, seed=0))(ids)
    assert torch.equal(done[:, 34:], ids[:, 34:])
    assert torch.equal(done[1, :25], ids[1, :25])
    for before, after in zip(ids, done, strict=True):
        assert sorted(after.tolist()) == sorted(before.tolist())
        assert after.tolist() != before.tolist()
    assert torch.equal(
        done[0], probes.shuffled_beyond(6, probes.random_keys(40, seed=0))(ids[:1])[0]
    )  # alone as among others
    assert not torch.equal(done, probes.shuffled_beyond(6, probes.random_keys(40, seed=1))(ids))
    moved = done[2] - 1001
    assert not torch.equal(moved, done[0])  # another window, another order


def test_another_past_is_of_the_text_and_stands_where_there_is_one() -> None:
    store = store_of(45)
    text = store.tokens.tolist() * 3
    pasts = probes.random_pasts(store, 40, seed=0)
    assert pasts.shape == (probes.PERMUTATIONS, 40)
    for past in pasts.tolist():
        assert any(text[start : start + 40] == past for start in range(45))
    assert len(torch.unique(pasts, dim=0)) > 20
    ids = torch.arange(100, 140).repeat(2, 1)
    ids[1, :25] = -1
    done = probes.replaced_beyond(6, pasts)(ids)
    assert torch.equal(done[:, 34:], ids[:, 34:])
    assert torch.equal(done[1, :25], ids[1, :25])
    which = ids.clamp(min=0).sum(dim=1) % probes.PERMUTATIONS
    assert torch.equal(done[0, :34], pasts[which[0], :34])
    assert torch.equal(done[1, 25:34], pasts[which[1], 25:34])
    assert not torch.equal(pasts, probes.random_pasts(store, 40, seed=1))


def test_every_token_is_as_likely_to_come_first() -> None:
    ids = torch.arange(8).repeat(3000, 1) + 8 * torch.arange(3000).unsqueeze(1) ** 2  # all orders are dealt
    ids[:, -1] += torch.arange(3000)
    first = probes.shuffled_beyond(1, probes.random_keys(8, seed=0))(ids)[:, 0] - ids[:, 0]
    assert torch.unique(first).tolist() == list(range(7))


documents = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=30), min_size=1, max_size=4)


@given(documents, st.integers(1, 6), st.sampled_from(["corpus", "document"]))
@settings(deadline=None)
def test_where_a_token_last_occurred(texts: list[list[int]], window: int, streams: str) -> None:
    store = TokenStore.in_memory(texts, size=7, eot=6)
    place = probes.places_in_stream(store, streams)  # type: ignore[arg-type]
    wanted = []
    for text in texts if streams == "document" else [store.tokens.tolist()]:
        stream = [6, *text]
        for target in range(1, len(stream)):
            start = (target - 1) // window * window
            if stream[target] in stream[start:target]:
                wanted.append(0)
            elif stream[target] in stream[:start]:
                wanted.append(1 + stream[:start][::-1].index(stream[target]))
            else:
                wanted.append(probes.NEVER)
    assert probes.last_seen(store.tokens, place, window).tolist() == wanted


@pytest.mark.parametrize(("largest", "begins"), [(-1, []), (0, []), (1, [1]), (7, [1, 2, 4]), (8, [1, 2, 4, 8])])
def test_doubling(largest: int, begins: list[int]) -> None:
    assert probes.doubling(largest) == begins


def test_groups_are_documents_or_blocks_of_whole_windows() -> None:
    store = store_of(*[3, 5] * 10)
    groups, what = probes.groups_of(store, len(store), 4)
    assert what == "20 documents"
    assert groups.tolist() == [i for i in range(20) for _ in range((3, 5)[i % 2])]
    groups, what = probes.groups_of(store, 70, 4)  # 18 documents
    assert what == "18 blocks of 4 tokens in 18 documents, which says nothing of others"
    groups, what = probes.groups_of(store_of(1030), 1030, 4)
    assert what == "43 blocks of 24 tokens in 1 document, which says nothing of others"
    assert groups.tolist() == [i // 24 for i in range(1030)]
