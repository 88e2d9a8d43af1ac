"""The floor of a step: its parts, each alone on this device, summed. What is missing to it is room.

GEMMs are those of the recipe, with its scales and its accumulation, on operands that are cast already, q/k/v and
gate/up merged; beside them the same in the fastest mode that the device has. Attention is PyTorch's fastest forward and
backward. The head with its loss, and the optimizer, are measured as the step runs them. What is left is elementwise,
counted as the bytes that it must read and write when each tensor is touched as seldom as a fused kernel can, over the
measured copy bandwidth.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from acceler8 import recipes
from acceler8.bench import timing
from acceler8.bench.presets import Preset
from acceler8.formats import E4M3
from acceler8.kernels import Quantized, has_hardware_matmul, multiply, quantize
from acceler8.recipes import Gemm, Recipe
from acceler8.scaling import TENSORWISE

FASTEST = "fastest FP8"
BF16 = "BF16"


@dataclass
class Floor:
    """Milliseconds a step, by part; GEMMs by mode."""

    gemms: dict[str, float] = field(default_factory=dict)
    attention: float = 0.0
    elementwise: float = 0.0
    head: float = 0.0
    optimizer: float = 0.0
    copy_tb_per_s: float = 0.0

    def step_ms(self, recipe: str | None) -> float | None:
        """The floor of a recipe, of BF16 for None; None where its GEMMs were not measured."""
        gemms = self.gemms.get(recipe or BF16)
        return None if gemms is None else gemms + self.attention + self.elementwise + self.head + self.optimizer

    def to_dict(self) -> dict[str, float]:
        """Name -> ms."""
        parts = {f"GEMMs, {mode}": ms for mode, ms in self.gemms.items()}
        sums = {f"floor, {mode}": self.step_ms(mode) or 0.0 for mode in self.gemms}
        return parts | {
            "attention": self.attention, "elementwise": self.elementwise, "head and loss": self.head,
            "optimizer": self.optimizer,
        } | sums  # fmt: skip


def operands(gemm: Gemm, m: int, k: int, n: int, device: torch.device) -> tuple[Quantized, Quantized]:
    """Random operands of ``[m, k] x [n, k]`` as the GEMM of a recipe takes them."""
    made = []
    for rows, operand in ((m, gemm.a), (n, gemm.b)):
        values = torch.randn(rows, k, device=device, dtype=torch.bfloat16)
        codes, _, _ = quantize(values, operand.format or E4M3, None, operand.granularity)
        assert codes is not None
        made.append(codes)
    return made[0], made[1]


def gemm_ms(gemm: Gemm | None, m: int, k: int, n: int, device: torch.device) -> float:
    """Milliseconds of one GEMM ``[m, k] x [k, n]`` into BF16; None: of BF16 operands."""
    if gemm is None or not gemm.is_fp8:
        a = torch.randn(m, k, device=device, dtype=torch.bfloat16)
        b = torch.randn(n, k, device=device, dtype=torch.bfloat16)
        return timing.call_ms(lambda: a @ b.t(), device).median
    qa, qb = operands(gemm, m, k, n, device)
    return timing.call_ms(lambda: multiply(qa, qb, out_dtype=torch.bfloat16, fast_accum=gemm.fast_accum), device).median


def layer_gemms_ms(recipe: Recipe | None, preset: Preset, device: torch.device) -> float:
    """All GEMMs of the step's layers, forward and backward."""
    total = 0.0
    for _, k, n in preset.matrices():
        fprop, dgrad, wgrad = (None, None, None) if recipe is None else (recipe.fprop, recipe.dgrad, recipe.wgrad)
        total += gemm_ms(fprop, preset.tokens, k, n, device)
        total += gemm_ms(dgrad, preset.tokens, n, k, device)
        total += gemm_ms(wgrad, n, preset.tokens, k, device)
    return total * preset.layers


def _fastest() -> Recipe:
    """Scales of tensors, E4M3 in all, and fast accumulation in all three."""
    plain = recipes.get("tensorwise", formats="E4M3")
    fast = Gemm(a=plain.fprop.a, b=plain.fprop.b, fast_accum=True)
    assert fast.a.granularity is TENSORWISE
    return plain.replace(fprop=fast, dgrad=fast, wgrad=fast)


def attention_ms(preset: Preset, device: torch.device) -> float:
    """Causal attention of all layers, forward and backward, by the fastest of PyTorch's ways that takes it."""
    head = preset.width // preset.heads

    def leaf(heads: int) -> Tensor:
        shape = (preset.batch, heads, preset.length, head)
        return torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)

    q, k, v = leaf(preset.heads), leaf(preset.kv_heads), leaf(preset.kv_heads)
    grad = torch.randn_like(q).detach()

    def work() -> None:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out.backward(grad)
        q.grad = k.grad = v.grad = None

    found = [timing.call_ms(work, device).median]
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION) if device.type == "cuda" else ():
        try:
            with sdpa_kernel(backend):
                found.append(timing.call_ms(work, device).median)
        except RuntimeError:  # a backend that does not take these shapes
            continue
    return min(found) * preset.layers


def elementwise_bytes(preset: Preset) -> int:
    """Least bytes of norms, residuals, activation and casts of a step's layers, activations in BF16, operands in FP8.

    Per element of the residual stream, forward: norm and residual 4, with codes in both orientations 6, twice; output
    of attention cast 4. Per element of the gated MLP: forward 6 (read gate and up, write codes), backward 10 (read
    three, write gradients' codes in both orientations and the activation's). Backward of norms 8 twice, gradients cast
    4 twice and 8.
    """
    stream, gated = preset.tokens * preset.width, preset.tokens * preset.ffn
    forward = stream * (4 + 6 + 4 + 4 + 6) + gated * 6
    backward = stream * (4 * 2 + 8 * 2 + 8) + gated * 10
    return preset.layers * (forward + backward)


def head_ms(preset: Preset, device: torch.device) -> float:
    """The output head in BF16 and PyTorch's cross entropy in FP32, forward and backward."""
    dtype = torch.bfloat16
    x = torch.randn(preset.tokens, preset.width, device=device, dtype=dtype, requires_grad=True)
    w = torch.randn(preset.vocabulary, preset.width, device=device, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, preset.vocabulary, (preset.tokens,), device=device)

    def work() -> None:
        F.cross_entropy((x @ w.t()).float(), targets).backward()
        x.grad = w.grad = None

    return timing.call_ms(work, device, repeats=8).median


def optimizer_ms(preset: Preset, device: torch.device) -> float:
    """Fused AdamW over as many parameters as the model's, in their dtype."""
    parameter = torch.nn.Parameter(
        torch.zeros(preset.parameter_count(), device=device, dtype=getattr(torch, preset.parameters))
    )
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    return timing.call_ms(optimizer.step, device, repeats=8).median


def measure_floor(preset: Preset, device: torch.device, wanted: Iterable[str | None]) -> Floor:
    """Measure each part alone; GEMMs in BF16, in the modes of the recipes that are ``wanted``, and in the fastest."""
    floor = Floor()
    bandwidth = timing.copy_bandwidth(device)
    floor.copy_tb_per_s = bandwidth / 1e12
    floor.elementwise = elementwise_bytes(preset) / bandwidth * 1e3
    timing.release(device)
    floor.gemms[BF16] = layer_gemms_ms(None, preset, device)
    for name in wanted:
        recipe = None if name is None else recipes.get(name)
        if recipe is not None and has_hardware_matmul(device, recipe.granularity):
            floor.gemms[recipe.name] = layer_gemms_ms(recipe if recipe.fp8_gemms else None, preset, device)
    if has_hardware_matmul(device, TENSORWISE):
        floor.gemms[FASTEST] = layer_gemms_ms(_fastest(), preset, device)
    timing.release(device)
    floor.attention = attention_ms(preset, device)
    floor.head = head_ms(preset, device)
    timing.release(device)
    floor.optimizer = optimizer_ms(preset, device)
    timing.release(device)
    return floor
