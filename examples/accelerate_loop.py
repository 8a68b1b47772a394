"""An Accelerate loop with accumulation and clipping; the prepared optimizer is the host's.

pip install zoff-async accelerate
python examples/accelerate_loop.py
"""

from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

import zoff_async as zoff
from zoff_async.train.model import GPTConfig, build_model
from zoff_async.train.text import load_text

CONTEXT = 64


def on_host(model: Any) -> zoff.OffloadAdamW:
    # The one line that changes: with torch it is torch.optim.AdamW of the same arguments without model=.
    return zoff.OffloadAdamW(model.parameters(), lr=1e-3, weight_decay=0.1, model=model)


def train(make_optimizer: Callable[[Any], Any] = on_host, steps: int = 20) -> list[tuple[float, float]]:
    """The loss and the gradient norm (before clipping) of each step."""
    set_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    config = GPTConfig(layers=2, heads=2, width=64, context=CONTEXT)
    model = build_model(config, seed=0, dtype=torch.float32, device=accelerator.device)
    optimizer = make_optimizer(model)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    rows = load_text(None).data[: 2 * steps * 4 * (CONTEXT + 1)].long().reshape(-1, CONTEXT + 1)
    loader = DataLoader(TensorDataset(rows), batch_size=4, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    log, total = [], 0.0
    for (batch,) in loader:
        with accelerator.accumulate(model):
            logits = model(batch[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            accelerator.backward(loss)
            total += loss.item() / 2
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                log.append((total, norm.item()))
                total = 0.0
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return log


if __name__ == "__main__":
    for step, (loss, norm) in enumerate(train()):
        print(f"step {step:3d}  loss {loss:.4f}  grad_norm {norm:.4f}")
