"""Sums on a GPU in one pass.

torch adds two vectors at a time, so a sum of four, divided, takes four passes over the result; and where several
processes share a GPU, each pass of one holds up the others. Here all terms of a number are added in registers: each is
read once, and the sum is written once. Kernels for all numbers of terms are compiled when memory on a GPU is first
shared (`prepare`), by the compiler that comes with torch for CUDA (nvrtc). Where there is none, torch's passes do.

Each number is made by the operations that torch's passes would do, in their order: a product with a factor and the sum
after it are one operation there (fma), and dividing by a number is a product with its inverse. So ranks that differ in
whether they have the compiler make the same bits.
"""

from __future__ import annotations

import ctypes
import glob
import os
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from offbeat.live.memory.device import call_driver

MOST = 12  # terms of a sum: all are read before the first is added, and registers are few
THREADS = 256
Term = Sequence[tuple[Tensor, float]]  # one member's: tensors with what each counts

_TYPES = {torch.float32: "float", torch.float64: "double"}
_SOURCE = """
struct Terms { const T* place[MOST]; T factor[MOST]; int ends[MOST]; };

template <int W> struct alignas(W * sizeof(T)) Few { T lane[W]; };

__device__ T fused(T a, T b, T c) { return sizeof(T) == 4 ? (T)fmaf(a, b, c) : (T)fma(a, b, c); }

// W numbers of a sum of N terms: members' one after the other, each member's own added up first.
template <int N, int W> __device__ Few<W> sum_at(const Terms& t, long long i) {
  Few<W> read[N], total, own;
  #pragma unroll
  for (int k = 0; k < N; ++k) read[k] = reinterpret_cast<const Few<W>*>(t.place[k])[i];
  bool first = true, begins = true;
  #pragma unroll
  for (int k = 0; k < N; ++k) {
    T f = t.factor[k];
    bool ends = t.ends[k];
    #pragma unroll
    for (int w = 0; w < W; ++w) {
      T v = read[k].lane[w];
      if (begins && ends && !first) total.lane[w] = fused(f, v, total.lane[w]);
      else {
        own.lane[w] = begins ? f * v : fused(f, v, own.lane[w]);
        if (ends) total.lane[w] = first ? own.lane[w] : total.lane[w] + own.lane[w];
      }
    }
    begins = ends;
    first = first && !ends;
  }
  return total;
}

template <int N, int W> __device__ void add(T* out, long long from, long long to, T inverse, const Terms& t) {
  long long stride = (long long)gridDim.x * blockDim.x;
  for (long long i = from + (long long)blockIdx.x * blockDim.x + threadIdx.x; i < to; i += stride) {
    Few<W> total = sum_at<N, W>(t, i);
    #pragma unroll
    for (int w = 0; w < W; ++w) total.lane[w] *= inverse;
    reinterpret_cast<Few<W>*>(out)[i] = total;
  }
}

// At places that begin at whole words of 16 bytes, several numbers at a time.
template <int N> __device__ void add_all(T* out, long long n, T inverse, int aligned, const Terms& t) {
  const int W = 16 / sizeof(T);
  long long words = aligned ? n / W : 0;
  add<N, W>(out, 0, words, inverse, t);
  add<N, 1>(out, words * W, n, inverse, t);
}
"""
_ENTRY = """
extern "C" __global__ void add_{n}(T* out, long long n, T inverse, int aligned, Terms t) {{
  add_all<{n}>(out, n, inverse, aligned, t);
}}
"""


def add_in_one_pass(out: Tensor, terms: Sequence[Term], divisor: float, lo: int, hi: int) -> bool:
    """Let ``out[lo:hi]`` be the sum of all members' terms, divided once. False: that has to be done otherwise."""
    flat = [(tensor, factor, k + 1 == len(term)) for term in terms for k, (tensor, factor) in enumerate(term)]
    kind = out.dtype
    alike = all(t.dtype == kind and t.device == out.device and t.is_contiguous() for t, _, _ in flat)
    if len(flat) > MOST or kind not in _TYPES or not alike or not out.is_contiguous():
        return False
    if len(flat) < 3 and divisor == 1:  # torch needs one pass, too
        return False
    with torch.cuda.device(out.device):
        kernels = _compiled(kind, out.device.index)
        if kernels is None or hi <= lo:
            return kernels is not None
        number = ctypes.c_float if kind == torch.float32 else ctypes.c_double
        given, at, into = _terms(number)(), lo * out.element_size(), out.data_ptr() + lo * out.element_size()
        for k, (tensor, factor, ends) in enumerate(flat):
            given.place[k], given.factor[k], given.ends[k] = tensor.data_ptr() + at, factor, ends
        aligned = not any(place % 16 for place in (into, *given.place[: len(flat)]))
        inverse = float(torch.ones((), dtype=kind) / divisor)
        length, words = ctypes.c_longlong(hi - lo), ctypes.c_int(aligned)
        kernels.launch(
            f"add_{len(flat)}", (hi - lo) // 4, (ctypes.c_void_p(into), length, number(inverse), words, given)
        )
    return True


@lru_cache(maxsize=2)
def _terms(number: Any) -> Any:
    fields = [("place", ctypes.c_uint64 * MOST), ("factor", number * MOST), ("ends", ctypes.c_int * MOST)]
    return type("Terms", (ctypes.Structure,), {"_fields_": fields})


class Kernels:
    """Compiled kernels, in the context of one GPU."""

    def __init__(self, source: str, names: Sequence[str], device: int) -> None:
        major, minor = torch.cuda.get_device_capability(device)
        code, module = compiled(source, f"sm_{major}{minor}"), ctypes.c_void_p()
        call_driver("cuModuleLoadData", ctypes.byref(module), code)
        self._functions = {name: ctypes.c_void_p() for name in names}
        for name, function in self._functions.items():
            call_driver("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
        self._blocks = 16 * torch.cuda.get_device_properties(device).multi_processor_count

    def launch(self, name: str, threads: int, arguments: Sequence[Any]) -> None:
        """On torch's current stream, behind what has been asked for there."""
        blocks = max(1, min(-(-threads // THREADS), self._blocks))
        places = (ctypes.c_void_p * len(arguments))(*[ctypes.addressof(a) for a in arguments])
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        call_driver("cuLaunchKernel", self._functions[name], blocks, 1, 1, THREADS, 1, 1, 0, stream, places, None)


def prepare(device: torch.device, kinds: Iterable[torch.dtype]) -> None:
    """Compile what sums of these kinds need, before a step has to wait for it."""
    with torch.cuda.device(device):
        torch.cuda.init()  # the driver's calls need the context that torch makes
        for kind in set(kinds) & set(_TYPES):
            _compiled(kind, torch.cuda.current_device())


@lru_cache(maxsize=32)
def _compiled(kind: torch.dtype, device: int) -> Kernels | None:
    counts = range(1, MOST + 1)
    source = f"#define T {_TYPES[kind]}\n#define MOST {MOST}\n{_SOURCE}" + "".join(_ENTRY.format(n=n) for n in counts)
    try:
        return Kernels(source, [f"add_{n}" for n in counts], device)
    except (OSError, AttributeError):
        return None


def compiled(source: str, arch: str) -> bytes:
    """What a GPU of this kind runs. Raises OSError where there is no compiler, or with what it says."""
    nvrtc, program, size = _nvrtc(), ctypes.c_void_p(), ctypes.c_size_t()

    def call(name: str, *args: Any) -> None:
        if result := getattr(nvrtc, name)(*args):
            raise OSError(f"{name}: error {result}")

    call("nvrtcCreateProgram", ctypes.byref(program), source.encode(), b"offbeat.cu", 0, None, None)
    try:
        options = (ctypes.c_char_p * 1)(f"--gpu-architecture={arch}".encode())
        call("nvrtcCompileProgram", program, 1, options)
        call("nvrtcGetCUBINSize", program, ctypes.byref(size))
        code = ctypes.create_string_buffer(size.value)
        call("nvrtcGetCUBIN", program, code)
        return code.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _nvrtc() -> Any:
    """The compiler's library: where the system finds it, or among the packages beside torch."""
    name = f"libnvrtc.so.{(torch.version.cuda or '').split('.')[0]}"
    packages = os.path.dirname(os.path.dirname(torch.__file__))
    for path in [name, *glob.glob(os.path.join(packages, "nvidia", "*", "lib", name))]:
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    raise OSError(f"{name} was not found")
