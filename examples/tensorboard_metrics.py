"""Lanes, exposed time and bandwidths of every step in TensorBoard.

    pip install zoff-async tensorboard
    python examples/tensorboard_metrics.py && tensorboard --logdir runs

``timeline.metrics()`` gives plain numbers by name, so another logger takes them as well (``wandb.log(figures)``).
"""

from __future__ import annotations

import torch
from torch.utils.tensorboard import SummaryWriter

import zoff_async as zoff

EVERY = 8  # as many steps as the optimizer's timeline keeps


def main(steps: int = 40, folder: str = "runs") -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256))
    config = zoff.OffloadConfig(bucket_bytes=1 << 18, trace_steps=EVERY + 1)
    x = torch.randn(32, 256)
    written = -1  # the last step that is in the log
    with (
        zoff.OffloadAdamW(model.parameters(), lr=1e-3, model=model, config=config) as optimizer,
        SummaryWriter(folder) as writer,
    ):
        for step in range(1, steps + 1):
            loss = (model(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % EVERY == 0:
                writer.add_scalar("loss", loss.item(), step)
                for figures in optimizer.timeline.metrics():
                    number = int(figures.pop("step"))
                    if number > written:
                        written = number
                        for name, value in figures.items():
                            writer.add_scalar(name, value, number)
        print(optimizer.timeline.report().verdict)


if __name__ == "__main__":
    main()
