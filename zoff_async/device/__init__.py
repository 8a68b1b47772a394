"""HOW bytes reach and leave the accelerator: one small protocol and its implementations."""

from __future__ import annotations

from zoff_async.device.base import Device, DeviceMemory, Done, Marker, Transfer
from zoff_async.device.choose import DEVICE_NAMES, check_device_name, open_device
from zoff_async.device.emulated import EmulatedDevice, EmulatedStatistics
from zoff_async.device.faults import HOSTILE_EARLY, HOSTILE_LATE, Faults
from zoff_async.device.hardware import Hardware, hardware, hardware_names
from zoff_async.device.host import HostDevice

__all__ = [
    "DEVICE_NAMES",
    "Device",
    "DeviceMemory",
    "Done",
    "EmulatedDevice",
    "EmulatedStatistics",
    "Faults",
    "HOSTILE_EARLY",
    "HOSTILE_LATE",
    "Hardware",
    "HostDevice",
    "Marker",
    "Transfer",
    "check_device_name",
    "hardware",
    "hardware_names",
    "open_device",
]
