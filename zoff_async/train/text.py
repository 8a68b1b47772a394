"""A text as bytes, and batches of it that are a function of (seed, step) alone."""

from __future__ import annotations

import hashlib
import importlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

DEFAULT_TEXT = "pydoc_data.topics"


@dataclass(frozen=True)
class Text:
    """A training text.

    Attributes:
        name: Where it comes from: a path, or the module of the running Python that holds it.
        data: (n,) uint8 on the CPU.
    """

    name: str
    data: Tensor

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data.numpy().tobytes()).hexdigest()

    def require(self, context: int) -> None:
        """Raise ValueError unless a sequence of ``context`` bytes and the byte after it fit in."""
        if len(self.data) <= context:
            raise ValueError(
                f"text {self.name!r} has {len(self.data):,} bytes, --context {context} needs "
                f"{context + 1:,}: give a longer --text or a smaller --context"
            )

    def batch(self, *, batch: int, context: int, seed: int, step: int, part: int = 0) -> tuple[Tensor, Tensor]:
        """Tokens and the bytes that follow them, both (batch, context) int64 on the CPU.

        ``part`` is the place of this batch within a step that accumulates several. Nothing is
        remembered between calls, so a resumed run reads what the uninterrupted one would have read.
        """
        rng = np.random.default_rng([seed, step, part])
        starts = torch.from_numpy(rng.integers(0, len(self.data) - context, size=(batch, 1)))
        rows = self.data[starts + torch.arange(context + 1)].long()  # (batch, context + 1)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def load_text(path: str | None) -> Text:
    """Read ``path``, or by default the help topics that come with the running Python.

    Raises:
        ValueError: if the file cannot be read or is empty.
    """
    if path is None:
        topics: dict[str, str] = importlib.import_module(DEFAULT_TEXT).topics
        joined = "\n\n".join(topics[name] for name in sorted(topics))
        return _text(DEFAULT_TEXT, joined.encode())
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read --text {path!r}: {error.strerror}; give a file that can be read") from error
    if not content:
        raise ValueError(f"--text {path!r} is empty: give a file with something to learn")
    return _text(path, content)


def _text(name: str, content: bytes) -> Text:
    return Text(name, torch.frombuffer(bytearray(content), dtype=torch.uint8))
