"""What several processes do together: gather and reduce, wait and take turns, split inputs, raise a flag.

The names are Hugging Face Accelerate's. Every method that exchanges something must be called by every process. With one
process each gives what it would give for a group of one, and nothing is sent.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from acceler8.accelerator.dispatch import as_bytes
from acceler8.accelerator.gradients import GradientState
from acceler8.accelerator.nested import is_all_tensors, map_tensors, tensors
from acceler8.accelerator.processes import Processes
from acceler8.errors import ConfigError, ShapeError, unknown_name

REDUCTIONS = ("sum", "mean", "max", "none")
Function = Callable[..., Any]


class Collectives:
    """The part of ``Accelerator`` that talks to the other processes."""

    processes: Processes
    gradients: GradientState
    _is_triggered: bool = False

    def wait_for_everyone(self) -> None:
        """Return when every process has come here."""
        self.processes.wait()

    def gather(self, tensor: Any) -> Any:
        """Tensors of all processes, one behind the other along dim 0 in the order of the processes.

        Shape: [B, ...] in each process -> [processes * B, ...] in each; a 0-dim tensor -> [processes]. Nested lists,
            tuples and dicts keep their structure; dtypes stay. With one process: ``tensor`` itself.
        Raises: ShapeError on every rank if shapes or dtypes differ between processes; TypeError for what is no tensor.
        """
        map_tensors(lambda t: t, tensor, needed_by="gather")
        if self.processes.num_processes == 1:
            return tensor
        self._check_same_shapes(tensor)
        return map_tensors(self._gather_one, tensor)

    def _gather_one(self, tensor: Tensor) -> Tensor:
        count = self.processes.num_processes
        own = (tensor.detach()[None] if tensor.ndim == 0 else tensor.detach()).contiguous()
        parts = [torch.empty_like(own) for _ in range(count)]
        if own.numel():
            dist.all_gather([as_bytes(part) for part in parts], as_bytes(own))
        return torch.cat(parts)

    def _check_same_shapes(self, data: Any) -> None:
        own = [(tuple(t.shape), str(t.dtype)) for t in tensors(data)]
        code = zlib.crc32(repr(own).encode())
        both = torch.tensor([code, -code], device=self.processes.device)
        dist.all_reduce(both, dist.ReduceOp.MAX)
        largest, smallest = both.tolist()
        if largest != -smallest:
            raise ShapeError(
                f"gather got {own} in process {self.processes.process_index}, and something else in another; allowed:"
                " one shape and dtype everywhere; call pad_across_processes first, or use even_batches=True"
            )

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """``gather``, and behind the last batch of a loader without the copies that completed it.

        What is not all tensors is gathered as objects: lists of all processes become one list. ``use_gather_object``
        does so with tensors too, which may then differ in shape.
        """
        as_objects = use_gather_object or not is_all_tensors(input_data)
        data = self._gather_objects(input_data) if as_objects else self.gather(input_data)
        place = self.gradients.innermost
        if place is None or not place.is_last or place.remainder < 1:
            return data
        real = slice(place.remainder)
        if as_objects:
            return data[real] if isinstance(data, list | tuple | Tensor) else data
        return map_tensors(lambda t: t[real] if t.ndim else t, data)

    def _gather_objects(self, data: Any) -> Any:
        if self.processes.num_processes == 1:
            return data
        parts: list[Any] = [None] * self.processes.num_processes
        dist.all_gather_object(parts, data)
        return [x for part in parts for x in part] if isinstance(data, list | tuple) else parts

    def _of_first_process(self, data: Any) -> Any:
        """The object that the first process has, in all of them."""
        if self.processes.num_processes == 1:
            return data
        box, device = [data], self.processes.device
        dist.broadcast_object_list(box, 0, device=device if device.type == "cuda" else None)
        return box[0]

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Tensors of all processes added up (``sum``), averaged (``mean``) or their largest (``max``), elementwise.

        A copy, of the same shape in each process; ``mean`` of integers is floating; ``none`` adds up too, as in
        Accelerate. Nested as in ``gather``.
        Raises: ConfigError for another word, and for a ``scale``, which Accelerate applies on TPUs only.
        """
        if reduction not in REDUCTIONS:
            raise ConfigError(unknown_name("reduction", reduction, REDUCTIONS))
        if scale != 1.0:
            raise ConfigError(f"reduce got scale={scale}; allowed: 1.0; multiply what it returns")
        return map_tensors(lambda t: self._reduce_one(t, reduction), tensor, needed_by="reduce")

    def _reduce_one(self, tensor: Tensor, reduction: str) -> Tensor:
        out = (tensor.long() if tensor.dtype is torch.bool else tensor.detach()).clone(
            memory_format=torch.contiguous_format
        )
        if self.processes.num_processes > 1:
            dist.all_reduce(out, dist.ReduceOp.MAX if reduction == "max" else dist.ReduceOp.SUM)
        if reduction == "max" and tensor.dtype is torch.bool:
            return out.bool()
        return out / self.processes.num_processes if reduction == "mean" else out

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
        """Fill tensors along ``dim`` with ``pad_index`` up to the longest of all processes, as ``gather`` needs them.

        Behind what is there, or in front of it (``pad_first``). A tensor without that dim stays as it is.
        """
        map_tensors(lambda t: t, tensor, needed_by="pad_across_processes")
        found = [t for t in tensors(tensor) if -t.ndim <= dim < t.ndim]
        if self.processes.num_processes == 1 or not found:
            return tensor
        sizes = torch.tensor([t.shape[dim] for t in found], device=self.processes.device)
        dist.all_reduce(sizes, dist.ReduceOp.MAX)
        longest = iter(sizes.tolist())

        def pad(t: Tensor) -> Tensor:
            if not -t.ndim <= dim < t.ndim or (missing := next(longest) - t.shape[dim]) == 0:
                return t
            shape = list(t.shape)
            shape[dim] = missing
            filler = t.new_full(shape, pad_index)
            return torch.cat([filler, t] if pad_first else [t, filler], dim)

        return map_tensors(pad, tensor)

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Inside, this process's share of ``inputs``: a list, tuple, tensor, dict of these of one length, or dataset.

        The first processes get one more where it does not divide; with ``apply_padding`` the others repeat the last
        element of ``inputs``. Nothing is sent: every process has all inputs.
        Raises: ConfigError for a dict whose values differ in length.
        """
        if self.processes.num_processes == 1:
            yield inputs
            return
        lengths = {len(value) for value in inputs.values()} if isinstance(inputs, Mapping) else {len(inputs)}
        if len(lengths) != 1:
            raise ConfigError(f"split_between_processes got a dict of lengths {sorted(lengths)}; allowed: one length")
        share, extra = divmod(lengths.pop(), self.processes.num_processes)
        index = self.processes.process_index
        start = share * index + min(index, extra)
        stop = start + share + (index < extra)
        missing = share + bool(extra) - (stop - start) if apply_padding else 0
        yield self._share(inputs, slice(start, stop), missing)

    def _share(self, inputs: Any, mine: slice, missing: int) -> Any:
        if isinstance(inputs, Mapping):
            return {key: self._share(value, mine, missing) for key, value in inputs.items()}
        if isinstance(inputs, Tensor):
            part = inputs[mine]
            return torch.cat([part, inputs[-1:].expand(missing, *inputs.shape[1:])]) if missing else part
        if isinstance(inputs, list | tuple):
            share = [*inputs[mine], *[inputs[-1]] * missing]
            return share if isinstance(inputs, list) else tuple(share)
        if hasattr(inputs, "select"):  # Hugging Face datasets
            return inputs.select([*range(mine.start, mine.stop), *[len(inputs) - 1] * missing])
        return inputs

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """The main process runs the block first; the others when it is done."""
        with self._first(self.processes.process_index == 0):
            yield

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """The first process of each machine runs the block first; the others when all of those are done."""
        with self._first(self.processes.local_process_index == 0):
            yield

    @contextmanager
    def _first(self, is_first: bool) -> Iterator[None]:
        if not is_first:
            self.processes.wait()
        try:
            yield
        finally:
            if is_first:  # also when it failed: the others must not wait for ever
                self.processes.wait()

    def on_main_process(self, function: Function) -> Function:
        """Decorator: run in the main process only; elsewhere the call returns None."""
        return _only_if(lambda: self.processes.process_index == 0, function)

    def on_local_main_process(self, function: Function) -> Function:
        """Decorator: run in the first process of each machine only."""
        return _only_if(lambda: self.processes.local_process_index == 0, function)

    def on_last_process(self, function: Function) -> Function:
        """Decorator: run in the process with the highest number only."""
        return _only_if(lambda: self.processes.process_index == self.processes.num_processes - 1, function)

    def on_process(self, function: Function | None = None, process_index: int | None = None) -> Function:
        """Decorator: run in process ``process_index`` only."""
        return _chosen(function, "process_index", process_index, lambda: self.processes.process_index)

    def on_local_process(self, function: Function | None = None, local_process_index: int | None = None) -> Function:
        """Decorator: run in process ``local_process_index`` of each machine only."""
        return _chosen(function, "local_process_index", local_process_index, lambda: self.processes.local_process_index)

    def set_trigger(self) -> None:
        """Raise this process's flag; ``check_trigger`` tells all."""
        self._is_triggered = True

    def check_trigger(self) -> bool:
        """True in every process if one raised its flag since the last time it was True; lowers all flags then."""
        flag = torch.tensor([int(self._is_triggered)], device=self.processes.device)
        if self.processes.num_processes > 1:
            dist.all_reduce(flag, dist.ReduceOp.MAX)
        if not flag.item():
            return False
        self._is_triggered = False
        return True


def _only_if(is_here: Callable[[], bool], function: Function) -> Function:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) if is_here() else None

    return run


def _chosen(function: Function | None, name: str, wanted: int | None, here: Callable[[], int]) -> Function:
    if wanted is None:
        raise ConfigError(f"got {name}=None; allowed: the number of a process; pass {name}=")
    if function is None:
        return lambda decorated: _only_if(lambda: here() == wanted, decorated)
    return _only_if(lambda: here() == wanted, function)
