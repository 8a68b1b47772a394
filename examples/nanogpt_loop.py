"""A nanoGPT-like loop: gradient accumulation, GradScaler, clipping, a cosine schedule. One line differs from torch's.

    python examples/nanogpt_loop.py

Trains a byte-level GPT on Python's own help texts: in fp16 autocast on a GPU, in fp32 elsewhere.
"""

import math
from collections.abc import Callable
from typing import Any

import torch

import zoff_async as zoff
from zoff_async.train.model import GPTConfig, build_model, parameter_groups
from zoff_async.train.text import load_text

BATCH, ACCUMULATE, MAX_NORM, LR, WARMUP = 8, 4, 1.0, 3e-3, 5


def learning_rate(step: int, steps: int) -> float:
    if step < WARMUP:
        return LR * (step + 1) / WARMUP
    return LR * 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / max(1, steps - WARMUP)))


def on_host(model: Any) -> zoff.OffloadAdamW:
    # The one line that changes: with torch it is torch.optim.AdamW of the same arguments without model=.
    return zoff.OffloadAdamW(parameter_groups(model, 0.1), lr=LR, betas=(0.9, 0.95), model=model)


def train(make_optimizer: Callable[[Any], Any] = on_host, steps: int = 30) -> list[float]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = GPTConfig(layers=2, heads=2, width=64, context=64)
    model = build_model(config, seed=0, dtype=torch.float32, device=torch.device(device))
    optimizer, scaler = make_optimizer(model), torch.amp.GradScaler(device)
    text, losses = load_text(None), []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        total = 0.0
        for part in range(ACCUMULATE):
            tokens, targets = text.batch(batch=BATCH, context=64, seed=0, step=step, part=part)
            with torch.autocast(device, dtype=torch.float16, enabled=device == "cuda"):
                loss = model.loss(tokens.to(device), targets.to(device)) / ACCUMULATE
            scaler.scale(loss).backward()
            total += loss.item()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        losses.append(total)
    return losses


if __name__ == "__main__":
    for step, loss in enumerate(train()):
        print(f"step {step:3d}  loss {loss:.4f}")
