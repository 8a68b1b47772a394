"""Figures of known machines, carried as data: what a link moves, what a card computes, what a host holds.

They are vendors' peaks and sustained figures where a public measurement exists (``hardware.json`` beside
this file says which link). They feed emulation and estimates; a measured machine always knows better.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from dataclasses import dataclass
from importlib import resources

GB = 1e9
_LINKS = ("d2h_bytes_per_s", "h2d_bytes_per_s")
_RATES = (*_LINKS, "compute_flop_per_s", "host_memory_bytes_per_s", "net_bytes_per_s")


@dataclass(frozen=True)
class Hardware:
    """One machine: an accelerator, its link and its host. Bandwidths in bytes/s, memory in bytes, compute
    in FLOP/s.

    ``devices_per_host`` accelerators share the host's cores, memory and memory bandwidth.
    """

    name: str
    link: str
    d2h_bytes_per_s: float
    h2d_bytes_per_s: float
    compute_flop_per_s: float
    device_memory_bytes: int
    host_memory_bytes: int
    host_memory_bytes_per_s: float
    host_cores: int
    devices_per_host: int
    net_bytes_per_s: float

    def __post_init__(self) -> None:
        for name in (*_LINKS, "compute_flop_per_s"):
            value = getattr(self, name)
            if not (isinstance(value, int | float) and 0 < value < math.inf):
                raise ValueError(f"{name} must be a positive finite number, got {value!r}")

    def scaled(self, scale: float) -> Hardware:
        """The same machine with every rate (links, compute, host memory, network) times ``scale``.

        A model ``scale`` times as large then has a step of the same length, so the proportions of a large
        run show on a small one. Sizes and counts stay.

        Raises:
            ValueError: unless 0 < scale < inf.
        """
        if not (isinstance(scale, int | float) and 0 < scale < math.inf):
            raise ValueError(f"scale must be a positive finite number, got {scale!r}")
        return dataclasses.replace(self, **{name: getattr(self, name) * scale for name in _RATES})


@functools.cache
def _table() -> dict[str, Hardware]:
    text = (resources.files("zoff_async.device") / "hardware.json").read_text(encoding="utf-8")
    return {name: _read(name, row) for name, row in json.loads(text)["presets"].items()}


def _read(name: str, row: dict[str, float | str]) -> Hardware:
    number = {key: float(value) for key, value in row.items() if key != "link"}
    return Hardware(
        name=name,
        link=str(row["link"]),
        d2h_bytes_per_s=number["d2h_GBps"] * GB,
        h2d_bytes_per_s=number["h2d_GBps"] * GB,
        compute_flop_per_s=number.get("fp16_tflops_sustained_gemm", number["fp16_tflops_peak"]) * 1e12,
        device_memory_bytes=int(number["device_memory_GB"] * GB),
        host_memory_bytes=int(number["host_memory_GB"] * GB),
        host_memory_bytes_per_s=number["memory_GBps"] * GB,
        host_cores=int(number["host_cores"]),
        devices_per_host=int(number["devices_per_host"]),
        net_bytes_per_s=number["net_GBps_per_device"] * GB,
    )


def hardware_names() -> tuple[str, ...]:
    """The presets, in the order of the file."""
    return tuple(_table())


def hardware(name: str) -> Hardware:
    """The preset called ``name``.

    Raises:
        ValueError: with the list of presets.
    """
    try:
        return _table()[name]
    except KeyError:
        known = ", ".join(hardware_names())
        raise ValueError(f"unknown hardware preset {name!r}: choose one of {known}") from None
