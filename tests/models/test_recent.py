"""The delta control."""

import torch

from logpast.models import RecentConfig, build
from models.helpers import CONTROL, SIZES, inputs, large


def test_control_is_a_plain_gpt_with_a_context_of_slots_plus_window() -> None:
    control = large(CONTROL)
    plain = build(RecentConfig(slots=0, **{**SIZES, "window": 13})).double()
    plain.load_state_dict(control.state_dict())
    history, tokens, _ = inputs(control)
    both = torch.cat([history, tokens], dim=1)
    torch.testing.assert_close(control(history, tokens), plain(both[:, :0], both)[:, 5:])
