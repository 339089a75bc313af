"""Changes of the past against the definition; kinds of tokens against a search through the text."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from logpast.analysis import probes
from logpast.data import TokenStore
from logpast.evaluation.scoring import score
from logpast.models import (
    LogMemoryConfig,
    LogMemoryTransformer,
    RecentConfig,
    Transformer,
    TransformerXLConfig,
    build,
)

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
def by_hand(model: Transformer, store: TokenStore, reach: int, zero: tuple[int, ...] = ()) -> list[float]:
    """Token by token: slots are made of the `reach` tokens before the window only, and some slots are zero."""
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
        for position in zero:
            front[position] = 0
        hidden = model.hidden(torch.cat([front, table[stream[start:target]]]).unsqueeze(0))[0, -1]
        nats.append(-float(torch.log_softmax(table @ hidden, 0)[stream[target]]))
    return nats


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("lag", [0, 1, 3])
def test_cut_off_past_matches_the_definition(name: str, lag: int) -> None:
    model, store = model_of(name), store_of(45)
    with probes.changed_past(model, ids=probes.cut_beyond(lag)):
        ours = scored(model, store)
    np.testing.assert_allclose(ours, by_hand(model, store, lag), rtol=1e-11)
    assert not np.allclose(ours, scored(model, store), rtol=1e-6)


@pytest.mark.parametrize("name", CONFIGS)
def test_changes_beyond_the_history_change_nothing(name: str) -> None:
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
@pytest.mark.parametrize("positions", [[0], [4], [1, 3]])
def test_zero_slots_match_the_definition(name: str, positions: list[int]) -> None:
    model, store = model_of(name), store_of(45)
    with probes.changed_past(model, slots=probes.zero_slots(positions)):
        ours = scored(model, store)
    np.testing.assert_allclose(ours, by_hand(model, store, 99, tuple(positions)), rtol=1e-11)
    assert not np.allclose(ours, scored(model, store), rtol=1e-6)


def test_model_is_unchanged_afterwards() -> None:
    model, store = model_of("log_memory"), store_of(30)
    whole = scored(model, store)

    def interrupted() -> None:
        with probes.changed_past(model, slots=probes.zero_slots([0])):
            assert not np.array_equal(scored(model, store), whole)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    np.testing.assert_array_equal(scored(model, store), whole)


def test_shuffling_keeps_near_tokens_the_set_of_far_tokens_and_missing_tokens() -> None:
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
    )  # in a batch of its own, too
    assert not torch.equal(done, probes.shuffled_beyond(6, probes.random_keys(40, seed=1))(ids))
    moved = done[2] - 1001
    assert not torch.equal(moved, done[0])  # another window has another order


def test_replacement_past_is_a_stretch_of_the_text_and_leaves_missing_tokens_missing() -> None:
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


def test_shuffling_can_move_every_far_token_to_the_front() -> None:
    ids = torch.arange(8).repeat(3000, 1) + 8 * torch.arange(3000).unsqueeze(1) ** 2  # all orders are used
    ids[:, -1] += torch.arange(3000)
    first = probes.shuffled_beyond(1, probes.random_keys(8, seed=0))(ids)[:, 0] - ids[:, 0]
    assert torch.unique(first).tolist() == list(range(7))


documents = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=30), min_size=1, max_size=4)


@given(documents, st.integers(1, 6), st.sampled_from(["corpus", "document"]))
@settings(deadline=None)
def test_last_occurrence_matches_a_search(texts: list[list[int]], window: int, streams: str) -> None:
    store = TokenStore.in_memory(texts, size=7, eot=6)
    position = probes.positions_in_stream(store, streams)  # type: ignore[arg-type]
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
    assert probes.last_seen(store.tokens, position, window).tolist() == wanted


@pytest.mark.parametrize(("largest", "begins"), [(-1, []), (0, []), (1, [1]), (7, [1, 2, 4]), (8, [1, 2, 4, 8])])
def test_powers_of_two(largest: int, begins: list[int]) -> None:
    assert probes.powers_of_two(largest) == begins


def test_fresh_states_make_each_window_of_a_recurrent_model_a_text_of_its_own() -> None:
    model = build(TransformerXLConfig(memory=4, **SIZES)).double()
    store = store_of(12)
    whole = score(model, store, 4, 0)
    with probes.changed_past(model, fresh=torch.ones_like):
        fresh = score(model, store, 4, 0)
    first = TokenStore.in_memory([store.tokens[:4]], size=13, eot=12)
    np.testing.assert_allclose(fresh[:4], score(model, first, 4, 0))
    rest = TokenStore.in_memory([store.tokens[4:]], size=13, eot=int(store.tokens[3]))
    np.testing.assert_allclose(fresh[4:8], score(model, rest, 4, 0)[:4])
    assert abs(whole[4:] - fresh[4:]).max() > 1e-6
    np.testing.assert_allclose(score(model, store, 4, 0), whole)
