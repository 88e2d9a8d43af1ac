"""What optimizers with state in few bits share: formats by group, state, saving and loading, a summary.

A subclass names its moments and updates rows of tensors; this class finds out in which formats each parameter's moments
and master weights are, makes them when a parameter first has a gradient, and hands the subclass plain local tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from acceler8.errors import DtypeError, HardwareError, ShapeError
from acceler8.formats import E4M3_BLOCK, FP16_POW2, decode_blocks
from acceler8.nn.gradients import StoredGradient, drop_gradients, settle_gradients, stored_gradient
from acceler8.optim import saving
from acceler8.optim.formats import StateFormats, check_group, check_parameter, formats_of, with_formats
from acceler8.optim.settle import entries_of, is_settled, settle, stored_formats
from acceler8.optim.state import Moment, local, new_master, new_moment, read_master, shard, write_blocks
from acceler8.optim.summary import StateSummary, summarise

_GRADIENTS = (torch.float32, torch.bfloat16, torch.float16)


class _Known(NamedTuple):
    """What is known of a parameter, as long as it has that dtype and contiguity. formats: those that state is made in.

    number: its place among all parameters.
    """

    dtype: torch.dtype
    is_contiguous: bool
    formats: StateFormats
    entries: dict[str, torch.dtype]
    number: int


class StateFormatsOptimizer(Optimizer):
    """Base of optimizers whose moments and master weights are in formats of choice, by parameter group.

    A subclass sets ``MOMENTS`` and implements ``update(device, rows)``; ``docs/optimizers.md`` has one of 20 lines.
    Options of a group, beside the subclass's own, all of which may change between groups:
        ``<moment>_format``: "fp32", "bf16", "fp16", "fp8".
        ``master``: "none", "stochastic", "fp32", "bf16_remainder", "fp16"; a float32 parameter is its own master.
        ``quantize``: "matrices" keeps vectors, embeddings and heads in FP32, "all" nothing, "none" everything, "level"
            everything but the weights that a training level stores in few bits (``acceler8.levels``).
    Gradients that are stored in FP8 are read as they are: codes, where ``READS_CODES`` says that ``update`` takes them
    (``row.grad_scale`` is then their scales), else decoded to FP32, one device's at a time.
    Raises: DtypeError or ShapeError for a format that is unknown, or that a parameter cannot have.
    """

    MOMENTS: ClassVar[tuple[Moment, ...]] = ()
    READS_CODES: ClassVar[bool] = False
    reads_stored_gradients = True

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        self._formats: dict[Tensor, _Known] = {}
        super().__init__(params, defaults)

    def update(self, device: torch.device, rows: Sequence[Row]) -> None:
        """Change parameters and state of ``rows``, all on ``device``, in place."""
        raise NotImplementedError(f"{type(self).__name__}.update(device, rows)")

    # -- groups and formats

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as torch's optimizers do; its formats default to the constructor's."""
        super().add_param_group(with_formats(param_group, self.moment_names()))
        try:
            check_group(self.param_groups[-1], self.moment_names())
        except (DtypeError, ShapeError):
            self.param_groups.pop()
            raise
        self._formats.clear()

    @classmethod
    def moment_names(cls) -> tuple[str, ...]:
        """Keys of the moments in the state."""
        return tuple(moment.name for moment in cls.MOMENTS)

    def formats_of(self, p: Tensor) -> StateFormats:
        """Formats of one parameter's state as it is stored, or will be, and why they are not what its group asks for.

        Raises: DtypeError for a state of tensors that no format has.
        """
        wanted, state = self.wanted_formats(p), self.state.get(p)
        return stored_formats(p, state, self.MOMENTS, wanted) if state and "step" in state else wanted

    def wanted_formats(self, p: Tensor) -> StateFormats:
        """Formats in which state of ``p`` is made or loaded now: its group's, as far as the parameter can have them."""
        return self._known(p, shard(p).is_contiguous()).formats

    def _known(self, p: Tensor, is_contiguous: bool) -> _Known:
        known = self._formats.get(p)
        # a model may be cast or laid out anew between this and its next step
        if known is None or known.dtype is not p.dtype or known.is_contiguous is not is_contiguous:
            self._find_formats()
            known = self._formats[p]
        return known

    def _find_formats(self) -> None:
        self._formats.clear()  # nothing of a parameter that left its group stays
        for group in self.param_groups:
            names = group.get("param_names") or [None] * len(group["params"])
            for p, name in zip(group["params"], names, strict=True):
                check_parameter(p, group["master"])  # again, for a model may have been cast
                wanted = formats_of(p, group, self.moment_names(), name)
                self._formats[p] = _Known(
                    p.dtype, shard(p).is_contiguous(), wanted, entries_of(self.MOMENTS, wanted), len(self._formats)
                )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._formats = {}

    # -- a step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient. Returns what ``closure`` did.

        State follows its parameter's memory order and device, if they changed since the last step.
        Raises: DtypeError or ShapeError for a gradient that is sparse or of another dtype than 16 or 32 bit floats, and
            for a parameter cast to a dtype that its master cannot have. HardwareError for a gradient on another device,
            and for state or parameter alone on "meta".
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update_all()
        return loss

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _update_all(self) -> None:
        by_device: dict[torch.device, list[Row]] = {}
        changed: list[Tensor] = []
        used: list[StoredGradient] = []
        for index, group in enumerate(self.param_groups):
            for p in group["params"]:
                grad, store = p.grad, stored_gradient(p)
                if store is not None and store.stores:
                    grad = _codes_of(p, store)
                    used.append(store)
                if grad is None:
                    continue
                row = self._row(p, grad, index, None if grad is p.grad or store is None else store.scale_inv)
                by_device.setdefault(row.param.device, []).append(row)
                changed.append(row.param)
        for device, rows in by_device.items():
            self.update(device, rows)
        for store in used:
            store.is_used = True
        if changed:  # kernels change memory behind autograd's back, which must know that saved weights are not as saved
            torch.autograd.graph.increment_version(changed)

    def _row(self, p: Tensor, grad: Tensor, group: int, grad_scale: Tensor | None = None) -> Row:
        param = shard(p)
        is_contiguous = param.is_contiguous()
        if not is_contiguous and not _has_no_gaps(param):
            raise ShapeError(
                f"a parameter of shape {list(p.shape)} has strides {list(param.stride())}; allowed: memory without gaps"
                " or overlaps, in any order; make it p.contiguous() before the optimizer is built"
            )
        known = self._known(p, is_contiguous)
        if grad_scale is None:
            grad = _gradient(p, grad, param)
        elif grad.device != param.device or grad.shape != param.shape or not is_contiguous:
            raise _moved(p, grad, param)
        elif not self.READS_CODES:
            grad, grad_scale = decode_blocks(grad, grad_scale, E4M3_BLOCK), None
        state, formats = self.state[p], known.formats
        if "step" not in state:
            self._make_state(p, state, formats)
        elif not is_settled(param, state, known.entries):
            formats = settle(p, state, self.MOMENTS, formats)
        return Row(p, param, grad, state, formats, group, known.number, grad_scale)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, those that are stored in FP8 too."""
        super().zero_grad(set_to_none)
        drop_gradients(p for group in self.param_groups for p in group["params"])

    def _make_state(self, p: Tensor, state: dict[str, Any], formats: StateFormats) -> None:
        state["step"] = torch.zeros((), device=local(p).device)
        for moment, fmt in zip(self.MOMENTS, formats.moments, strict=True):
            state.update(new_moment(p, moment, fmt))
        state.update(new_master(p, formats.master))

    # -- master weights

    @torch.no_grad()
    def sync_masters(self) -> None:
        """Make every master weight what its parameter holds now: after weights were loaded or replaced by hand.

        A master outlives such a change, and the next step would bring the weights of before back. A BF16 remainder
        becomes 0; "none" and "stochastic" have nothing to do.
        """
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state.get(p, {})
                if "master_scale" in state:
                    write_blocks(local(p), state["master"], state["master_scale"], FP16_POW2)
                elif "master" in state:
                    master = local(state["master"])
                    master.zero_() if master.dtype is torch.int16 else master.copy_(local(p))

    def master_weights(self) -> dict[Tensor, Tensor]:
        """The FP32 weight that is updated, for each parameter; its shards, where it is a DTensor. Copies."""
        return {p: read_master(p, self.state.get(p, {})) for group in self.param_groups for p in group["params"]}

    # -- saving and loading

    def export_state_dict(self) -> dict[str, Any]:
        """``state_dict()`` with FP32 moments, as torch's optimizer of the same kind loads it. Copies.

        Without master weights, which torch's has none of: ``master_weights()`` has them.
        """
        return saving.export(self)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load native codes, bit for bit, or torch's FP32 or BF16 moments, or other formats through FP32.

        Learning rates and the like are as saved; formats stay this optimizer's own, whatever was saved. Master weights
        that are not in the state are made from the parameters at the next step. Changes nothing if it raises.
        Raises: CheckpointError naming the optimizer whose state it is, if it is not this one's; for other shapes; for a
            remainder without its format. ValueError for other groups, as torch's optimizers do.
        """
        loaded: dict[str, Any] = dict(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            loaded = hook(self, loaded) or loaded
        state, groups = saving.convert(self, loaded)
        self.__setstate__({"state": state, "param_groups": groups})
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    # -- what it costs

    def summary(self) -> StateSummary:
        """Parameters, formats, blocks and bytes of each group, in a table when printed. Needs no step before."""
        return summarise(self)


class Row:
    """One parameter of a step: local, plain tensors in one memory order.

    number: its place among all parameters, which seeds its random bits. grad_scale: scales of a gradient that is codes.
    """

    __slots__ = ("formats", "grad", "grad_scale", "group", "number", "owner", "param", "state")

    def __init__(
        self,
        owner: Tensor,
        param: Tensor,
        grad: Tensor,
        state: dict[str, Any],
        formats: StateFormats,
        group: int,
        number: int,
        grad_scale: Tensor | None = None,
    ) -> None:
        self.owner, self.param, self.grad, self.state = owner, param, grad, state
        self.formats, self.group, self.number, self.grad_scale = formats, group, number, grad_scale


def _codes_of(p: Tensor, store: StoredGradient) -> Tensor | None:
    """The codes that a step reads; what still adds up in a window becomes some first."""
    if p.grad is not None:
        settle_gradients([p])
    return store.codes


def _moved(p: Tensor, codes: Tensor, param: Tensor) -> HardwareError | ShapeError:
    """A parameter that is no longer what its codes were made of."""
    if codes.device != param.device:
        return HardwareError(
            f"the FP8 gradient of a parameter of shape {list(p.shape)} is on {codes.device}; allowed: {param.device},"
            " where the parameter is; move a model between two steps, after zero_grad()"
        )
    return ShapeError(
        f"the FP8 gradient of a parameter of shape {list(p.shape)} has shape {list(codes.shape)}; allowed: that of the"
        " parameter, contiguous; call zero_grad() before its shape or memory order changes"
    )


def _has_no_gaps(tensor: Tensor) -> bool:
    """True if each element of its span of memory is one of its own, in whatever order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _gradient(p: Tensor, grad: Tensor, param: Tensor) -> Tensor:
    """This rank's part of the gradient, laid out as the local parameter."""
    if grad.device != param.device:
        raise HardwareError(
            f"the gradient of a parameter of shape {list(p.shape)} is on {grad.device}; allowed: {param.device}, where"
            " the parameter is; move models by model.to(...), which takes gradients along, or zero_grad() first"
        )
    if type(grad) is Tensor and grad.layout is torch.strided and grad.dtype in _GRADIENTS:
        if grad.is_contiguous() and param.is_contiguous():  # all of them, mostly: a step of 300 is the host's time
            return grad
    elif isinstance(grad, DTensor):
        if isinstance(p, DTensor) and grad.placements != p.placements:
            grad = grad.redistribute(placements=p.placements)
        grad = grad._local_tensor
    if isinstance(grad, AsyncCollectiveTensor):
        grad = grad.wait()
    if grad.layout is not torch.strided:
        raise ShapeError(
            f"the gradient of a parameter of shape {list(p.shape)} has layout {grad.layout}; allowed: torch.strided;"
            " build the embedding with sparse=False, or use torch.optim.SparseAdam for it"
        )
    if grad.dtype not in _GRADIENTS:
        raise DtypeError(f"a gradient is {grad.dtype}; allowed: float32, bfloat16, float16")
    if grad.stride() != param.stride():
        grad = torch.empty_like(param, dtype=grad.dtype).copy_(grad)
    return grad
