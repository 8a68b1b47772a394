"""What a policy needs to know of a model and a machine: how many pieces there are, and of what."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """The pieces of one step.

    Args:
        chunks: Chunks of each bucket; the position is the bucket. At least one bucket, each of at least one.
        slots: Staging slots in each direction.
        workers: Adam jobs that run at once.
        clip: Whether the update needs the global gradient norm (``max_norm`` or loss scaling).
        backwards: Declared backwards of a step; None for any number.
        backward_order: Buckets in the order their gradients appear; default 0, 1, 2, ...
        forward_order: Buckets in the order the forward reads them; default the reverse of ``backward_order``.
        bucket_bytes: Bytes that one copy of each bucket moves, for figures of slot use; may be left empty.

    Raises:
        ValueError: naming the argument, its value and what is allowed.
    """

    chunks: tuple[int, ...]
    slots: int = 4
    workers: int = 1
    clip: bool = False
    backwards: int | None = None
    backward_order: tuple[int, ...] = ()
    forward_order: tuple[int, ...] = ()
    bucket_bytes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("chunks", "backward_order", "forward_order", "bucket_bytes"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if not self.chunks:
            raise ValueError("chunks is empty: a layout needs at least one bucket")
        for bucket, count in enumerate(self.chunks):
            if count < 1:
                raise ValueError(f"chunks[{bucket}] is {count}: every bucket needs at least one chunk")
        for name in ("slots", "workers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: at least 1 is needed")
        if self.backwards is not None and self.backwards < 1:
            raise ValueError(f"backwards is {self.backwards}: at least 1, or None for any number")
        if not self.backward_order:
            object.__setattr__(self, "backward_order", tuple(range(self.buckets)))
        if not self.forward_order:
            object.__setattr__(self, "forward_order", self.backward_order[::-1])
        self._check_order("backward_order")
        self._check_order("forward_order")
        if self.bucket_bytes and len(self.bucket_bytes) != self.buckets:
            raise ValueError(
                f"bucket_bytes has {len(self.bucket_bytes)} entries for {self.buckets} buckets: "
                "give one for each, or none"
            )

    @property
    def buckets(self) -> int:
        """Number of buckets."""
        return len(self.chunks)

    def _check_order(self, name: str) -> None:
        order = getattr(self, name)
        if sorted(order) != list(range(self.buckets)):
            raise ValueError(f"{name} is {order}: it must name each of the buckets 0 to {self.buckets - 1} once")
