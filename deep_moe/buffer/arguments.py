"""The arguments of SymmBuffer, checked. What may raise here is local: `together` tells the other ranks."""

import os
from typing import Any

import torch

from .. import _C
from ..errors import DeviceError
from .collective import Collective, ProcessGroup, SingleRank
from .local_group import LocalRank


def collective_of(group: Any) -> Collective:
    """How the ranks of `group` meet; TypeError when it is no group."""
    if group is None:
        return SingleRank()
    if isinstance(group, LocalRank):
        return group
    if hasattr(group, "rank") and hasattr(group, "size"):
        return ProcessGroup(group)
    raise TypeError(
        f"group is a {type(group).__name__}; it must be a torch.distributed process group, a rank group that "
        "LocalGroup.run passes to its function, or None for one rank"
    )


def checked_device(group: Any, num_ranks: int, device: Any) -> torch.device:
    """The rank's device, with its index."""
    own = group.device if isinstance(group, LocalRank) else None
    try:
        chosen = own if device is None else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device is {device!r}; it must be a CUDA device or the CPU") from error
    if chosen is None:
        chosen = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if chosen.type == "cuda" and _C.driver.missing():
        raise DeviceError(f"device is {chosen}, but there is {_C.driver.missing()}")
    if chosen.type == "cpu":
        chosen = torch.device("cpu")  # "cpu:0" is the same place, but not equal
    if chosen.type == "cuda" and chosen.index is None:
        chosen = torch.device("cuda", torch.cuda.current_device()) if own is None else own
    if own is not None and chosen != own:
        raise ValueError(f"device is {chosen}, but this rank of the LocalGroup is on {own}; leave device out")
    if chosen.type == "cpu" and own is None and num_ranks > 1:
        raise ValueError(
            "device is the CPU, but a process group's ranks are in different processes and the emulator runs all ranks "
            f'in one; use LocalGroup({num_ranks}, "cpu"), or GPUs'
        )
    if chosen.type == "cuda":
        _check_capability(chosen)
    elif chosen.type != "cpu":
        raise ValueError(f"device is {chosen}; it must be a CUDA device or the CPU (emulator)")
    return chosen


def _check_capability(device: torch.device) -> None:
    driver = _C.driver
    major = driver.device_attribute(device.index, driver.DeviceAttribute.ComputeCapabilityMajor)
    minor = driver.device_attribute(device.index, driver.DeviceAttribute.ComputeCapabilityMinor)
    if (major, minor) != (9, 0):
        raise DeviceError(
            f"device {device} is an {driver.device_name(device.index)} (SM{major}{minor}); deep_moe has kernels for "
            "SM90 (Hopper) only: use such a GPU, or CPU tensors (the emulator)"
        )


def checked_num_sms(group: Any, device: torch.device, num_sms: int | None) -> int | None:
    """The number of SMs; None: what the emulator's options say."""
    if device.type == "cpu":
        most, default = 1024, None  # default: that of deep_moe.emulator.options
    else:
        most = _C.driver.device_attribute(device.index, _C.driver.DeviceAttribute.MultiprocessorCount)
        if isinstance(group, LocalRank):
            most = group.num_sms
        default = most
    if num_sms is None:
        return default
    if not isinstance(num_sms, int) or isinstance(num_sms, bool) or not 1 <= num_sms <= most:
        raise ValueError(f"num_sms is {num_sms!r}; it must be an integer from 1 to {most}, or None for all")
    return num_sms


def checked_switch(variable: str) -> bool:
    """Whether an environment variable is 1; ValueError unless it is 0, 1 or not there."""
    text = os.environ.get(variable, "")
    if text not in ("", "0", "1"):
        raise ValueError(f"{variable} is {text!r}; it must be 0 or 1")
    return text == "1"
