"""What a DeepSpeed engine keeps of each Parameter, whatever its stage: FP32 master, optimizer state, gradients.

Stages 1 to 3 have functions of DeepSpeed's for masters and states, which every process calls and which gather one
Parameter at a time. Stage 0 with 16-bit weights has none: there a master is a tensor of its own. Where gradients stand
between backward and step is no interface of DeepSpeed's; it is read in this file alone.

Source: DeepSpeed 0.19: utils/tensor_fragment.py; runtime/zero/stage_1_and_2.py, stage3.py; runtime/bf16_optimizer.py;
runtime/fp16/unfused_optimizer.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from acceler8.errors import ConfigError


def is_partitioned(parameter: Tensor) -> bool:
    """True for a Parameter of ZeRO-3, whose data is there only while it is gathered."""
    return hasattr(parameter, "ds_id")


def shape_of(parameter: Tensor) -> torch.Size:
    """Of the whole Parameter."""
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


@contextmanager
def sent_numbers(model: nn.Module) -> Iterator[None]:
    """While an engine is made: send process 0's Parameters without dimensions to all, which DeepSpeed cannot.

    It views each Parameter as bytes, which torch refuses for a single number (0.19.8, engine._broadcast_model); those
    that carry ``ds_optim_param`` it leaves out. Remove when it sends them.
    """
    numbers: list[Any] = [p for p in model.parameters() if p.ndim == 0 and not is_partitioned(p)]
    for p in numbers:
        sent = p.detach().reshape(1)
        dist.broadcast(sent.view(torch.uint8), 0)
        p.data.copy_(sent[0])
        p.ds_optim_param = True
    try:
        yield
    finally:
        for p in numbers:
            del p.ds_optim_param


class Parts:
    """The parts of one engine. Every process calls the same methods, for the same Parameters, in the same order.

    engine: DeepSpeed's. given: the script's optimizer, which holds flat FP32 parts, or masters, now.
    """

    def __init__(self, engine: Any, given: Optimizer) -> None:
        self.engine, self.given = engine, given
        self.owner: Any = engine.optimizer
        """DeepSpeed's optimizer; at stage 0 in FP32 the script's."""
        self._masters: dict[int, Tensor] = {}
        if engine.zero_optimization_stage() == 0 and self.owner is not given:
            if not hasattr(self.owner, "fp32_groups"):
                raise ConfigError(
                    f"DeepSpeed keeps this model in a {type(self.owner).__name__}, whose states cannot be read; allowed"
                    " at ZeRO stage 0 in 16 bits: an optimizer of torch.optim; or choose stage 1"
                )
            for low, high in zip(self.owner.fp16_groups, self.owner.fp32_groups, strict=True):
                self._masters |= {id(p): master for p, master in zip(low, high, strict=True)}
                _undo_first_step(given, low, high)

    def weight(self, parameter: nn.Parameter) -> Tensor:
        """The whole weight in FP32: the master of one that is trained, else the Parameter's value."""
        from deepspeed.utils import safe_get_full_fp32_param

        if parameter.requires_grad:
            if (own := self._masters.get(id(parameter))) is not None:
                return own.detach()
            master: Tensor | None = safe_get_full_fp32_param(parameter)
            if master is not None:
                return master.detach().reshape(shape_of(parameter))
        value = self.value(parameter)
        return value.float() if value.dtype in (torch.bfloat16, torch.float16) else value

    def value(self, parameter: nn.Parameter) -> Tensor:
        """A copy of the whole value that forward reads."""
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter], enabled=is_partitioned(parameter)):
            copied: Tensor = parameter.detach().clone()
            return copied

    def set_weight(self, parameter: nn.Parameter, weight: Tensor) -> None:
        """Put a whole weight, the same on every process, into master and Parameter."""
        import deepspeed
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param

        whole = weight.to(device=self.engine.device, dtype=torch.float32)
        if (own := self._masters.get(id(parameter))) is not None:
            own.data.copy_(whole)
        elif parameter.requires_grad and is_partitioned(parameter):
            safe_set_local_fp32_param(parameter, _own_part(parameter, whole))
        elif parameter.requires_grad:
            safe_set_full_fp32_param(parameter, whole)
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0, enabled=is_partitioned(parameter)):
            parameter.data.copy_(whole)  # rounds to nearest even, as the engine does behind a step

    def state_of(self, parameter: nn.Parameter) -> Iterator[tuple[str, Any]]:
        """What the script's optimizer keeps of a Parameter, whole and in FP32; nothing before the first step."""
        from deepspeed.utils import safe_get_full_optimizer_state

        flat = self._flat_of(parameter)
        if flat is None or flat not in self.given.state:
            return
        for key, value in list(self.given.state[flat].items()):
            if not _is_like(value, flat):
                yield key, value.clone() if isinstance(value, Tensor) else value
            elif flat is parameter or id(parameter) in self._masters:
                yield key, value.detach()
            else:
                yield key, safe_get_full_optimizer_state(parameter, key).detach().reshape(shape_of(parameter))

    def begin_state(self, whole: tuple[str, ...], shared: dict[int, dict[str, Any]]) -> None:
        """Make room for states: ``whole`` are keys of tensors like the weight, ``shared`` the others, by group."""
        for parameter, number in self._trained():
            flat = self._flat_of(parameter)
            if flat is None or number not in shared:
                continue
            made: dict[str, Any] = {
                key: value.clone() if isinstance(value, Tensor) else value for key, value in shared[number].items()
            }
            self.given.state[flat] = made | {key: torch.zeros_like(flat) for key in whole}
        self.link_states()

    def link_states(self) -> None:
        """Have DeepSpeed find the states of all groups; call it before they are read.

        ZeRO-1 and 2 do that once, behind the first step of the first group, when the others have none (0.19.8).
        """
        if hasattr(self.owner, "_lazy_init_hp_params_optimizer_state"):
            self.owner._hp_optimizer_states_linked = False
            self.owner._lazy_init_hp_params_optimizer_state()

    def set_state(self, parameter: nn.Parameter, key: str, value: Tensor) -> None:
        """Put a whole state, the same on every process, where ``begin_state`` made room."""
        from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

        whole, flat = value.to(device=self.engine.device, dtype=torch.float32), self._flat_of(parameter)
        assert flat is not None
        if flat is parameter or id(parameter) in self._masters:
            self.given.state[flat][key].copy_(whole)
        elif is_partitioned(parameter):
            safe_set_local_optimizer_state(parameter, _own_part(parameter, whole), key)
        else:
            safe_set_full_optimizer_state(parameter, whole, key)

    def _trained(self) -> Iterator[tuple[nn.Parameter, int]]:
        """The trained Parameters with the numbers of their groups."""
        names = ("bit16_groups", "fp16_groups", "bf16_groups")  # of stages 1 and 2, 0 and 3, 1 with FP32 gradients
        groups: list[list[nn.Parameter]] = next(
            (getattr(self.owner, name) for name in names if hasattr(self.owner, name)),
            [group["params"] for group in self.given.param_groups],
        )
        numbers = getattr(self.owner, "sub_group_to_group_id", None)
        for i, group in enumerate(groups):
            yield from ((p, i if numbers is None else numbers[i]) for p in group if p.requires_grad)

    def _flat_of(self, parameter: nn.Parameter) -> Tensor | None:
        """The tensor in the script's optimizer that holds this process's part of a Parameter."""
        if not parameter.requires_grad:
            return None
        if (own := self._masters.get(id(parameter))) is not None:
            return own
        if self.owner is self.given:
            return parameter
        if is_partitioned(parameter):
            found: Tensor = self.owner.fp32_partitioned_groups_flat[
                self.owner.grad_position[self.owner.get_param_id(parameter)][0]
            ]
            return found
        flats = getattr(self.owner, "single_partition_of_fp32_groups", None) or self.owner.fp32_groups_flat_partition
        for group, flat in zip(getattr(self.owner, "bit16_groups", None) or self.owner.bf16_groups, flats, strict=True):
            if any(p is parameter for p in group):
                part: Tensor = flat
                return part
        return None

    def gradient_norm(self) -> Tensor:
        """The 2-norm of all gradients in their own units, between the last backward of a step and the step."""
        from deepspeed.runtime.utils import combine_grad_norm_groups
        from deepspeed.utils import safe_get_full_grad

        scale = float(getattr(self.owner, "loss_scale", 1.0))
        if hasattr(self.owner, "scaled_global_norm"):
            norm = self.owner.scaled_global_norm()
        elif hasattr(self.owner, "_get_norm_groups"):
            norm = combine_grad_norm_groups(self.owner._get_norm_groups())
        else:
            squares = [g.float().square().sum() for p, _ in self._trained() if (g := safe_get_full_grad(p)) is not None]
            norm = torch.stack(squares).sum().sqrt() if squares else torch.zeros((), device=self.engine.device)
        return torch.as_tensor(norm, device=self.engine.device) / scale

    def set_clip(self, max_norm: float) -> None:
        """Have the next step clip to this norm; 0: not."""
        if self.owner is self.given:
            if max_norm:
                torch.nn.utils.clip_grad_norm_((p for p, _ in self._trained()), max_norm)
        else:
            self.owner.clip_grad = max_norm

    def forget_gradients(self) -> None:
        """Drop what backward has added since the last step, without a step."""
        self.owner.zero_grad(set_to_none=True)
        for name in ("averaged_gradients", "all_grad_tensors"):
            kept = getattr(self.owner, name, None)
            if kept is not None and is_partitioned(next(iter(self.engine.module.parameters()))):
                kept.clear()
            elif kept is not None:
                for key in kept:
                    kept[key] = None
        if hasattr(self.owner, "_release_preflattened_grad_buffers"):
            self.owner._release_preflattened_grad_buffers()
        if hasattr(self.owner, "clear_hp_grads"):
            self.owner.clear_hp_grads()
        self.owner._epilogue_ran_this_backward = False
        if hasattr(self.owner, "micro_step_id"):
            self.owner.micro_step_id = 0 if self.engine.zero_optimization_stage() == 3 else -1


@torch.no_grad()
def _undo_first_step(given: Optimizer, parameters: list[Tensor], masters: list[Tensor]) -> None:
    """Take back the step by which DeepSpeed's stage 0 allocates states: it decays masters and counts.

    Without this the first real update of AdamW is 0.74 of its size. DeepSpeed 0.19.8, FP16_UnfusedOptimizer's
    initialize_optimizer_states; remove when that restores what it finds.
    """
    for parameter, master in zip(parameters, masters, strict=True):
        master.copy_(parameter)
        given.state.pop(master, None)


def _is_like(value: Any, flat: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == flat.shape and value.ndim > 0


def _own_part(parameter: Any, whole: Tensor) -> Tensor:
    """This process's part of a whole tensor; the last part is filled up with zeros."""
    size = parameter.ds_tensor.numel()
    rank = dist.get_rank(parameter.ds_process_group)
    part = whole.flatten()[size * rank : size * (rank + 1)]
    return F.pad(part, (0, size - part.numel()))
