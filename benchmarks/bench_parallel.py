"""A training step over several GPUs: BF16, the raw libraries and acceler8 under DDP and FSDP2, on the same work.

    acceler8 launch --num_processes 2 benchmarks/bench_parallel.py --strategies fsdp2 ddp [--write FOLDER]
    acceler8 launch --num_processes 2 --cpu benchmarks/bench_parallel.py --preset tiny    # seconds: does it run

Each process trains on its own batch (weak scaling); ``single`` is the same step with no exchange, on every GPU at once,
so that ``scaling`` is its time over a variant's of the same kind of layers. Times are those of the slowest process,
memory that of the fullest one; ``wire`` is what one process sends in a step (a ring's share). Variants run one after
another and BF16 again at the end, whose drift is printed. Losses are compared before anything is timed. Raw variants
call PyTorch and the library themselves: FP32 shards, BF16 (or FP8) gathers, BF16 reductions, the library's own FP8
all-gather where it has one; under DDP autocast. Not installed: left out, and said.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import gc
import itertools
import json
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from timing import facts
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import acceler8
from acceler8 import NativeRecipeKwargs
from acceler8.bench.llama import Llama
from acceler8.bench.presets import Preset, preset_named
from acceler8.bench.variants import exchange_linears
from acceler8.bench.wire import CountBytes
from acceler8.config.plugins import FullyShardedDataParallelPlugin, TorchDynamoPlugin
from acceler8.utils import AORecipeKwargs, TERecipeKwargs

WARM_UP, GAP = 8, 0.05
POLICY = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16}


@dataclasses.dataclass
class Run:
    """A model ready to train."""

    model: nn.Module
    step: Callable[[Tensor], Tensor]
    """One optimizer step on tokens ``[batch, length + 1]``; returns the loss, detached."""


Build = Callable[[nn.Module, str, argparse.Namespace], Run]


def main() -> None:
    args = parse()
    place = acceler8.Accelerator(cpu=args.device == "cpu")  # starts the process group
    device = place.device
    preset = chosen_preset(args)
    say(
        f"{facts()}; {place.num_processes} processes; {preset.layers} layers of {preset.width},"
        f" {preset.tokens} tokens a process"
    )
    rows = []
    for strategy in args.strategies:
        patterns = args.variants or ["*"]
        names = [name for name in VARIANTS if any(fnmatchcase(name, pattern) for pattern in patterns)]
        names = ["bf16", *(name for name in names if name != "bf16")]
        baseline: list[float] = []
        for name in [*names, "bf16"]:
            row = measure(name, strategy, preset, device, args, baseline)
            if row is None:
                continue
            rows.append(row)
            say(line(row, rows))
    if args.write and place.is_main_process:
        write(rows, preset, place.num_processes, args.write)
    place.end_training()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--strategies", nargs="+", default=["single", "ddp", "fsdp2"], choices=["single", "ddp", "fsdp2"]
    )
    parser.add_argument("--variants", nargs="+", help="names or globs; default all")
    parser.add_argument("--preset", choices=["tiny", "llama3-8b"], default="llama3-8b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--length", type=int)
    parser.add_argument("--steps", type=int, default=12, help="timed ones")
    parser.add_argument("--no_reshard", action="store_true", help="FSDP2 keeps gathered weights until backward")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--write", type=Path, metavar="FOLDER")
    return parser.parse_args()


def chosen_preset(args: argparse.Namespace) -> Preset:
    sizes = {"layers": args.layers, "batch": args.batch, "length": args.length}
    if args.preset == "tiny":
        return preset_named("tiny", **sizes, parameters="float32")
    sizes = {"layers": 8, "batch": 2} | {name: value for name, value in sizes.items() if value is not None}
    return preset_named("llama3-8b-4l", **sizes, parameters="float32")


def say(text: str) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(text, flush=True)


def measure(
    name: str, strategy: str, preset: Preset, device: torch.device, args: argparse.Namespace, baseline: list[float]
) -> dict[str, Any] | None:
    """One variant from the same weights; None if its library is not here or it cannot run so. Every rank calls it."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(0)
    torch._dynamo.reset()
    with torch.device(device):
        model = Llama(preset).train()
    generator = torch.Generator(device).manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    shape = (preset.batch, preset.length + 1)
    tokens = torch.randint(0, preset.vocabulary, shape, device=device, generator=generator)
    problem, run = "", None
    try:
        run = VARIANTS[name](model, strategy, args)
        losses = [float(run.step(tokens)) for _ in range(WARM_UP)]
    except (ImportError, ValueError, RuntimeError) as error:
        problem = f"{type(error).__name__}: {str(error).splitlines()[0][:150]}"
    if any(problems := everyone(problem)):
        say(f"{strategy:7}{name:34} left out: {next(filter(None, problems))}")
        return None
    assert run is not None
    if not all(map(torch.isfinite, torch.tensor(losses))) or losses[-1] >= losses[0]:
        raise SystemExit(f"{name} under {strategy} does not train: losses {losses}")
    with CountBytes() as counted:
        run.step(tokens)
    times = timed(lambda: run.step(tokens), args.steps, device)
    slowest = max(everyone(statistics.median(times)))
    peak = max(everyone(torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0))
    mean = statistics.mean(everyone(losses[-1]))
    if not baseline:
        baseline.append(mean)
    return {
        "strategy": strategy, "variant": name, "step_ms": slowest, "tokens_per_s": preset.tokens / slowest * 1e3,
        "peak_gib": peak, "wire_mb": {kind: sent / 1e6 for kind, sent in counted.sent.items()},
        "loss": mean, "loss_gap": mean / baseline[0] - 1,
    }  # fmt: skip


def timed(step: Callable[[], object], count: int, device: torch.device) -> list[float]:
    """Milliseconds of each step, between events on a GPU."""
    if device.type != "cuda":
        times = []
        for _ in range(count):
            start = time.perf_counter()
            step()
            times.append(1e3 * (time.perf_counter() - start))
        return times
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) for start, end in itertools.pairwise(events)]


def everyone(value: Any) -> list[Any]:
    """The value of each process."""
    if not dist.is_initialized():
        return [value]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def line(row: Mapping[str, Any], rows: list[dict[str, Any]]) -> str:
    """A row of the table, with its ratios."""
    bf16 = next(r for r in rows if r["strategy"] == row["strategy"] and r["variant"] == "bf16")
    alone = next((r for r in rows if r["strategy"] == "single" and r["variant"] == row["variant"]), None)
    sent = sum(row["wire_mb"].values())
    said = f"{row['strategy']:7}{row['variant']:34}{row['step_ms']:9.2f} ms {row['tokens_per_s']:9.0f} tok/s/GPU"
    said += f"  x{bf16['step_ms'] / row['step_ms']:.3f}  peak {row['peak_gib']:6.2f} GiB  wire {sent:10.3f} MB"
    said += f"  loss {row['loss']:.4f} ({100 * row['loss_gap']:+.2f} %)"
    if alone is not None and alone is not row:
        said += f"  scaling {100 * alone['step_ms'] / row['step_ms']:.1f} %"
    return said


def write(rows: list[dict[str, Any]], preset: Preset, processes: int, folder: Path) -> None:
    day = datetime.date.today().isoformat()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{day}-parallel-{processes}.json"
    found = {"facts": facts(), "processes": processes, "preset": preset.to_dict(), "rows": rows}
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


# --- variants ---------------------------------------------------------------------------------------------------------


def loop(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    after: Callable[[], object] = lambda: None,
    backward: Callable[[Tensor], object] = lambda loss: loss.backward(),
) -> Run:
    def step(tokens: Tensor) -> Tensor:
        with context():
            output = model(tokens[:, :-1])
        loss = F.cross_entropy(output.float().flatten(0, 1), tokens[:, 1:].flatten())
        del output
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        after()
        return loss.detach()

    return Run(model, step)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def raw(
    exchange: Callable[[nn.Module], object] = lambda model: None,
    compiled: bool = False,
    library: Callable[[], AbstractContextManager[Any]] = nullcontext,
    after: Callable[[nn.Module], object] = lambda model: None,
) -> Build:
    """PyTorch's own DDP or FSDP2 around what ``exchange`` made of the model."""

    def build(model: nn.Module, strategy: str, args: argparse.Namespace) -> Run:
        exchange(model)
        if compiled:
            for layer in model.layers:
                layer.compile()
        if strategy == "fsdp2":
            for layer in model.layers:
                fully_shard(layer, mp_policy=MixedPrecisionPolicy(**POLICY), reshard_after_forward=not args.no_reshard)
            fully_shard(model, mp_policy=MixedPrecisionPolicy(**POLICY), reshard_after_forward=not args.no_reshard)
            return loop(model, adamw(model), library, lambda: after(model))

        def context() -> AbstractContextManager[Any]:
            return torch.autocast(args.device, dtype=torch.bfloat16)

        def both() -> AbstractContextManager[Any]:
            stack = ExitStack()
            stack.enter_context(context())
            stack.enter_context(library())
            return stack

        wrapped: nn.Module = DistributedDataParallel(model) if strategy == "ddp" else model
        return loop(wrapped, adamw(model), both)

    return build


def not_head(module: nn.Module, name: str) -> bool:
    return "lm_head" not in name


def torchao(recipe: str, gather: bool = False, compiled: bool = False) -> Build:
    def exchange(model: nn.Module) -> None:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig.from_recipe_name(recipe)
        emulate = not torch.cuda.is_available()
        config = dataclasses.replace(config, enable_fsdp_float8_all_gather=gather, emulate=emulate)
        convert_to_float8_training(model, config=config, module_filter_fn=not_head)

    def precompute(model: nn.Module) -> None:
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

        precompute_float8_dynamic_scale_for_fsdp(model)

    plain, sharded = raw(exchange, compiled), raw(exchange, compiled, after=precompute)

    def build(model: nn.Module, strategy: str, args: argparse.Namespace) -> Run:
        if gather and strategy != "fsdp2":
            raise ValueError("its FP8 all-gather is FSDP2's")
        return (sharded if gather else plain)(model, strategy, args)

    return build


def transformer_engine() -> Build:
    def exchange(model: nn.Module) -> None:
        import transformer_engine.pytorch as te

        def make(linear: nn.Linear) -> nn.Module:
            sizes = linear.in_features, linear.out_features
            return te.Linear(*sizes, bias=False, params_dtype=linear.weight.dtype, device=linear.weight.device)

        exchange_linears(model, lambda name: not_head(model, name), make)

    def library() -> AbstractContextManager[Any]:
        import transformer_engine.pytorch as te
        from transformer_engine.common.recipe import DelayedScaling

        recipe = DelayedScaling(amax_history_len=1024, amax_compute_algo="max")
        around: AbstractContextManager[Any] = te.autocast(enabled=True, recipe=recipe)
        return around

    return raw(exchange, library=library)


def ours(precision: str, handler: Callable[[str], Any] | None = None, compiled: bool = False) -> Build:
    """The user's way: ``Accelerator.prepare``. ``handler`` makes the recipe object for a strategy."""

    def build(model: nn.Module, strategy: str, args: argparse.Namespace) -> Run:
        options: dict[str, Any] = {"cpu": args.device == "cpu"}
        if handler is not None:
            options["kwargs_handlers"] = [handler(strategy)]
        if compiled:
            options["dynamo_plugin"] = TorchDynamoPlugin(backend="inductor", use_regional_compilation=True)
        if strategy == "fsdp2":
            options["fsdp_plugin"] = FullyShardedDataParallelPlugin(
                fsdp_version=2,
                reshard_after_forward=not args.no_reshard,
                auto_wrap_policy="TRANSFORMER_BASED_WRAP",
                transformer_cls_names_to_wrap=["Layer"],
                mixed_precision_policy=MixedPrecisionPolicy(**POLICY),
            )
        if strategy == "single" and dist.is_initialized() and dist.get_world_size() > 1:
            return alone(model, precision, handler, args)
        accelerator = acceler8.Accelerator(mixed_precision=precision, output_dtype="compute", **options)
        prepared, optimizer = accelerator.prepare(model, adamw(model))
        return loop(prepared, optimizer, backward=accelerator.backward)

    return build


def alone(model: nn.Module, precision: str, handler: Callable[[str], Any] | None, args: argparse.Namespace) -> Run:
    """One process's training among several: an Accelerator would spread it."""
    if handler is not None:
        made = handler("single")
        if not isinstance(made, NativeRecipeKwargs):
            raise ValueError("one process of several: the raw variant is measured")
        acceler8.convert(model, acceler8.plan(model, made.recipe))
    optimizer = adamw(model)
    if handler is not None:
        acceler8.attach(model, optimizer)
    return loop(model, optimizer, lambda: torch.autocast(args.device, dtype=torch.bfloat16))


def native(recipe: str, gather: bool = False) -> Callable[[str], Any]:
    def make(strategy: str) -> Any:
        if gather and strategy != "fsdp2":
            raise ValueError("its FP8 all-gather is FSDP2's")
        return NativeRecipeKwargs(recipe=recipe, **({"enable_fsdp_float8_all_gather": True} if gather else {}))

    return make


def ao(recipe: str, gather: bool = False) -> Callable[[str], Any]:
    def make(strategy: str) -> Any:
        if gather and strategy != "fsdp2":
            raise ValueError("its FP8 all-gather is FSDP2's")
        return AORecipeKwargs(recipe=recipe, enable_fsdp_float8_all_gather=gather)

    return make


VARIANTS: dict[str, Build] = {
    "bf16": raw(),
    "bf16-compile": raw(compiled=True),
    "torchao-tensorwise-gather-compile": torchao("tensorwise", gather=True, compiled=True),
    "torchao-tensorwise-compile": torchao("tensorwise", compiled=True),
    "torchao-rowwise-compile": torchao("rowwise", compiled=True),
    "te-delayed": transformer_engine(),
    "acceler8-bf16": ours("bf16"),
    "acceler8-rowwise": ours("fp8", native("rowwise")),
    "acceler8-delayed": ours("fp8", native("delayed")),
    "acceler8-tensorwise": ours("fp8", native("tensorwise")),
    "acceler8-tensorwise-gather": ours("fp8", native("tensorwise", gather=True)),
    "acceler8-rowwise-gather": ours("fp8", native("rowwise", gather=True)),
    "acceler8-torchao-tensorwise-gather-compile": ours("fp8", ao("tensorwise", gather=True), compiled=True),
    "acceler8-te-delayed": ours("fp8", lambda strategy: TERecipeKwargs()),
}

if __name__ == "__main__":
    main()
