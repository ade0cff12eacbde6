"""Bandwidth from a device to page-locked memory with NVIDIA's driver alone.

Uses the driver's C interface (libcuda, opened at run time), so it needs no CUDA toolkit or package:
one copy on one stream, timed by events on the device.
"""

from __future__ import annotations

import ctypes

from models import NotHere

from kqview.bench.pairs import quantile

_LIBRARY = "libcuda.so.1"


class _Driver:
    """Calls by name; a result other than 0 is an error."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL(_LIBRARY)
        except OSError as error:
            raise NotHere(f"no NVIDIA driver ({_LIBRARY})") from error

    def __call__(self, name: str, *args: object) -> None:
        status = getattr(self._library, name)(*args)
        if status != 0:
            raise RuntimeError(f"{name} returned {status}")


def copy_ms(n_bytes: int, n_copies: int = 20, device: int = 0) -> list[float]:
    """Milliseconds of each of *n_copies* copies of *n_bytes* from the device to pinned memory.

    Raises:
        NotHere: There is no driver, or no device.
        RuntimeError: A call of the driver failed.
    """
    call = _Driver()
    handle, context, stream = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p()
    n_devices = ctypes.c_int()
    try:
        call("cuInit", 0)
        call("cuDeviceGetCount", ctypes.byref(n_devices))
    except RuntimeError as error:
        raise NotHere(f"no NVIDIA device ({error})") from error
    if n_devices.value <= device:
        raise NotHere(f"{n_devices.value} NVIDIA devices, {device} was asked for")
    call("cuDeviceGet", ctypes.byref(handle), device)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
    source, target = ctypes.c_uint64(), ctypes.c_void_p()
    events = [ctypes.c_void_p(), ctypes.c_void_p()]
    try:
        call("cuCtxSetCurrent", context)
        call("cuStreamCreate", ctypes.byref(stream), 1)  # waits for no other stream
        call("cuMemAlloc_v2", ctypes.byref(source), ctypes.c_size_t(n_bytes))
        call("cuMemAllocHost_v2", ctypes.byref(target), ctypes.c_size_t(n_bytes))
        for event in events:
            call("cuEventCreate", ctypes.byref(event), 0)
        times_ms: list[float] = []
        for _ in range(n_copies + 2):  # the first ones bring pages and clocks up
            call("cuEventRecord", events[0], stream)
            call("cuMemcpyDtoHAsync_v2", target, source, ctypes.c_size_t(n_bytes), stream)
            call("cuEventRecord", events[1], stream)
            call("cuEventSynchronize", events[1])
            spent = ctypes.c_float()
            call("cuEventElapsedTime", ctypes.byref(spent), *events)
            times_ms.append(spent.value)
        return times_ms[2:]
    finally:
        if target:
            call("cuMemFreeHost", target)
        if source:
            call("cuMemFree_v2", source)
        call("cuDevicePrimaryCtxRelease_v2", handle)


if __name__ == "__main__":
    for n in (2**20, 2**24, 2**26):
        median_ms = quantile(copy_ms(n), 0.5)
        print(f"{n:>12,} bytes: {median_ms:.3f} ms, {n / median_ms / 1e6:.1f} GB/s")
