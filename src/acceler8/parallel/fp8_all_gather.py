"""FSDP2's all-gather in FP8: cast the shard, send its codes, multiply what arrives.

FSDP2 gathers each weight twice a step, in forward and for backward, in 2 or 4 bytes an element; the layer then casts
it to FP8 on every rank. Here each rank casts its own shard before it travels: one byte an element, and 1/ranks of the
casting. The codes are those of the whole weight, bit for bit, because a cast is elementwise once its scale is known,
and a scale needs only the amax of its group. The amaxes of all weights lie in one flat vector, which one MAX
all-reduce completes in front of a forward of the root module. Weights may change unnoticed between any two forwards
(fused optimizers and edits through ``.data`` are not counted), so each forward does that, but for two: a later
micro-batch behind one whose gradients are not exchanged yet, for its step is still to come; and an evaluation in high
precision, which reads no codes. They travel as integers: the bits of a non-negative
FP32 are ordered as their values are, with NaN on top, while an FP32 MAX may lose a NaN.

Weights whose scale spans the tensor need one set of codes, since dgrad's are the same ones transposed. Row scales
cannot be transposed: codes by row and codes by column both travel, two bytes an element.

How FSDP2 is told: ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather`` are set on the plain local tensor of the sharded
parameter (it looks for them with ``hasattr``; a tensor subclass would do too, and would meet every other operation as
well). They send and receive bytes, which every process group takes. The unsharded parameter that FSDP2 builds is a
float8 view of what arrived; ``functional.linear`` gives its gradient the dtype of the weight. FSDP2 frees and refills
its storage, so codes live as long as FSDP2 keeps a weight unsharded.

Never stale: codes are cast at each gather, from the shard as it then is. A shard whose amax is no longer the one that
its scale was made from (it changed behind the last forward, and ``unshard()`` was called by hand) sends NaN: in its
first row, or in the rows or columns concerned.

``torch.compile`` leaves these layers out, each a graph break: AOTAutograd does not know ``grad_dtype`` and would round
the weight's gradient to FP8 (torch 2.13).

Source: PyTorch FSDP2 all-gather extensions, pytorch#122908, #136130 (attributes on a plain tensor), #137005 (uneven
shards), #162815 (``grad_dtype``); torchao's float8 all-gather.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional as F

from acceler8.errors import PlanError, VerifyError
from acceler8.formats import FORMATS, Format, encode
from acceler8.functional import WeightCodes
from acceler8.kernels import Quantized, compute_amax, quantize, transpose_bytes
from acceler8.nn import Fp8Linear, fp8_layers, state_of
from acceler8.parallel.fsdp2_reshard import reshard_without_backward
from acceler8.recipes import Recipe
from acceler8.scaling import ROWWISE, TENSORWISE, Granularity, compute_scale

# dims that an amax runs over, for each set of codes that travels: None all, 1 along rows, 0 along columns
_CASTS: dict[Granularity, tuple[int | None, ...]] = {TENSORWISE: (None,), ROWWISE: (1, 0)}
_NAN = 0x7F  # in E4M3 and E5M2
_FP8_DTYPES = tuple(fmt.torch_dtype for fmt in FORMATS.values())


class GatheredCodes(WeightCodes):
    """Codes of one weight that arrive by all-gather, in the weight's place."""

    def __init__(self, name: str, sharded: DTensor, on_change: Callable[[], None]) -> None:
        super().__init__()
        self.name, self.sharded, self._on_change = name, sharded, on_change
        self._arrived: tuple[Quantized, ...] = ()
        self._dtype = sharded.dtype

    def arrive(self, codes: tuple[Quantized, ...], dtype: torch.dtype) -> None:
        """Take the codes of a gather: by rows, and by columns where those are not the transposed ones."""
        self._arrived, self._dtype = codes, dtype

    def dtype_of(self, weight: Tensor) -> torch.dtype:
        """The dtype that FSDP2 would have gathered. Raises: VerifyError if it did gather that, and no codes."""
        if weight.dtype not in _FP8_DTYPES:
            raise VerifyError(
                f"{self.name}.weight arrived in {weight.dtype}; allowed: FP8 codes; FSDP2 replaced the parameter after"
                " the root module's forward began: run that forward again, or call refresh() on what gather_in_fp8 gave"
            )
        return self._dtype

    def drop(self) -> None:
        """A step boundary, or weights were loaded: their scales may be others."""
        super().drop()
        self._on_change()

    def follow(self, *weights: Tensor) -> None:
        """Nothing to drop: each gather brings codes of the weight as it then is."""

    def get(self, orientation: str) -> Quantized:
        """The gathered codes; ``cols`` are those of the transposed weight, a copy that its caller owns."""
        if orientation == "rows":
            return self._arrived[0]
        codes, scale_inv, granularity = self._arrived[-1]
        transposed = transpose_bytes(codes)
        return Quantized(transposed, scale_inv.t() if scale_inv.ndim else scale_inv, granularity)

    def in_high_precision(self, weight: Tensor) -> Tensor:
        """The weight itself, gathered for this call. Raises: VerifyError if a gradient would have to flow into it."""
        if torch.is_grad_enabled() and weight.requires_grad:
            raise VerifyError(
                f"{self.name} computes in high precision (eval mode) with gradients, but its weight is gathered in FP8;"
                ' allowed: under torch.no_grad(), or with the recipe\'s eval="fp8"; call model.train() to train'
            )
        return self.sharded.full_tensor().to(self._dtype)

    def source(self, weight: Tensor) -> Tensor:
        """The whole weight as it now is, in its own dtype: a gather in high precision."""
        whole: Tensor = self.sharded.full_tensor().detach()
        return whole


class _Scales(NamedTuple):
    """Of all weights, flat: the amax bits that this rank contributed, amaxes and scales of the whole weights."""

    own: Tensor
    amax: Tensor
    scale: Tensor
    scale_inv: Tensor


class _ShardedWeight:
    """One weight: its local shard, its place in the flat vector, and where its codes go."""

    def __init__(self, owner: Fp8AllGather, name: str, layer: Fp8Linear, start: int) -> None:
        self._owner, self._layer, self._start = owner, layer, start
        sharded: Any = layer.weight
        self._rows, self._cols = sharded.shape
        mesh = _shard_mesh(sharded)
        self._shard_rows = -(-self._rows // mesh.size())
        self._first = min(mesh.get_local_rank() * self._shard_rows, self._rows)
        self.codes = GatheredCodes(name, sharded, owner.forget)
        self.local: Tensor | None = None

    @property
    def size(self) -> int:
        """Places in the flat vector."""
        return sum(self._length(dim) for dim in self._owner.casts)

    @property
    def reads_codes(self) -> bool:
        """False if the layer's next forward computes in high precision."""
        return self._layer._acceler8_layer.is_fp8(self._layer.training)

    def _length(self, dim: int | None) -> int:
        return 1 if dim is None else self._rows if dim == 1 else self._cols

    def _spans(self) -> list[tuple[int | None, slice, slice]]:
        """For each cast: dim, the places of the whole weight's groups, the places of this shard's."""
        spans, at = [], self._start
        for dim in self._owner.casts:
            whole = slice(at, at + self._length(dim))
            mine = whole
            if dim == 1:  # a row lies in one shard
                assert self.local is not None
                mine = slice(at + self._first, at + self._first + self.local.shape[0])
            spans.append((dim, whole, mine))
            at = whole.stop
        return spans

    def bind(self) -> None:
        """Set the hooks on the local tensor that FSDP2 now holds: loading and moving may have replaced it."""
        sharded = self._layer.weight
        if isinstance(sharded, DTensor):  # else unsharded right now, and nothing was replaced
            self.codes.sharded = sharded
        local: Any = self.codes.sharded._local_tensor  # the very object that FSDP2 asks for the hooks
        if local is not self.local:
            local.fsdp_pre_all_gather = self._pre_all_gather
            local.fsdp_post_all_gather = self._post_all_gather
            self.local = local

    def write_amax(self, bits: Tensor) -> None:
        """Put this shard's amaxes into the flat vector; places of other shards' rows stay 0."""
        assert self.local is not None
        for dim, _, mine in self._spans():
            bits[mine] = _amax_bits(self.local, dim)

    def _pre_all_gather(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: MixedPrecisionPolicy,
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Bytes to send, each padded to the size of the first shard, and the ``scale_inv`` that belong to them."""
        assert self.local is not None
        scales = self._owner.scales
        sent, scale_inv = [], []
        for dim, whole, mine in self._spans():
            codes = self._cast_whole(mine) if dim is None else self._cast(dim, mine)
            missing = self._shard_rows - codes.shape[0]
            sent.append(F.pad(codes, (0, 0, 0, missing)) if missing else codes)
            scale_inv.append(_spread(scales.scale_inv[whole], dim))
        return tuple(sent), tuple(scale_inv)

    def _cast_whole(self, mine: slice) -> Tensor:
        """Codes of the shard, one scale for the tensor: one pass, which also finds the amax that tells it is fresh."""
        assert self.local is not None
        owner, scales = self._owner, self._owner.scales
        if not self.local.numel():
            return self.local.new_empty(self.local.shape, dtype=torch.uint8)
        found = torch.zeros(1, dtype=torch.float32, device=self.local.device)
        amax = scales.amax[mine]
        amax = torch.where(amax.isfinite(), amax, owner.fmt.max)  # scale 1, as a tensor with NaN has
        as_rows, _, _ = quantize(self.local, owner.fmt, None, TENSORWISE, pow2=owner.pow2, amax=amax, staging=found)
        assert as_rows is not None
        codes = as_rows.codes.view(torch.uint8)[:, : self._cols]
        own = scales.own[mine]
        is_fresh = (found.view(torch.int32) == own) | ~(found.isfinite() | own.view(torch.float32).isfinite())
        codes[:1] = torch.where(is_fresh, codes[:1], _NAN)
        return codes if codes.is_contiguous() else codes.contiguous()

    def _cast(self, dim: int, mine: slice) -> Tensor:
        """Codes of the shard, a scale for each row or column."""
        assert self.local is not None
        scales = self._owner.scales
        is_fresh = _amax_bits(self.local, dim) == scales.own[mine]
        scale = torch.where(is_fresh, scales.scale[mine], torch.nan)
        return encode(self.local.float() * _spread(scale, dim), self._owner.fmt).view(torch.uint8)

    def _post_all_gather(
        self,
        gathered: tuple[Tensor, ...],
        scale_inv: tuple[Tensor, ...],
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """View what arrived as codes. The first time FSDP2 makes the unsharded parameter from the first of them."""
        views = [t.view(self._owner.fmt.torch_dtype)[: self._rows] for t in gathered]
        granularity = self._owner.granularity
        arrived = tuple(Quantized(v, s, granularity) for v, s in zip(views, scale_inv, strict=True))
        self.codes.arrive(arrived, param_dtype)
        return None if out is not None else (views[0], ())


class Fp8AllGather:
    """The weights of one model that travel as codes. Made by ``gather_in_fp8``."""

    def __init__(self, layers: list[tuple[str, Fp8Linear]], recipe: Recipe, mesh: DeviceMesh) -> None:
        self.fmt, self.granularity = _weight_cast(recipe)
        self.casts = _CASTS[self.granularity]
        self.pow2, self._group = recipe.pow2_scales, mesh.get_group()  # each copy of the model has all amaxes
        self._scales: _Scales | None = None
        self._holds = False  # behind a micro-batch whose gradients wait for others, until a step or loading
        self._size = 0
        self.weights: list[_ShardedWeight] = []
        for name, layer in layers:
            self.weights.append(_ShardedWeight(self, name, layer, self._size))
            self._size += self.weights[-1].size
        for weight in self.weights:
            weight.bind()

    @property
    def scales(self) -> _Scales:
        """Scales of the weights as they were at the last ``refresh``. Raises: VerifyError before the first."""
        if self._scales is None:
            raise VerifyError(
                "FP8 weights were gathered before their scales were made; allowed: after a forward of the root module"
                " began; call refresh() on what gather_in_fp8 returned, on every rank"
            )
        return self._scales

    @torch.no_grad()
    def refresh(self) -> None:
        """Make the scales of all weights as they now are: one collective, on every rank of the mesh.

        A forward of the root module begins with it. Call it by hand to gather outside of that (``unshard()``), and for
        weights that were changed between micro-batches of one step.
        """
        for weight in self.weights:
            weight.bind()
        device = self.weights[0].codes.sharded.device
        own = torch.zeros(self._size, dtype=torch.int32, device=device)
        if self.casts == (None,):
            own.copy_(_amaxes_of([weight.local for weight in self.weights if weight.local is not None]))
        else:
            for weight in self.weights:
                weight.write_amax(own)
        bits = own.clone()
        dist.all_reduce(bits, dist.ReduceOp.MAX, group=self._group)
        amax = bits.view(torch.float32)
        self._scales = _Scales(own, amax, *compute_scale(amax, self.fmt, pow2=self.pow2))

    def forget(self) -> None:
        """Weights changed: the next forward makes scales."""
        self._holds = False

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Decided by what is the same on all ranks, for a collective hangs on it."""
        trains = torch.is_grad_enabled()
        if self._scales is not None and (self._holds or (not trains and not self._reads_codes())):
            for weight in self.weights:
                weight.bind()
        else:
            self.refresh()
        if trains:
            self._holds = not _exchanges_gradients(module)

    def _reads_codes(self) -> bool:
        return any(weight.reads_codes for weight in self.weights)

    def remove(self) -> None:
        """Not possible: FSDP2 keeps the buffers that it once made for the codes. Raises: PlanError."""
        raise PlanError(
            "the weights of this model are gathered in FP8 and FSDP2 keeps its buffers for that; allowed: to the end of"
            " the sharded model; save its state_dict and load it into a plain model instead of restore(model)"
        )


def _weight_cast(recipe: Recipe) -> tuple[Format, Granularity]:
    """Format and granularity of the weight, if fprop and dgrad read the same codes. Raises: PlanError if not."""
    fprop, dgrad = recipe.fprop.b, recipe.dgrad.b
    fmt = fprop.format
    if fmt is None or fprop != dgrad or recipe.is_delayed or fprop.granularity not in _CASTS:
        when = "delayed" if recipe.is_delayed else "current"
        raise PlanError(
            f"recipe {recipe.name!r} reads weights as {fprop} in fprop and {dgrad} in dgrad, with {when} scaling;"
            " allowed for FP8 all-gather: one format in both, tensorwise or rowwise, current scaling; leave the"
            ' all-gather in high precision, or plan with recipe="tensorwise"'
        )
    return fmt, fprop.granularity


def _shard_mesh(sharded: DTensor) -> DeviceMesh:
    """The processes that hold the shards of one copy: of a mesh of several copies the last dimension."""
    mesh = sharded.device_mesh
    return mesh if mesh.ndim == 1 else mesh[_names(mesh)[-1]]


def _names(mesh: DeviceMesh) -> tuple[str, ...]:
    assert mesh.mesh_dim_names is not None  # FSDP2 asks for them
    return mesh.mesh_dim_names


def _amax_bits(x: Tensor, dim: int | None) -> Tensor:
    """Bits of the amaxes as a flat int32 vector."""
    return compute_amax(x, dim).reshape(-1).view(torch.int32)


def _amaxes_of(tensors: list[Tensor]) -> Tensor:
    """Bits of the amax of each, 0 of an empty one: int32 [tensors], in a few launches for all."""
    filled = [t for t in tensors if t.numel()]
    norms = iter(torch._foreach_norm(filled, math.inf, dtype=torch.float32) if filled else ())
    zero = tensors[0].new_zeros((), dtype=torch.float32)
    found = torch.stack([next(norms) if t.numel() else zero for t in tensors])
    return found.abs().view(torch.int32)  # a NaN may come with a sign, whose bits are no maximum


def _exchanges_gradients(model: nn.Module) -> bool:
    """False if ``set_requires_gradient_sync(False)`` holds."""
    units = (module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule))
    return all(group.reduce_grads for unit in units for group in unit._fsdp_param_groups)


def _spread(scale: Tensor, dim: int | None) -> Tensor:
    """Scales of one cast in the shape that broadcasts against ``[rows, cols]``."""
    return scale.reshape(()) if dim is None else scale.unsqueeze(dim)


def gather_in_fp8(model: nn.Module) -> Fp8AllGather:
    """Let FSDP2 gather the weights of a converted, sharded model as FP8 codes, from the first forward on.

    ``model`` is the root that ``fully_shard`` was called on, weights sharded along dim 0 over two or more ranks (of a
    mesh of several copies, its last dimension), any number of rows. Call it once, on every rank, before the first
    forward; parameters and optimizer stay as they are. Layers that FSDP2 does not manage cast their own weights as
    before.
    Raises: PlanError if the model is not converted or not so sharded, or its recipe's weights cannot travel as codes.
    """
    state = state_of(model)
    layers = [(name, layer) for name, layer in fp8_layers(model) if isinstance(layer.weight, DTensor)]
    _check(model, layers)
    first: Any = layers[0][1]
    gather = Fp8AllGather(layers, _one_recipe(layers), _shard_mesh(first.weight))
    for (_, layer), weight in zip(layers, gather.weights, strict=True):
        own = layer._acceler8_layer
        state.codes[:] = [weight.codes if codes is own.codes else codes for codes in state.codes]
        own.codes = weight.codes
        layer.forward = torch.compiler.disable(layer.forward)  # type: ignore[method-assign]
    reshard_without_backward(model)  # an evaluation may leave codes of stale scales
    model.register_forward_pre_hook(gather._before_forward, prepend=True)  # ahead of FSDP2's own, which gathers
    state.attached.insert(0, gather)  # restore() asks it to leave, before it changes anything
    return gather


def _one_recipe(layers: list[tuple[str, Fp8Linear]]) -> Recipe:
    """The recipe by whose weight cast all layers can travel. Raises: PlanError if they differ in it."""
    name, layer = layers[0]
    first = layer._acceler8_layer.recipe
    for other, module in layers[1:]:
        own = module._acceler8_layer.recipe
        if (*_weight_cast(own), own.pow2_scales) != (*_weight_cast(first), first.pow2_scales):
            raise PlanError(
                f"{name!r} casts its weight by recipe {first.name!r} and {other!r} by {own.name!r}; allowed for FP8"
                " all-gather: one cast for all weights; plan with one recipe, or leave the all-gather in high precision"
            )
    return first


def _check(model: nn.Module, layers: list[tuple[str, Fp8Linear]]) -> None:
    if schedules := state_of(model).own_schedules():
        raise PlanError(
            f"gather_in_fp8 got a model with {schedules[0].setting}; allowed: FP8 in every step, for weights always"
            " arrive as codes; plan without it, or leave the all-gather in high precision"
        )
    if not isinstance(model, FSDPModule) or not layers:
        raise PlanError(
            f"gather_in_fp8 got a {type(model).__name__} with {len(layers)} sharded FP8 layers; allowed: the root of a"
            " model that was converted and then sharded, with one or more; call fully_shard on it first"
        )
    prepared = isinstance(layers[0][1]._acceler8_layer.codes, GatheredCodes)
    if prepared or model._get_fsdp_state()._is_root is not None:  # FSDP2 then has buffers for weights in high precision
        raise PlanError(
            f"gather_in_fp8 got a model that {'it prepared' if prepared else 'ran'} already; allowed: one call, before"
            " the first forward; call it right after fully_shard"
        )
    mesh = cast(DTensor, layers[0][1].weight).device_mesh
    for name, layer in layers:
        weight = cast(DTensor, layer.weight)
        # of an offloaded weight FSDP2 asks a copy on the device, which lacks the attributes
        is_offloaded = weight.device.type != mesh.device_type
        is_placed = weight.placements in ((Shard(0),), (Replicate(), Shard(0)))
        if weight.device_mesh != mesh or not is_placed or _shard_mesh(weight).size() < 2 or is_offloaded:
            raise PlanError(
                f"{name}.weight is on {weight.device.type}, {weight.placements} of {weight.device_mesh}; allowed for"
                " FP8 all-gather: shards along dim 0 over two or more ranks of one mesh for all weights, not offloaded;"
                " leave the all-gather in high precision"
            )


__all__ = ["Fp8AllGather", "GatheredCodes", "gather_in_fp8"]
