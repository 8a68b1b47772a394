"""A byte-level GPT: pre-norm, causal attention, tied head. The demo's model, and a clean one to read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

VOCABULARY = 256  # every byte is a token


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a model. Two models of equal config have the same parameters, by name and shape."""

    layers: int
    heads: int
    width: int
    context: int

    def __post_init__(self) -> None:
        for name in ("layers", "heads", "width", "context"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.width % self.heads:
            raise ValueError(f"width must be a multiple of heads, got width={self.width}, heads={self.heads}")


@dataclass(frozen=True)
class Size:
    """A named model with the batch and learning rate that suit it."""

    layers: int
    heads: int
    width: int
    context: int
    batch: int
    lr: float

    def config(self, context: int | None = None) -> GPTConfig:
        return GPTConfig(self.layers, self.heads, self.width, self.context if context is None else context)


#: From seconds on two cores to one that fills an accelerator of 80 to 140 GB with bf16 weights alone.
SIZES = {
    "tiny": Size(layers=4, heads=4, width=128, context=64, batch=8, lr=1e-3),  # 0.8 M parameters
    "small": Size(layers=6, heads=6, width=384, context=256, batch=8, lr=1e-3),  # 11 M
    "medium": Size(layers=12, heads=12, width=768, context=512, batch=8, lr=6e-4),  # 86 M
    "large": Size(layers=24, heads=16, width=1024, context=1024, batch=8, lr=3e-4),  # 303 M
    "xl": Size(layers=48, heads=25, width=1600, context=1024, batch=8, lr=2e-4),  # 1.5 B
    "3b": Size(layers=32, heads=20, width=2560, context=1024, batch=4, lr=1.6e-4),  # 2.5 B
    "7b": Size(layers=32, heads=32, width=4096, context=2048, batch=4, lr=1.2e-4),  # 6.5 B
    "13b": Size(layers=40, heads=40, width=5120, context=2048, batch=2, lr=1e-4),  # 12.6 B
    "30b": Size(layers=48, heads=56, width=7168, context=2048, batch=1, lr=1e-4),  # 29.6 B
    "50b": Size(layers=64, heads=64, width=8192, context=2048, batch=1, lr=8e-5),  # 51.6 B: 103 GB of bf16
}


class Attention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        # (batch, length, 3 * width) -> 3 x (batch, heads, length, width / heads)
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width, bias=False)
        self.down = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(functional.gelu(self.up(self.mlp_norm(x))))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """Bytes in, logits of the next byte out.

    Args:
        config: The model's shape.
        recompute: Keep only the blocks' inputs and compute the rest again in backward: less memory
            for activations, a third more compute.
    """

    def __init__(self, config: GPTConfig, *, recompute: bool = False) -> None:
        super().__init__()
        self.config = config
        self.recompute = recompute
        self.token = nn.Embedding(VOCABULARY, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (batch, length, 256) of the bytes that follow ``tokens`` (batch, length) int64."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.position(positions)  # (batch, length, width)
        for block in self.blocks:
            if self.recompute and self.training:
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return functional.linear(self.norm(x), self.token.weight)  # the head is the embedding, read once more

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy in nats a byte, computed in fp32."""
        logits = self(tokens).flatten(0, 1).float()
        return functional.cross_entropy(logits, targets.flatten())

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        """Draw every weight from ``generator``, which lives on the model's device."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0 if name.endswith("weight") else 0.0)  # the norms
                continue
            # Each block adds twice to the residual stream: shrink what it adds so that the sum stays O(1).
            shrink = (2 * self.config.layers) ** -0.5 if name.endswith(("out.weight", "down.weight")) else 1.0
            drawn = torch.empty(parameter.shape, device=parameter.device)  # fp32, then rounded once
            drawn.normal_(0.0, 0.02 * shrink, generator=generator)
            parameter.copy_(drawn)


def build_model(
    config: GPTConfig, *, seed: int, dtype: torch.dtype, device: torch.device, recompute: bool = False
) -> GPT:
    """A GPT on ``device``, its weights a function of ``config``, ``seed`` and the kind of device.

    The model is never held twice: besides it stands only the largest weight, once, in fp32.
    """
    with torch.device("meta"):
        model = GPT(config, recompute=recompute)
    model = model.to(dtype).to_empty(device=device)
    model.initialise(torch.Generator(device).manual_seed(seed))
    return model


def parameter_groups(model: GPT, weight_decay: float) -> list[dict[str, object]]:
    """Two groups of named parameters: matrices decay, norms do not."""
    matrices = [(name, p) for name, p in model.named_parameters() if p.dim() > 1]
    norms = [(name, p) for name, p in model.named_parameters() if p.dim() == 1]
    return [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": norms, "weight_decay": 0.0},
    ]
