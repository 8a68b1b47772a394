"""From a name, or a device made by hand, to the device an optimizer uses."""

from __future__ import annotations

import re

import torch

from zoff_async.device.base import Device
from zoff_async.device.emulated import PREFIX, EmulatedDevice, read_name
from zoff_async.device.host import HostDevice

#: What OffloadConfig(device=...) takes, besides a Device. ``cuda:N`` is allowed too.
DEVICE_NAMES = ("auto", "host", "cpu", "cuda", "emulated:PRESET")

_CUDA = re.compile(r"cuda(:\d+)?")


def check_device_name(device: str | Device) -> None:
    """Raise unless ``device`` is a name this version has, or a Device (nothing is opened).

    Raises:
        ValueError: an unknown name, emulated preset or key, with what is allowed.
        TypeError: neither a name nor a Device.
    """
    if not isinstance(device, str):
        if not isinstance(device, Device):
            raise TypeError(f"device must be one of {', '.join(DEVICE_NAMES)} or a Device, got {device!r}")
    elif device.startswith("emulated"):
        read_name(device)
    elif device not in DEVICE_NAMES and not _CUDA.fullmatch(device):
        raise ValueError(f"device must be one of {', '.join(DEVICE_NAMES)}, got {device!r}")


def open_device(device: str | Device, parameters_on: torch.device) -> Device:
    """The device for parameters that live on ``parameters_on``.

    A Device made by hand is returned as it is, and belongs from then on to the optimizer, whose ``close``
    closes it.

    Raises:
        ValueError: the name is unknown, or the device does not fit where the parameters are.
        DeviceError: the accelerator refused.
    """
    check_device_name(device)
    if not isinstance(device, str):
        _check_fits(device.name, device.torch_device, parameters_on)
        return device
    if parameters_on.type not in ("cpu", "cuda"):
        raise ValueError(f"parameters must be on the CPU or a CUDA device, got parameters on {parameters_on}")
    if device == "auto":
        device = parameters_on.type
    if _CUDA.fullmatch(device):
        return _open_cuda(device, parameters_on)
    _check_fits(device, torch.device("cpu"), parameters_on)
    return EmulatedDevice.from_name(device) if device.startswith(PREFIX) else HostDevice()


def _open_cuda(device: str, parameters_on: torch.device) -> Device:
    _check_fits(device, torch.device(device), parameters_on)
    from zoff_async.device.cuda import CudaDevice  # here: an accelerator's module is read where there is one

    return CudaDevice.open(parameters_on)


def _check_fits(name: str, wanted: torch.device, parameters_on: torch.device) -> None:
    same_index = wanted.index is None or parameters_on.index is None or wanted.index == parameters_on.index
    if wanted.type != parameters_on.type or not same_index:
        raise ValueError(
            f"device={name!r} takes parameters on {wanted}, got parameters on {parameters_on}: "
            "move the model there, or choose device='auto'"
        )
