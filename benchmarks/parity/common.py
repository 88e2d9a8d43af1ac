"""What the parity scripts share: MiniLM with a head of two classes on MRPC, trained twice by a raw library and once
through acceler8 from the same weights, batches and seeds, and the two timed step by step in one process.

Where every kernel is deterministic the losses must be equal, bit for bit. Where they are not, two raw runs differ too:
what they differ by is the spread, and acceler8's metrics must lie within the raw ones widened by it. Which of the two
holds is said.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# cuBLAS is deterministic with a workspace of its own; read when CUDA starts
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import spread
import transformers
from nlp_data import load_model, read_mrpc

transformers.logging.set_verbosity_error()  # a new head is what is wanted
transformers.logging.disable_progress_bar()

Batch = dict[str, Tensor]
MULTIPLE = 16  # of the length: raw libraries refuse other numbers of tokens
WARM_UP = 5
MOST_TIME, MOST_MEMORY = 1.02, 1.01


@dataclass
class Trainer:
    """A model ready for training by one of the two ways."""

    model: nn.Module
    step: Callable[[Batch], Tensor]
    """Forward, backward, optimizer; returns the loss."""
    state: Callable[[], dict[str, Tensor]]
    """The whole state_dict, on process 0; every process calls it."""


Make = Callable[[nn.Module, argparse.Namespace], Trainer]


@dataclass
class Outcome:
    """What one training gave."""

    before: dict[str, float]
    after: dict[str, float]
    losses: list[float] = field(default_factory=list)


def arguments(description: str, **defaults: Any) -> argparse.Namespace:
    """The scripts' command line."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    beside = Path(__file__).parents[2].parent / "shared" / "data" / "mrpc"
    parser.add_argument("--data", type=Path, default=beside, help="folder with MRPC's train.tsv and test.tsv")
    parser.add_argument("--model", default="minilm", help="minilm, or a folder as transformers saves it")
    parser.add_argument("--recipe", default=defaults["recipe"], help="a word of acceler8's vocabulary")
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--max_length", type=int, default=64)
    parser.add_argument("--eval_samples", type=int, help="evaluate on so many; default: all")
    parser.add_argument("--timed_steps", type=int, default=40, help="of each side; 0: none")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--strategy", choices=spread.STRATEGIES, default="single", help="how processes share the work")
    parser.add_argument("--json", type=Path, help="write the result here")
    args = parser.parse_args()
    if not (args.data / "train.tsv").exists():
        raise SystemExit(f"--data: {args.data} has no train.tsv; MRPC is Microsoft's, download it and name its folder")
    if args.steps < 1 or args.batch < 1:
        raise SystemExit(f"--steps {args.steps} and --batch {args.batch}; allowed: 1 or more")
    spread.join(args)
    if args.batch % spread.processes():
        raise SystemExit(f"--batch {args.batch} over {spread.processes()} processes; allowed: a multiple of these")
    return args


class Data:
    """MRPC in batches, the same ones for everybody."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.tokenizer, _ = load_model(args.model)
        self.train, self.test = read_mrpc(args.data)
        self.test = self.test[: args.eval_samples]

    def _batch(self, samples: list[Any]) -> Batch:
        texts = [list(column) for column in zip(*(sample[0] for sample in samples), strict=True)]
        made = self.tokenizer(
            *texts,
            truncation=True,
            max_length=self.args.max_length,
            padding=True,
            pad_to_multiple_of=MULTIPLE,
            return_tensors="pt",
        )
        batch = dict(made) | {"labels": torch.tensor([sample[1] for sample in samples])}
        return {name: tensor.to(self.args.device) for name, tensor in batch.items()}

    def training(self) -> Iterator[Batch]:
        """``--steps`` batches of full size, of which each process gets its share."""
        generator, size, left = random.Random(self.args.seed), self.args.batch, self.args.steps
        share = size // spread.processes()
        while left:
            order = list(range(len(self.train)))
            generator.shuffle(order)
            for start in range(0, len(order) - size + 1, size):
                first = start + share * spread.rank()
                yield self._batch([self.train[i] for i in order[first : first + share]])
                left -= 1
                if not left:
                    return

    def evaluation(self) -> Iterator[Batch]:
        """The test set; the last batch is short."""
        for start in range(0, len(self.test), 64):
            yield self._batch(self.test[start : start + 64])


def fresh_model(args: argparse.Namespace) -> nn.Module:
    """The model with a head of this seed, in FP32."""
    torch.manual_seed(args.seed)
    _, model = load_model(args.model)
    return model.to(args.device)


def plain_copy(state: dict[str, Tensor], args: argparse.Namespace) -> nn.Module:
    """The weights in the plain model, so that all are evaluated alike. TransformerEngine's own entries are left out."""
    plain = fresh_model(args)
    plain.load_state_dict({k: v for k, v in state.items() if not k.endswith("_extra_state")})
    return plain.eval()


def metrics(trainer: Trainer, args: argparse.Namespace, data: Data) -> dict[str, float]:
    """Accuracy and F1 of the positive class, in percent; process 0 evaluates for all."""
    state = trainer.state()
    return dict(spread.of_first(_evaluate(state, args, data) if spread.rank() == 0 else None))


def _evaluate(state: dict[str, Tensor], args: argparse.Namespace, data: Data) -> dict[str, float]:
    plain = plain_copy(state, args)
    right = total = both = guessed = true = 0
    for batch in data.evaluation():
        with torch.no_grad(), autocast(args):
            guesses = plain(**batch).logits.argmax(-1)
        labels = batch["labels"]
        right, total = right + int((guesses == labels).sum()), total + len(labels)
        both, guessed = both + int((guesses & labels).sum()), guessed + int(guesses.sum())
        true += int(labels.sum())
    return {"accuracy": 100 * right / total, "f1": 100 * 2 * both / max(1, guessed + true)}


def run(make: Make, args: argparse.Namespace, data: Data) -> Outcome:
    """One training from the start."""
    trainer = make(fresh_model(args), args)
    outcome = Outcome(before=metrics(trainer, args, data), after={})
    torch.manual_seed(args.seed + 1)  # making a library's layers drew numbers; dropout is to draw the same ones
    losses = [trainer.step(batch).detach() for batch in data.training()]
    outcome.losses = spread.of_first([float(loss) for loss in losses])
    outcome.after = metrics(trainer, args, data)
    return outcome


def timed(sides: dict[str, Make], args: argparse.Namespace, data: Data) -> dict[str, dict[str, float]]:
    """Milliseconds of a step, in turn on one batch, and the memory that it takes beside what lies there before."""
    batch = next(data.training())
    trainers = {name: make(fresh_model(args), args) for name, make in sides.items()}
    on_gpu = args.device != "cpu"
    times: dict[str, list[float]] = {name: [] for name in trainers}
    peaks: dict[str, float] = {}
    for i in range(WARM_UP + args.timed_steps):
        for name, trainer in trainers.items():
            if on_gpu:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            held, start = torch.cuda.memory_allocated() if on_gpu else 0, time.perf_counter()
            trainer.step(batch)
            if on_gpu:
                torch.cuda.synchronize()
                peaks[name] = (torch.cuda.max_memory_allocated() - held) / 2**20
            if i >= WARM_UP:
                times[name].append(1e3 * (time.perf_counter() - start))
    return {name: {"step_ms": statistics.median(ms), "peak_mib": peaks.get(name, 0.0)} for name, ms in times.items()}


def held_memory(make: Make, args: argparse.Namespace, data: Data) -> float:
    """MiB that model, gradients, optimizer states and caches hold behind two steps."""
    if args.device == "cpu":
        return 0.0
    gc.collect()
    before = torch.cuda.memory_allocated()
    trainer = make(fresh_model(args), args)
    batch = next(data.training())
    for _ in range(2):
        trainer.step(batch)
    gc.collect()
    return (torch.cuda.memory_allocated() - before) / 2**20


def compare(backend: str, raw: Make, ours: Make, args: argparse.Namespace, libraries: tuple[str, ...]) -> int:
    """Train raw, raw again and ours, time them, print and write the result. Returns the exit status."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    data = Data(args)
    outcomes = {"raw": run(raw, args, data), "raw again": run(raw, args, data), "acceler8": run(ours, args, data)}
    torch.use_deterministic_algorithms(False)
    result = {"backend": backend, "recipe": args.recipe, **facts(args, libraries), **verdict(outcomes)}
    if args.timed_steps:
        result |= overhead(raw, ours, args, data)
    if spread.rank() == 0:
        show(result)
    if args.json and spread.rank() == 0:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    spread.leave()
    return 0 if result["parity"] != "differs" and result.get("overhead_ok", True) else 1


def verdict(outcomes: dict[str, Outcome]) -> dict[str, Any]:
    """``bit-equal``, ``within the spread of two raw runs`` or ``differs``, with the numbers."""
    raw, again, ours = (outcomes[name] for name in ("raw", "raw again", "acceler8"))
    found: dict[str, Any] = {
        "metrics": {name: {"before": o.before, "after": o.after} for name, o in outcomes.items()},
        "last_loss": {name: o.losses[-1] for name, o in outcomes.items()},
        "raw_is_deterministic": raw.losses == again.losses,
        "first_step_that_differs": next(
            (i for i, pair in enumerate(zip(raw.losses, ours.losses, strict=True)) if pair[0] != pair[1]), None
        ),
    }
    if raw.losses == ours.losses and raw.after == ours.after:
        return found | {"parity": "bit-equal"}
    inside = []
    for metric, value in ours.after.items():
        low, high = sorted((raw.after[metric], again.after[metric]))
        inside.append(low - (high - low) <= value <= high + (high - low))
    return found | {"parity": "within the spread of two raw runs" if all(inside) else "differs"}


def overhead(raw: Make, ours: Make, args: argparse.Namespace, data: Data) -> dict[str, Any]:
    """Step time and memory of acceler8 over the raw library's."""
    found = timed({"raw": raw, "acceler8": ours}, args, data)
    held = {name: held_memory(make, args, data) for name, make in (("raw", raw), ("acceler8", ours))}
    for name, row in found.items():
        row["held_mib"] = held[name]
    time_ratio = found["acceler8"]["step_ms"] / found["raw"]["step_ms"]
    sums = {name: row["peak_mib"] + row["held_mib"] for name, row in found.items()}
    memory_ratio = sums["acceler8"] / sums["raw"] if sums["raw"] else 1.0
    return {
        "steps": found,
        "time_ratio": time_ratio,
        "memory_ratio": memory_ratio,
        "overhead_ok": time_ratio <= MOST_TIME and memory_ratio <= MOST_MEMORY,
    }


def facts(args: argparse.Namespace, libraries: tuple[str, ...]) -> dict[str, Any]:
    """What a number needs to be understood later."""
    device = "CPU" if args.device == "cpu" else torch.cuda.get_device_name()
    versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers", *libraries)}
    command = ["git", "rev-parse", "--short", "HEAD"]
    git = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    settings = {name: getattr(args, name) for name in ("strategy", "steps", "batch", "max_length", "lr", "seed")}
    settings["processes"] = spread.processes()
    return {
        "device": device,
        "versions": versions,
        "commit": git.stdout.strip(),
        "date": time.strftime("%Y-%m-%d"),
        "settings": settings,
    }


def show(result: dict[str, Any]) -> None:
    """The result in a few lines."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    settings = result["settings"]
    spread_said = f"{settings['strategy']}, {settings['processes']} process(es)"
    print(f"{result['backend']}, recipe {result['recipe']}, {spread_said}, {result['device']}, {versions}")
    for name, found in result["metrics"].items():
        said = "; ".join(f"{when} accuracy {m['accuracy']:.2f} %, F1 {m['f1']:.2f} %" for when, m in found.items())
        print(f"  {name:10} {said}; last loss {result['last_loss'][name]:.6f}")
    print(f"parity: {result['parity']} (raw runs are {'' if result['raw_is_deterministic'] else 'not '}deterministic)")
    if "steps" in result:
        for name, row in result["steps"].items():
            held = f", peak {row['peak_mib']:.1f} MiB over {row['held_mib']:.1f} held" if row["held_mib"] else ""
            print(f"  {name:10} {row['step_ms']:.3f} ms a step{held}")
        is_ok = "ok" if result["overhead_ok"] else f"too much; allowed: {MOST_TIME} and {MOST_MEMORY}"
        print(f"overhead: time x{result['time_ratio']:.4f}, memory x{result['memory_ratio']:.4f}: {is_ok}")


def raw_by(
    exchange: Callable[[nn.Module, argparse.Namespace], None],
    context: Callable[[nn.Module, argparse.Namespace], AbstractContextManager[Any]] | None = None,
    attach: Callable[[nn.Module, Any], object] = lambda model, optimizer: None,
) -> Make:
    """The loop without acceler8: ``exchange`` puts the library's layers in, ``context`` is round forward."""

    def make(model: nn.Module, args: argparse.Namespace) -> Trainer:
        exchange(model, args)

        def around() -> AbstractContextManager[Any]:
            stack = ExitStack()
            stack.enter_context(autocast(args))
            if context is not None:
                stack.enter_context(context(model, args))
            return stack

        made = spread.Spread(model, args, around)
        if isinstance(made.optimizer, torch.optim.Optimizer):  # DeepSpeed's own is none
            attach(model, made.optimizer)
        model.train()
        return Trainer(model, made.step, made.state)

    return make


def plugins(args: argparse.Namespace) -> dict[str, Any]:
    """What an Accelerator is told of the strategy."""
    from acceler8.utils import DeepSpeedPlugin, FullyShardedDataParallelPlugin

    if args.strategy == "fsdp2":
        plugin: Any = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="TRANSFORMER_BASED_WRAP",
            transformer_cls_names_to_wrap=["BertLayer"],
            mixed_precision_policy=spread.policy(),
        )
        return {"fsdp_plugin": plugin}
    if args.strategy.startswith("zero"):
        # process 0 alone makes a model to evaluate, which must not be spread over processes
        made = DeepSpeedPlugin(hf_ds_config=spread.deepspeed_json(args), zero3_init_flag=False)
        return {"deepspeed_plugin": made}
    return {}


def through_accelerator(handler: Any) -> Make:
    """The loop of a script with acceler8."""

    def make(model: nn.Module, args: argparse.Namespace) -> Trainer:
        from acceler8 import Accelerator

        is_cpu = args.device == "cpu"
        accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[handler], cpu=is_cpu, **plugins(args))
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=args.lr)
        model, optimizer = accelerator.prepare(model, optimizer)
        model.train()

        def step(batch: Batch) -> Tensor:
            loss: Tensor = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return Trainer(model, step, lambda: accelerator.get_state_dict(model))

    return make


def autocast(args: argparse.Namespace) -> Any:
    """BF16, as acceler8 runs a model's forward."""
    return torch.autocast("cpu" if args.device == "cpu" else "cuda", dtype=torch.bfloat16)
