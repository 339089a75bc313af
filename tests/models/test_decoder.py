"""The decoder is GPT-2, is causal, and treats missing tokens as zero vectors."""

import pytest
import torch

from logpast.models import SYSTEMS, ModelConfig, RecentConfig, build
from logpast.models.decoder import KeyValueCache, rename_gpt2
from logpast.util.errors import UserError
from models.helpers import CONTROL, MEMORY, SIZES, changed, inputs, large

BOTH = pytest.mark.parametrize("config", [MEMORY, CONTROL], ids=["log_memory", "recent"])


@pytest.mark.parametrize("system", ["log_memory", "recent"])
def test_without_slots_it_is_gpt2(system: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=101, n_positions=24, n_embd=32, n_layer=3, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
        initializer_range=0.2,
    )  # fmt: skip
    theirs = transformers.GPT2LMHeadModel(config).eval()
    for parameter in theirs.parameters():  # the initial ones and zeros of LayerNorms and biases would hide a mix-up
        torch.nn.init.normal_(parameter, std=0.2)
    sizes = {"window": 24, "layers": 3, "heads": 4, "width": 32, "vocabulary": 101}
    ours = build(SYSTEMS[system].Config(slots=0, **sizes))
    ours.load_state_dict(rename_gpt2(theirs.state_dict()))
    ids = torch.randint(101, (2, 24))
    with torch.no_grad():
        logits = ours(torch.empty(2, 0, dtype=torch.int64), ids)
        torch.testing.assert_close(logits, theirs(ids).logits, atol=1e-5, rtol=1e-5)
    nats = ours(torch.empty(2, 0, dtype=torch.int64), ids[:, :-1], ids[:, 1:])
    torch.testing.assert_close(nats.mean(), theirs(ids, labels=ids).loss, atol=1e-5, rtol=1e-5)


def test_attention_to_slots_is_gpt2s_attention_to_the_tokens_in_them() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 31, "n_positions": 13, "n_embd": 16, "n_layer": 2, "n_head": 2, "initializer_range": 0.5}
    config = transformers.GPT2Config(**sizes, attn_implementation="eager")
    theirs = transformers.GPT2LMHeadModel(config).eval()
    ours = build(RecentConfig(slots=5, **SIZES))
    ours.load_state_dict(rename_gpt2(theirs.state_dict()))
    ids = torch.randint(31, (3, 13))
    with torch.no_grad():
        expected = torch.stack(theirs(ids, output_attentions=True).attentions).mean((0, 2))[:, 5:, :5].flip(-1)
    found = ours.slot_attention(ids[:, :5], ids[:, 5:])
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    assert found.std() > 0.01


@BOTH
def test_attention_to_slots_leaves_the_model_as_it_was(config: ModelConfig) -> None:
    model = large(config)
    history, tokens, targets = inputs(model)
    before = model(history, tokens, targets)
    assert model.slot_attention(history, tokens).shape == (3, 8, model.slots)
    assert torch.equal(model(history, tokens, targets), before)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_gpt2_small_has_its_number_of_parameters() -> None:
    with torch.device("meta"):
        plain = build(RecentConfig(slots=0, window=1024), tokens=50257)
        control = build(RecentConfig(), tokens=50257)
    assert plain.config.vocabulary == 50304
    assert plain.parameter_count() == 124_439_808 + 47 * 768  # GPT-2's own, and the rows that round up its vocabulary
    assert control.parameter_count() == plain.parameter_count() - (1024 - 309) * 768


def test_negative_slots_are_refused() -> None:
    with pytest.raises(UserError, match=r"model\.slots"):
        RecentConfig(slots=-1, **SIZES)


@BOTH
def test_every_parameter_has_a_gradient(config: ModelConfig) -> None:
    model = large(config)
    model(*inputs(model)).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


@BOTH
def test_a_token_changes_no_logits_before_it(config: ModelConfig) -> None:
    model = large(config)
    history, tokens, _ = inputs(model)
    before = model(history, tokens)
    for position in range(8):
        after = model(history, changed(tokens, position))
        torch.testing.assert_close(after[:, :position], before[:, :position], rtol=0, atol=1e-12)
        assert (after[:, position] - before[:, position]).abs().max() > 1e-6


@BOTH
def test_missing_tokens_are_zero_vectors(config: ModelConfig) -> None:
    """They stay in the sequence: -1 gives the same as a token with a zero embedding."""
    model = large(config)
    history, tokens, _ = inputs(model)
    history[:, :3] = 7
    with torch.no_grad():
        model.table.weight[7] = 0
    tokens[tokens == 7] = 8
    history[:, 3:][history[:, 3:] == 7] = 8
    zeroed = model(history, tokens)
    history[:, :3] = -1
    torch.testing.assert_close(model(history, tokens), zeroed)


@BOTH
def test_a_shorter_or_longer_history_is_padded_or_truncated_at_its_start(config: ModelConfig) -> None:
    torch.manual_seed(0)
    model = build(config).double()
    history, tokens, _ = inputs(model)
    short = torch.cat([torch.full_like(history[:, 3:], -1), history[:, :3]], dim=1)
    torch.testing.assert_close(model(history[:, :3], tokens), model(short, tokens))
    torch.testing.assert_close(model(history[:, :0], tokens), model(torch.full_like(history, -1), tokens))
    longer = torch.cat([tokens, history], dim=1)
    torch.testing.assert_close(model(longer, tokens), model(history, tokens))


@BOTH
def test_a_key_value_cache_gives_the_same_output_token_by_token(config: ModelConfig) -> None:
    model = large(config)
    history, tokens, _ = inputs(model)
    x = torch.cat([model.make_slots(history), model.table(tokens)], dim=1)
    cache, first = KeyValueCache(), model.slots + 3
    parts = [model.hidden(x[:, :first], cache)]
    parts += [model.hidden(x[:, i : i + 1], cache, start=i) for i in range(first, x.shape[1])]
    torch.testing.assert_close(torch.cat(parts, dim=1), model.hidden(x))


@BOTH
def test_bfloat16_autocast_stays_close(config: ModelConfig) -> None:
    torch.manual_seed(0)
    model = build(config)
    batch = inputs(model)
    exact = model(*batch)
    with torch.autocast("cpu", torch.bfloat16):
        rough = model(*batch)
    torch.testing.assert_close(rough, exact, atol=0.02, rtol=0.02)
    rough.sum().backward()
