"""From what a user writes to a device."""

from __future__ import annotations

import pytest
import torch

from zoff_async.device import EmulatedDevice, HostDevice, check_device_name, choose, open_device
from zoff_async.device.cuda import CudaDevice

CPU = torch.device("cpu")
CUDA0 = torch.device("cuda", 0)
PRESETS = (
    "write emulated:PRESET with PRESET one of v100-32g-dgx2, a100-40g, h100-80g, h200-141g, gh200, "
    "rtx4090-desktop, rtx4070ti-super-desktop"
)
MOVE = "move the model there, or choose device='auto'"


@pytest.mark.parametrize(
    "name", ["auto", "host", "cpu", "cuda", "cuda:1", "emulated:gh200", "emulated:gh200:scale=0.1"]
)
def test_known_names_are_accepted_without_opening_anything(name: str) -> None:
    check_device_name(name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tpu", "device must be one of auto, host, cpu, cuda, emulated:PRESET, got 'tpu'"),
        ("cuda:x", "device must be one of auto, host, cpu, cuda, emulated:PRESET, got 'cuda:x'"),
        ("emulated:k80", f"device 'emulated:k80' names no emulated machine: {PRESETS}"),
        ("emulated", f"device 'emulated' names no emulated machine: {PRESETS}"),
        (
            "emulated:gh200:speed=2",
            "device 'emulated:gh200:speed=2': unknown key 'speed', allowed are scale, d2h_GBps, h2d_GBps, latency_us",
        ),
        (
            "emulated:gh200:scale=0",
            "device 'emulated:gh200:scale=0': scale must be a positive number, got '0'",
        ),
        (
            "emulated:gh200:scale=much",
            "device 'emulated:gh200:scale=much': scale must be a positive number, got 'much'",
        ),
        ("emulated:gh200:scale", "device 'emulated:gh200:scale': scale must be a positive number, got ''"),
    ],
)
def test_an_unknown_name_is_refused_with_what_is_allowed(name: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        check_device_name(name)
    assert str(caught.value) == message


def test_something_else_than_a_name_or_a_device_is_a_type_error() -> None:
    with pytest.raises(TypeError) as caught:
        check_device_name(3)  # type: ignore[arg-type]
    assert str(caught.value) == "device must be one of auto, host, cpu, cuda, emulated:PRESET or a Device, got 3"


@pytest.mark.parametrize("name", ["auto", "host", "cpu"])
def test_parameters_on_the_cpu_get_the_host_device(name: str) -> None:
    device = open_device(name, CPU)
    assert isinstance(device, HostDevice)
    device.close()


def test_an_emulated_name_opens_that_machine() -> None:
    device = open_device("emulated:a100-40g:scale=0.5:d2h_GBps=3:latency_us=50", CPU)
    assert isinstance(device, EmulatedDevice)
    assert device.name == "emulated:a100-40g:scale=0.5:d2h_GBps=3:latency_us=50"
    assert device.hardware.d2h_bytes_per_s == 3e9
    assert device.hardware.h2d_bytes_per_s == 12e9
    device.close()


def test_a_device_made_by_hand_is_used_as_it_is() -> None:
    made = EmulatedDevice()
    check_device_name(made)
    assert open_device(made, CPU) is made
    made.close()


@pytest.mark.parametrize("name", ["auto", "cuda", "cuda:0"])
def test_parameters_on_a_cuda_device_get_the_cuda_device(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaDevice, "open", lambda torch_device: ("opened", torch_device))
    assert open_device(name, CUDA0) == ("opened", CUDA0)


@pytest.mark.parametrize(
    ("name", "parameters_on", "message"),
    [
        ("cuda", CPU, f"device='cuda' takes parameters on cuda, got parameters on cpu: {MOVE}"),
        ("cuda:1", CUDA0, f"device='cuda:1' takes parameters on cuda:1, got parameters on cuda:0: {MOVE}"),
        ("host", CUDA0, f"device='host' takes parameters on cpu, got parameters on cuda:0: {MOVE}"),
        (
            "emulated:gh200",
            CUDA0,
            f"device='emulated:gh200' takes parameters on cpu, got parameters on {CUDA0}: {MOVE}",
        ),
        (
            "auto",
            torch.device("meta"),
            "parameters must be on the CPU or a CUDA device, got parameters on meta",
        ),
    ],
)
def test_a_device_that_does_not_fit_the_parameters_is_refused(
    name: str, parameters_on: torch.device, message: str
) -> None:
    with pytest.raises(ValueError) as caught:
        open_device(name, parameters_on)
    assert str(caught.value) == message


def test_a_device_made_by_hand_must_fit_too() -> None:
    made = EmulatedDevice("gh200")
    with pytest.raises(ValueError) as caught:
        open_device(made, CUDA0)
    assert str(caught.value).startswith("device='emulated:gh200' takes parameters on cpu, got parameters on cuda:0")
    made.close()


def test_the_words_of_the_configuration_are_those_of_the_errors() -> None:
    assert choose.DEVICE_NAMES == ("auto", "host", "cpu", "cuda", "emulated:PRESET")
