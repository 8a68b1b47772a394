"""Text that the model writes."""

from __future__ import annotations

import torch

from zoff_async.train.model import GPTConfig, build_model
from zoff_async.train.sampling import sample_text


def model():
    config = GPTConfig(layers=1, heads=1, width=8, context=4)
    return build_model(config, seed=0, dtype=torch.float32, device=torch.device("cpu"))


def test_a_sample_may_be_longer_than_the_context_and_is_the_same_each_time():
    first = sample_text(model(), length=20, seed=1)

    assert 0 < len(first) <= 20
    assert first == sample_text(model(), length=20, seed=1)
    assert first != sample_text(model(), length=20, seed=2)


def test_sampling_touches_neither_the_mode_nor_the_random_numbers():
    net, state = model(), torch.get_rng_state()
    sample_text(net, length=3, seed=0)

    assert net.training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in net.parameters())


def test_a_terminal_never_sees_control_characters():
    """A model that always writes an escape byte is shown as replacement signs."""

    class Escapes(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = GPTConfig(layers=1, heads=1, width=1, context=4)
            self.token = torch.nn.Embedding(1, 1)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            logits = torch.full((*tokens.shape, 256), -100.0)
            logits[..., 0x1B] = 100.0
            return logits

    assert sample_text(Escapes(), length=3, seed=0) == "\N{REPLACEMENT CHARACTER}" * 3
