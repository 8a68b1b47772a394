"""Text that a model writes, to see what it has learned."""

from __future__ import annotations

import torch

from zoff_async.train.model import GPT

TEMPERATURE = 0.8


@torch.no_grad()
def sample_text(model: GPT, *, length: int, seed: int, prompt: bytes = b"\n") -> str:
    """``length`` bytes that follow ``prompt``, drawn one at a time.

    Bytes that are no UTF-8 and control characters are shown as a replacement sign, so that a
    terminal survives a model that has learned nothing yet. torch's own generators are left alone.
    """
    device = model.token.weight.device
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.tensor([list(prompt)], device=device)  # (1, length so far)
    model.eval()
    try:
        for _ in range(length):
            logits = model(tokens[:, -model.config.context :])[0, -1].float().cpu()
            probabilities = torch.softmax(logits / TEMPERATURE, dim=-1)
            drawn = torch.multinomial(probabilities, 1, generator=generator)
            tokens = torch.cat([tokens, drawn.to(device)[None]], dim=1)
    finally:
        model.train()
    text = bytes(tokens[0, len(prompt) :].tolist()).decode(errors="replace")
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)
