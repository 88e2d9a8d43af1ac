"""Bytes that one process sends in collectives, counted from the operators that PyTorch dispatches.

Counted are the operators of ``c10d``, so it does not matter whether a library, DistributedDataParallel or FSDP2 called
them, nor over NCCL or Gloo. What travels is what a ring sends, the least that each of P processes must, for N bytes:

    all-gather, reduce-scatter, all-to-all, broadcast    N (P - 1) / P
    all-reduce                                         2 N (P - 1) / P

N is the whole: what an all-gather's result and a reduce-scatter's input have.
Source: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, 2009.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# operator of c10d -> (kind, which argument is the whole, rings)
_OPERATORS = {
    "allreduce_": ("all_reduce", 0, 2),
    "allreduce_coalesced_": ("all_reduce", 0, 2),
    "_allgather_base_": ("all_gather", 0, 1),
    "allgather_": ("all_gather", 0, 1),
    "allgather_coalesced_": ("all_gather", 0, 1),
    "allgather_into_tensor_coalesced_": ("all_gather", 0, 1),
    "_reduce_scatter_base_": ("reduce_scatter", 1, 1),
    "reduce_scatter_": ("reduce_scatter", 1, 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1, 1),
    "alltoall_": ("all_to_all", 1, 1),
    "alltoall_base_": ("all_to_all", 1, 1),
    "broadcast_": ("broadcast", 0, 1),
}


class CountBytes(TorchDispatchMode):
    """Inside, ``sent`` counts: kind of collective -> bytes that this process sends.

    Takes DDP's and FSDP2's collectives in backward too. Functional collectives, which compiled code calls, count by
    the operators that they stand for. Barriers count nothing.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sent: Counter[str] = Counter()
        self.dtypes: Counter[tuple[str, torch.dtype]] = Counter()
        """The same by kind and dtype."""

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Count, then run as always."""
        namespace, _, name = func.name().partition("::")
        if namespace == "c10d":
            found = _OPERATORS.get(name.partition(".")[0])
            if found is not None:
                self._note(*found, args)
        elif namespace == "_c10d_functional":
            self._note_functional(name.partition(".")[0], args)
        return func(*args, **(kwargs or {}))

    def _note(self, kind: str, whole: int, rings: int, args: tuple[Any, ...]) -> None:
        processes = _size(next((a for a in args if _is_group(a)), None))
        for tensor in tree_leaves(args[whole]):
            if isinstance(tensor, Tensor):
                self._add(kind, tensor.numel() * rings * (processes - 1) / processes, tensor)

    def _note_functional(self, name: str, args: tuple[Any, ...]) -> None:
        kinds = {"all_reduce": ("all_reduce", 2), "all_gather_into_tensor": ("all_gather", 1)}
        kinds |= {"reduce_scatter_tensor": ("reduce_scatter", 1), "all_to_all_single": ("all_to_all", 1)}
        kinds |= {"broadcast": ("broadcast", 1)}
        kind, rings = kinds.get(name.rstrip("_").removesuffix("_coalesced"), ("", 0))
        if not rings:
            return
        processes = _size(args[-1])
        for tensor in tree_leaves(args[0]):
            if isinstance(tensor, Tensor):
                whole = tensor.numel() * (processes if kind == "all_gather" else 1)
                self._add(kind, whole * rings * (processes - 1) / processes, tensor)

    def _add(self, kind: str, elements: float, tensor: Tensor) -> None:
        sent = round(elements * tensor.element_size())
        self.sent[kind] += sent
        self.dtypes[kind, tensor.dtype] += sent


def bytes_sent(work: Callable[[], object]) -> dict[str, int]:
    """Run ``work`` once; kind of collective -> bytes that this process sent in it. Every process calls it."""
    with CountBytes() as counted:
        work()
    return dict(counted.sent)


def _is_group(value: Any) -> bool:
    return isinstance(value, ProcessGroup) or (isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value))


def _size(group: Any) -> int:
    """Processes of a group, boxed or named as operators get it; None: all."""
    if group is None:
        return torch.distributed.get_world_size()
    if isinstance(group, str):
        by_name: Any = distributed_c10d
        group = by_name._resolve_process_group(group)
    if not isinstance(group, ProcessGroup):
        unbox: Any = ProcessGroup
        group = unbox.unbox(group)
    return int(group.size())
