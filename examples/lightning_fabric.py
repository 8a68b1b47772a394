"""A Lightning Fabric loop: set up, clip, save and load with the optimizer on the host.

pip install zoff-async lightning
python examples/lightning_fabric.py
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric, seed_everything

import zoff_async as zoff
from zoff_async.train.model import GPTConfig, build_model
from zoff_async.train.text import load_text

CONTEXT = 64


def on_host(model: Any) -> zoff.OffloadAdamW:
    # The one line that changes: with torch it is torch.optim.AdamW of the same arguments without model=.
    return zoff.OffloadAdamW(model.parameters(), lr=1e-3, weight_decay=0.1, model=model)


def train(
    folder: Path, make_optimizer: Callable[[Any], Any] = on_host, steps: int = 20, start: int = 0
) -> list[tuple[float, float]]:
    """The loss and the gradient norm of each step; saved in ``folder`` at the end, taken from there if ``start``."""
    seed_everything(0, verbose=False)
    fabric = Fabric(accelerator="auto", devices=1)
    fabric.launch()
    config = GPTConfig(layers=2, heads=2, width=64, context=CONTEXT)
    model = build_model(config, seed=0, dtype=torch.float32, device=fabric.device)
    optimizer = make_optimizer(model)
    model, optimizer = fabric.setup(model, optimizer)
    model.mark_forward_method("loss")
    if start:
        fabric.load(folder / "state.ckpt", {"model": model, "optimizer": optimizer})

    text, log = load_text(None), []
    for step in range(start, steps):
        tokens, targets = text.batch(batch=8, context=CONTEXT, seed=0, step=step)
        loss = model.loss(fabric.to_device(tokens), fabric.to_device(targets))
        fabric.backward(loss)
        norm = fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        log.append((loss.item(), norm.item()))
    fabric.save(folder / "state.ckpt", {"model": model, "optimizer": optimizer})
    return log


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        for step, (loss, norm) in enumerate(train(Path(folder))):
            print(f"step {step:3d}  loss {loss:.4f}  grad_norm {norm:.4f}")
