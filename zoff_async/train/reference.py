"""Plain torch.optim.AdamW on fp32 masters: what the offloaded run is compared with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW


class ReferenceAdamW:
    """torch's AdamW over fp32 copies of a model's parameters, on the model's own device.

    Gradients are added up in fp32 in the order of the backwards, clipped by torch's own function,
    applied to the copies, and the copies are rounded into the model: mixed precision as the books
    have it. For an fp32 model the copies are exact and this is plain AdamW.

    Args:
        groups: Parameter groups as torch takes them, of named parameters.
        lr, betas: As torch's.
        max_norm: Clip the global norm at this; None does not clip.
    """

    def __init__(
        self, groups: list[dict[str, Any]], *, lr: float, betas: tuple[float, float], max_norm: float | None
    ) -> None:
        self._pairs: list[tuple[Tensor, Tensor]] = []  # (parameter, its fp32 master)
        master_groups = []
        for group in groups:
            masters = []
            for name, parameter in group["params"]:
                master = parameter.detach().float().clone().requires_grad_()
                self._pairs.append((parameter, master))
                masters.append((name, master))
            master_groups.append({**group, "params": masters})
        # One kernel a tensor and operation: the arithmetic that the offloaded kernels promise to match.
        self.optimizer = AdamW(master_groups, lr=lr, betas=betas, foreach=False, fused=False)
        self._max_norm = max_norm

    def after_backward(self) -> None:
        """Move the gradients of one backward into the fp32 sums."""
        for parameter, master in self._pairs:
            if parameter.grad is None:
                continue
            gradient = parameter.grad.float()
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)
            parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Clip, update the masters, round them into the model."""
        masters = [master for _, master in self._pairs]
        if self._max_norm is not None:
            torch.nn.utils.clip_grad_norm_(masters, self._max_norm, foreach=False)
        self.optimizer.step()
        self.optimizer.zero_grad()
        for parameter, master in self._pairs:
            parameter.copy_(master)
