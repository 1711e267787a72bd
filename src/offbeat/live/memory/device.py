"""Device memory that other processes can open: CUDA IPC, through the driver's own library.

Not torch's way of sharing CUDA tensors: that counts its readers in files, and complains at the end of a process that
has been read by others. Here memory is asked of the driver, and is one's own until `free`; who opens another's memory
closes it again. A process that ends gives back both.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
_MAPPED = 2
_HAS_IT_ALREADY = 704


class _Handle(ctypes.Structure):
    _fields_ = [("data", ctypes.c_char * HANDLE_BYTES)]


@lru_cache(maxsize=1)
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def call_driver(name: str, *args: Any, fine: Sequence[int] = ()) -> None:
    """Call the driver. OSError with what it says, unless that is ``fine``, or where it does not know the call."""
    call = getattr(_driver(), name, None)
    if call is None:
        raise OSError(f"this driver has no {name}")
    result = call(*args)
    if result and result not in fine:
        words = ctypes.c_char_p()
        _driver().cuGetErrorString(result, ctypes.byref(words))
        raise OSError(f"{name}: {(words.value or b'unknown error').decode()}")


class Allocation:
    """Some device memory: one's own, or another process's."""

    def __init__(self, pointer: int, device: torch.device, own: bool) -> None:
        self._pointer, self.device, self._own = pointer, device, own

    @classmethod
    def make(cls, nbytes: int, device: torch.device) -> Allocation:
        pointer = ctypes.c_uint64()
        with torch.cuda.device(device):
            torch.cuda.init()  # the driver's calls need the context that torch makes
            try:
                call_driver("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(max(nbytes, 1)))
            except OSError:
                torch.cuda.empty_cache()  # torch may keep free memory for itself
                call_driver("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(max(nbytes, 1)))
        return cls(int(pointer.value), device, own=True)

    @classmethod
    def open(cls, handle: bytes, device: torch.device) -> Allocation:
        """Another process's, by its handle."""
        pointer, given = ctypes.c_uint64(), _Handle()
        ctypes.memmove(ctypes.byref(given), handle, HANDLE_BYTES)
        with torch.cuda.device(device):
            call_driver("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), given, ctypes.c_uint(_LAZY_PEER_ACCESS))
        return cls(int(pointer.value), device, own=False)

    @property
    def handle(self) -> bytes:
        """What another process opens it by."""
        given = _Handle()
        with torch.cuda.device(self.device):
            call_driver("cuIpcGetMemHandle", ctypes.byref(given), ctypes.c_uint64(self._pointer))
        return ctypes.string_at(ctypes.byref(given), HANDLE_BYTES)

    def tensor(self, dtype: torch.dtype, numel: int, offset: int, device: torch.device) -> Tensor:
        """A view of it for work on ``device``, which does not keep it: nobody may look at it after ``free``."""
        return _view(self._pointer + offset, dtype, numel, device)

    def free(self) -> None:
        """Give it back, or close it."""
        pointer, self._pointer = self._pointer, 0
        if pointer:
            with torch.cuda.device(self.device):
                call_driver("cuMemFree_v2" if self._own else "cuIpcCloseMemHandle", ctypes.c_uint64(pointer))


class StreamWords:
    """Words of 64 bits in memory of the host that streams write to, behind all that they were asked for before.

    ``places``: where the memory begins in this process, ``nbytes`` each. Raises OSError where that cannot be had.
    """

    def __init__(self, places: Sequence[int], nbytes: int, device: torch.device) -> None:
        self._device, self._registered, self._seen = device, list[int](), list[int]()
        try:
            with torch.cuda.device(device):
                for place in places:
                    call_driver("cuMemHostRegister_v2", ctypes.c_void_p(place), ctypes.c_size_t(nbytes), _MAPPED)
                    self._registered.append(place)
                    seen = ctypes.c_uint64()
                    call_driver("cuMemHostGetDevicePointer_v2", ctypes.byref(seen), ctypes.c_void_p(place), 0)
                    self._seen.append(int(seen.value))
        except BaseException:
            self.close()
            raise

    def write(self, member: int, word: int, value: int) -> None:
        """On torch's current stream."""
        stream = ctypes.c_void_p(torch.cuda.current_stream(self._device).cuda_stream)
        place = ctypes.c_uint64(self._seen[member] + 8 * word)
        call_driver("cuStreamWriteValue64_v2", stream, place, ctypes.c_uint64(value), 0)

    def close(self) -> None:
        """Nothing is written any more."""
        registered, self._registered = self._registered, []
        with torch.cuda.device(self._device):
            for place in registered:
                call_driver("cuMemHostUnregister", ctypes.c_void_p(place))


def _view(pointer: int, dtype: torch.dtype, numel: int, device: torch.device) -> Tensor:
    """Numbers in device memory as ``device`` sees them, which may lie on another that it reads directly.

    Who lets torch find out by the pointer gets a tensor on that other device, or a copy.
    """
    made = torch.empty(0, dtype=dtype, device=device)
    if numel:
        memory = torch._C._construct_storage_from_data_pointer(pointer, device, numel * dtype.itemsize)
        made.set_(memory, 0, (numel,), (1,))
    return made


def let_read(devices: Sequence[torch.device]) -> None:
    """Let this process's work on each of these read the memory of the others. Raises OSError where it cannot."""
    contexts = list[ctypes.c_void_p]()
    for device in devices:
        with torch.cuda.device(device):
            torch.zeros(1, device=device)  # the driver's calls need the context that torch makes
            contexts.append(ctypes.c_void_p())
            call_driver("cuCtxGetCurrent", ctypes.byref(contexts[-1]))
    for device in devices:
        for other, context in zip(devices, contexts, strict=True):
            if other != device:
                with torch.cuda.device(device):
                    call_driver("cuCtxEnablePeerAccess", context, 0, fine=(_HAS_IT_ALREADY,))
