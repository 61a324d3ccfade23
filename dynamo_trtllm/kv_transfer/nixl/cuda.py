"""Makes a GPU's context current on a thread, by the driver alone: UCX wants one on every thread that calls it.

It is the process's primary context, the one that every CUDA library of the process shares. Loads nothing until asked.
"""

from __future__ import annotations

import ctypes
import threading

from dynamo_trtllm.errors import TransferFailed

_MOST_GPUS = 64


class _Here(threading.local):
    device: int | None = None


_here = _Here()


def use(device: int) -> None:
    """For the calling thread; cheap when it is so already. Raises TransferFailed where there is no such GPU."""
    if _here.device == device:
        return
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as exc:
        raise TransferFailed(
            f"transfer backend nixl can't move memory of cuda:{device}: no CUDA driver ({exc})"
        ) from exc
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    for call, arguments in (
        (driver.cuInit, (ctypes.c_uint(0),)),
        (driver.cuDeviceGet, (ctypes.byref(handle), ctypes.c_int(device))),
        (driver.cuDevicePrimaryCtxRetain, (ctypes.byref(context), handle)),
        (driver.cuCtxSetCurrent, (context,)),
    ):
        if status := call(*arguments):
            raise TransferFailed(f"transfer backend nixl can't use cuda:{device}: {call.__name__} returned {status}")
    _here.device = device


def join() -> None:
    """Uses the first GPU that this process uses already; nothing where it uses none."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    handle, flags, is_active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
    for device in range(_MOST_GPUS):
        if driver.cuDeviceGet(ctypes.byref(handle), ctypes.c_int(device)):  # no more of them, or no driver call so far
            return
        driver.cuDevicePrimaryCtxGetState(handle, ctypes.byref(flags), ctypes.byref(is_active))
        if is_active.value:
            use(device)
            return
