"""Launching a Triton kernel again without looking at its arguments again, and zeroed memory without a fill.

Triton's own launch derives the kernel from every argument of every call (types, alignment, values of 1) and asks the
driver about every pointer. A cast launches up to two kernels of twenty arguments, a step several hundred casts, and the
GPU waits for the host: 0.13 to 0.15 ms a cast, a third of a step of 56 layers (H200, 2026-11-30). So all that a kind of
cast needs is worked out once and found again in ``Plans``; what changes from call to call is addresses.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from acceler8.kernels._triton import INTERPRETED, LAUNCH_OPTIONS

T = TypeVar("T")


class Launch:
    """A compiled kernel with its grid and every argument behind its pointers.

    ``pointers`` says what the pointers are: a dtype (the address is a multiple of 16 bytes) or a tensor that is laid
    out like those to come. ``registers`` limits those of a thread, so that more programs run at once on an NVIDIA GPU.
    Compiled for the current device.
    """

    def __init__(
        self,
        kernel: Any,
        programs: int,
        pointers: Sequence[Tensor | torch.dtype],
        arguments: Sequence[Any],
        warps: int,
        registers: int | None = None,
    ) -> None:
        grid, options = (programs, 1, 1), {**LAUNCH_OPTIONS, "num_warps": warps}
        if registers is not None and torch.version.hip is None:
            options["maxnreg"] = registers
        self._arguments = tuple(arguments)
        self._run: Callable[..., None]
        if INTERPRETED:
            self._run = lambda *all_arguments, stream: kernel[grid](*all_arguments, **options)
        else:
            self._run = kernel.warmup(*pointers, *arguments, grid=grid, **options)[grid]

    def __call__(self, stream: int, *addresses: Any) -> None:
        """Launch on a stream of the device for which the kernel was compiled, which must be the current one."""
        self._run(*addresses, *self._arguments, stream=stream)


def address(tensor: Tensor) -> Any:
    """What stands for ``tensor`` in a launch; the interpreter wants the tensor itself, codes as bytes."""
    if INTERPRETED:
        return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
    return tensor.data_ptr()


def alignment(tensor: Tensor) -> int:
    """What the key of a plan must hold of an address: how far it is behind a multiple of 16 bytes."""
    return tensor.data_ptr() & 15


def stream_of(device: int) -> int:
    """The current stream of a CUDA device, as launches take it (0 in the interpreter, where ``device`` is -1)."""
    return torch._C._cuda_getCurrentRawStream(device) if device >= 0 else 0


class Plans(Generic[T]):
    """What was worked out for a kind of call, by everything on which that depends."""

    MOST = 4096  # ever new shapes: forget rather than grow; a plan costs some 0.1 ms to make again

    def __init__(self) -> None:
        self._plans: dict[tuple[Any, ...], T] = {}

    def get(self, key: tuple[Any, ...], make: Callable[[], T]) -> T:
        """The plan under ``key``, made if there is none."""
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= self.MOST:
                self._plans.clear()
            plan = self._plans[key] = make()
        return plan


class _Zeros:
    """Zeroed int32 memory of one stream, handed out once, 4 MiB from one fill.

    A fill for each cast would cost 8 us on the host and 2 on the GPU. Memory that is used up goes back to PyTorch while
    kernels may still read it, as any tensor's does: PyTorch gives it out again on the same stream only.
    """

    POOL = 2**20

    def __init__(self) -> None:
        self._pools: dict[tuple[int, int], tuple[Tensor, int]] = {}
        self._lock = threading.Lock()  # backward runs in a thread of its own

    def take(self, count: int, device: int, stream: int) -> Any:
        """Address of ``count`` zeros that nobody else gets."""
        pool, start = self._take(count, device, stream)
        return pool.data_ptr() + 4 * start

    def take_tensor(self, count: int, device: int, stream: int) -> Tensor:
        """The zeros themselves, int32 [count], which keep their pool alive."""
        pool, start = self._take(count, device, stream)
        return pool[start : start + count]

    def _take(self, count: int, device: int, stream: int) -> tuple[Tensor, int]:
        pool: Tensor | None
        with self._lock:
            pool, start = self._pools.get((device, stream), (None, 0))
            if pool is None or start + count > self.POOL:
                with torch.inference_mode(False):  # views of an inference tensor could not be saved for a backward
                    pool, start = torch.zeros(max(count, self.POOL), dtype=torch.int32, device=f"cuda:{device}"), 0
            self._pools[device, stream] = pool, start + count + -count % 4
        return pool, start


_zeros = _Zeros()


def zeros(count: int, like: Tensor, device: int, stream: int) -> tuple[Any, Tensor | None]:
    """Address of ``count`` int32 zeros for launches on ``stream``, and what must be kept until they are launched.

    A captured graph fills its own zeros each time that it is replayed.
    """
    if device >= 0 and not torch.cuda.is_current_stream_capturing():
        return _zeros.take(count, device, stream), None
    filled = torch.zeros(count, dtype=torch.int32, device=like.device)
    return address(filled), filled


def zeros_tensor(count: int, like: Tensor, device: int, stream: int) -> Tensor:
    """int32 zeros [count] for a result, on ``stream``, at a multiple of 16 bytes."""
    if device >= 0 and not torch.cuda.is_current_stream_capturing():
        return _zeros.take_tensor(count, device, stream)
    return torch.zeros(count, dtype=torch.int32, device=like.device)
