"""Prove on this machine, in seconds, that FP8 training works: casts, GEMMs, a step, a checkpoint, a resume.

Each check runs the real thing on the device that training will use and compares it with a reference: a Triton
version that miscompiles a cast, or a driver that rounds differently, shows here and not as a NaN after a day.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer

from acceler8 import checkpoint
from acceler8.conversion import attach, convert, restore, verify
from acceler8.errors import VerifyError
from acceler8.kernels import Quantized, quantize, scaled_matmul
from acceler8.nn import fp8_state_dict, load_fp8_state_dict
from acceler8.recipes import Operand, Recipe, resolve

LossFunction = Callable[[nn.Module], Tensor]


@dataclass(frozen=True, kw_only=True)
class SelftestReport:
    """What was checked, and what each check found."""

    device: str
    recipe: str
    checks: dict[str, str]

    def __str__(self) -> str:
        head = f"selftest on {self.device}, recipe {self.recipe}"
        return "\n".join([head, *(f"ok  {name}: {found}" for name, found in self.checks.items())])


def selftest(
    make_model: Callable[[], nn.Module] | None = None,
    loss_of: LossFunction | None = None,
    *,
    recipe: str | Recipe | None = None,
    device: torch.device | str | None = None,
) -> SelftestReport:
    """Check casts, GEMMs, a training step, checkpoint and resume on ``device`` with ``recipe``.

    ``make_model()`` builds the model in the same state each time it is called and ``loss_of(model)`` returns
    a scalar loss; both or neither (then a small model of the library's own is used). ``device`` defaults to
    the GPU if there is one. Nothing is left behind; torch's random states are restored.
    Raises: VerifyError naming the check that failed and by how much.
    """
    if (make_model is None) != (loss_of is None):
        raise VerifyError("selftest got one of make_model and loss_of; give both, or neither")
    recipe = resolve(recipe)
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    devices = [where] if where.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(0)
        make = make_model or _small_model
        loss = loss_of or _small_loss(where)
        checks = {
            "casts": _casts(recipe, where),
            "gemms": _gemms(recipe, where),
            "step": _step(make, loss, recipe, where),
            "checkpoint": _checkpoint(make, loss, recipe, where),
            "resume": _resume(make, loss, recipe, where),
        }
    return SelftestReport(device=str(where), recipe=recipe.name, checks=checks)


def _operands(recipe: Recipe) -> list[Operand]:
    sides = [o for gemm in (recipe.fprop, recipe.dgrad, recipe.wgrad) for o in (gemm.a, gemm.b) if o.is_fp8]
    return list(dict.fromkeys(sides))


def _nasty(rows: int, cols: int) -> Tensor:
    """Values that bite: outliers, zero rows, denormals, a NaN, an infinity."""
    x = torch.randn(rows, cols) * torch.logspace(-12, 4, rows).unsqueeze(1)
    x[1] = 0.0
    x[2, 3], x[rows // 2, 5], x[rows - 1, 0] = torch.nan, torch.inf, 1e-40
    return x


def _casts(recipe: Recipe, device: torch.device) -> str:
    codes = 0
    for x in (_nasty(144, 272), torch.randn(256, 128)):
        for operand in _operands(recipe):
            how = (operand.format, operand.format, operand.granularity)
            here = quantize(x.to(device), *how, pow2=recipe.pow2_scales, statistics=True)
            there = quantize(x, *how, pow2=recipe.pow2_scales, statistics=True)
            assert here[2] is not None and there[2] is not None
            counts, expected = here[2][1:4].tolist(), there[2][1:4].tolist()
            if counts != expected:
                raise VerifyError(
                    f"casts: {counts} values saturated, underflowed, were not finite in a {operand} cast on {device},"
                    f" in the reference {expected}; Triton miscompiles the counts here: try another Triton version"
                )
            plain = quantize(x.to(device), *how, pow2=recipe.pow2_scales)  # without statistics: what training runs
            pairs = list(zip(here[:2] + plain[:2], there[:2] * 2, strict=True))
            if recipe.is_delayed:
                pairs += zip(_delayed(x.to(device), how, recipe), _delayed(x, how, recipe), strict=True)
            for got, want in pairs:
                assert got is not None and want is not None
                differ = (got.codes.view(torch.uint8).cpu() != want.codes.view(torch.uint8)).sum().item()
                if differ or not torch.equal(got.scale_inv.cpu(), want.scale_inv):
                    raise VerifyError(
                        f"casts: {differ} of {want.codes.numel()} codes of a {operand} cast on {device} differ from the"
                        " reference; this Triton and driver miscompile it: try another Triton version, and report this"
                    )
                codes += want.codes.numel()
    return f"{codes} codes equal the reference"


def _delayed(x: Tensor, how: tuple[Any, Any, Any], recipe: Recipe) -> list[Quantized | None]:
    """Casts with no history, with one, and with one that saturates."""
    out: list[Quantized | None] = []
    for known in (0.0, 3.0, 1e-3):
        amax, staging = torch.tensor([known], device=x.device), torch.zeros(1, device=x.device)
        out += quantize(x, *how, pow2=recipe.pow2_scales, margin=recipe.margin, amax=amax, staging=staging)[:2]
    return out


def _gemms(recipe: Recipe, device: torch.device) -> str:
    worst = 0.0
    for gemm in (recipe.fprop, recipe.dgrad, recipe.wgrad):
        if not gemm.is_fp8:
            continue
        a = quantize(torch.randn(96, 256, device=device), gemm.a.format, None, gemm.a.granularity)[0]
        b = quantize(torch.randn(144, 256, device=device), gemm.b.format, None, gemm.b.granularity)[0]
        assert isinstance(a, Quantized) and isinstance(b, Quantized)
        want = a.dequantize().double() @ b.dequantize().double().t()
        got = scaled_matmul(a, b, out_dtype=torch.bfloat16, fast_accum=gemm.fast_accum)
        plain = (a.dequantize().bfloat16() @ b.dequantize().bfloat16().t()).double()
        error, allowed = _relative(got.double(), want), 2 * _relative(plain, want) + 1e-3
        if not error <= allowed:
            raise VerifyError(f"gemms: relative error {error:.2e} on {device}; allowed: {allowed:.2e}")
        worst = max(worst, error)
    return f"relative error at most {worst:.1e} against float64"


def _relative(got: Tensor, want: Tensor) -> float:
    return float((got - want).norm() / want.norm())


def _small_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Embedding(64, 64),
        nn.LayerNorm(64),
        nn.Linear(64, 128),
        nn.GELU(),
        nn.Linear(128, 64),
        nn.Linear(64, 48),
    )


def _small_loss(device: torch.device) -> LossFunction:
    tokens = torch.randint(0, 64, (8, 17), generator=torch.Generator().manual_seed(2)).to(device)

    def loss(model: nn.Module) -> Tensor:
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten() % 48)

    return loss


class _Run:
    """A converted model in training."""

    def __init__(self, make: Callable[[], nn.Module], loss: LossFunction, recipe: Recipe, device: torch.device) -> None:
        self.model = convert(make().to(device), recipe)
        self.optimizer: Optimizer = AdamW(self.model.parameters(), lr=1e-3)
        attach(self.model, self.optimizer)
        self.loss = loss

    def step(self) -> float:
        self.optimizer.zero_grad()
        loss = self.loss(self.model)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def save(self, folder: Path) -> None:
        checkpoint.save(folder, model=self.model, optimizer=self.optimizer, fp8_state=fp8_state_dict(self.model))


def _step(make: Callable[[], nn.Module], loss: LossFunction, recipe: Recipe, device: torch.device) -> str:
    run = _Run(make, loss, recipe, device)
    return verify(run.model, run.optimizer, step=run.step).checks["moved and fresh"]


def _checkpoint(make: Callable[[], nn.Module], loss: LossFunction, recipe: Recipe, device: torch.device) -> str:
    run = _Run(make, loss, recipe, device)
    run.step()
    plain = make().to(device)
    with tempfile.TemporaryDirectory() as folder:
        run.save(Path(folder) / "checkpoint")
        checkpoint.load(Path(folder) / "checkpoint").restore(model=plain, rng=False)
    restored = restore(run.model)
    with torch.no_grad():
        got, want = loss(plain.eval()), loss(restored.eval())
    if not torch.equal(got, want):
        raise VerifyError(f"checkpoint: loss {got.item()} in a plain model, {want.item()} in the restored one")
    return "loads in the plain model with equal results"


def _resume(make: Callable[[], nn.Module], loss: LossFunction, recipe: Recipe, device: torch.device) -> str:
    whole = _Run(make, loss, recipe, device)
    whole.step()
    with tempfile.TemporaryDirectory() as folder:
        whole.save(Path(folder) / "checkpoint")
        want = whole.step()
        again = _Run(make, loss, recipe, device)
        saved = checkpoint.load(Path(folder) / "checkpoint")
        saved.restore(model=again.model, optimizer=again.optimizer)
        load_fp8_state_dict(again.model, saved.fp8_state())
    got = again.step()
    if got != want:
        raise VerifyError(f"resume: the first loss after resuming is {got!r}, uninterrupted it is {want!r}")
    return "first loss equal"
