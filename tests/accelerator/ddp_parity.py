"""The same code under Hugging Face Accelerate and under acceler8: order of data, losses, learning rates, lengths."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

EPOCHS = 3


class Ours:
    name = "acceler8"

    @staticmethod
    def accelerator(**arguments: Any) -> Any:
        from acceler8 import Accelerator
        from acceler8.utils import DataLoaderConfiguration

        return Ours._make(Accelerator, DataLoaderConfiguration, arguments)

    @staticmethod
    def _make(kind: Any, configuration: Any, arguments: dict[str, Any]) -> Any:
        loader = {k: arguments.pop(k) for k in list(arguments) if k in configuration.__dataclass_fields__}
        return kind(cpu=True, dataloader_config=configuration(**loader), **arguments)


class Theirs:
    name = "accelerate"

    @staticmethod
    def accelerator(**arguments: Any) -> Any:
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState, GradientState
        from accelerate.utils import DataLoaderConfiguration

        GradientState._reset_state()
        AcceleratorState._reset_state(reset_partial_state=True)
        return Ours._make(Accelerator, DataLoaderConfiguration, arguments)


class Stream(IterableDataset):
    """Numbers from 0; with ``shuffled`` in the order of a generator, as Accelerate seeds it by epoch."""

    def __init__(self, size: int, shuffled: bool = False) -> None:
        self.size = size
        if shuffled:
            self.generator = torch.Generator()

    def __iter__(self) -> Iterator[int]:
        if hasattr(self, "generator"):
            yield from torch.randperm(self.size, generator=self.generator).tolist()
        else:
            yield from range(self.size)


class OwnSampler:
    """A batch sampler of one's own; batches of one size with ``batch_size``, else of growing sizes."""

    def __init__(self, size: int, batch_size: int | None) -> None:
        self.size = size
        if batch_size is not None:
            self.batch_size = batch_size

    def batches(self) -> list[list[int]]:
        if hasattr(self, "batch_size"):
            return [list(range(i, min(i + self.batch_size, self.size))) for i in range(0, self.size, self.batch_size)]
        return [list(range(i * (i + 1) // 2, (i + 1) * (i + 2) // 2)) for i in range(5)]

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches())

    def __len__(self) -> int:
        return len(self.batches())


def numbers(size: int) -> Tensor:
    return torch.arange(size)


# name -> (loader, options of DataLoaderConfiguration)
Case = tuple[Callable[[], DataLoader], dict[str, Any]]
LOADERS: dict[str, Case] = {}
for size in (3, 8, 37):
    for options in (
        {},
        {"split_batches": True},
        {"even_batches": False},
        {"split_batches": True, "even_batches": False},
    ):
        for drop_last in (False, True):
            name = f"{size} {' '.join(options)} {'drop_last' * drop_last}"
            LOADERS[name] = (
                partial(lambda n, d: DataLoader(numbers(n), batch_size=4, drop_last=d), size, drop_last),
                options,
            )
for options in (
    {},
    {"split_batches": True},
    {"use_seedable_sampler": True},
    {"use_seedable_sampler": True, "data_seed": 5},
):
    LOADERS[f"shuffled {options}"] = (lambda: DataLoader(numbers(37), batch_size=4, shuffle=True), options)
LOADERS |= {
    "shuffled by a generator": (
        lambda: DataLoader(numbers(37), 4, shuffle=True, generator=torch.Generator().manual_seed(3)),
        {},
    ),
    "shuffled in one's own batches": (
        lambda: DataLoader(numbers(37), batch_sampler=BatchSampler(RandomSampler(range(37)), 4, False)),
        {},
    ),
    "with replacement": (
        lambda: DataLoader(numbers(20), 4, sampler=WeightedRandomSampler([1.0] * 20, 20, generator=torch.Generator())),
        {},
    ),
    "own batch sampler": (lambda: DataLoader(numbers(37), batch_sampler=OwnSampler(37, 4)), {}),
    "own batches of any size": (lambda: DataLoader(numbers(37), batch_sampler=OwnSampler(37, None)), {}),
    "own batches of any size, uneven": (
        lambda: DataLoader(numbers(37), batch_sampler=OwnSampler(37, None)),
        {"even_batches": False},
    ),
    "a batch sampler as the sampler": (
        lambda: DataLoader(numbers(37), sampler=BatchSampler(SequentialSampler(range(37)), 4, False), batch_size=None),
        {},
    ),
    "dispatched": (lambda: DataLoader(numbers(37), batch_size=4), {"dispatch_batches": True}),
    "dispatched drop_last": (lambda: DataLoader(numbers(37), batch_size=4, drop_last=True), {"dispatch_batches": True}),
    "dispatched split": (lambda: DataLoader(numbers(37), 4), {"dispatch_batches": True, "split_batches": True}),
    "dispatched shuffled": (lambda: DataLoader(numbers(37), 4, shuffle=True), {"dispatch_batches": True}),
    "with workers": (lambda: DataLoader(numbers(21), batch_size=4, shuffle=True, num_workers=1), {}),
}
for size in (3, 16, 37):
    for options in (
        {},
        {"dispatch_batches": False},
        {"split_batches": True},
        {"dispatch_batches": False, "split_batches": True},
    ):
        for drop_last in (False, True):
            name = f"stream {size} {' '.join(options)} {'drop_last' * drop_last}"
            LOADERS[name] = (
                partial(lambda n, d: DataLoader(Stream(n), batch_size=4, drop_last=d), size, drop_last),
                options,
            )
LOADERS["stream shuffled"] = (lambda: DataLoader(Stream(13, True), 4), {"dispatch_batches": False})


def orders(side: Any) -> dict[str, Any]:
    """What each loader gives this process, or how it failed."""
    found: dict[str, Any] = {}
    for name, (make, options) in LOADERS.items():
        try:
            found[name] = order(side, make, options)
        except Exception as error:
            found[name] = {"error": f"{type(error).__name__}: {error}"}
    return found


def order(side: Any, make: Callable[[], DataLoader], options: dict[str, Any]) -> dict[str, Any]:
    """Epochs, flags of accumulation, an epoch that was set, one without its first batches, the random state behind."""
    torch.manual_seed(7)
    accelerator = side.accelerator(gradient_accumulation_steps=2, **options)
    loader = accelerator.prepare(make())
    epochs = [[batch.tolist() for batch in loader] for _ in range(EPOCHS)]
    flags = []
    for _ in loader:
        with accelerator.accumulate():
            flags.append(accelerator.sync_gradients)
    loader.set_epoch(1)
    again = [batch.tolist() for batch in loader]
    state = torch.get_rng_state()
    skipped = [batch.tolist() for batch in accelerator.skip_first_batches(loader, 2)]
    length = None if isinstance(loader.dataset, IterableDataset) else len(loader)
    return {"epochs": epochs, "flags": flags, "again": again, "skipped": skipped, "length": length, "state": state}


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(16, 32), nn.Linear(32, 4)
        generator = torch.Generator().manual_seed(4)
        for p in self.parameters():
            nn.init.normal_(p, std=0.2, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.gelu(self.up(x)))


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.05, total_steps=15),
    "linear": lambda o: torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.1, total_iters=12),
}


def training(side: Any) -> dict[str, Any]:
    """Losses, learning rates and metrics of short runs on 37 samples, batches of 4, two micro-batches a step."""
    found = {}
    for precision in ("no", "bf16"):
        for kind, options in (
            ("lambda", {}),
            ("one cycle", {}),
            ("linear", {"split_batches": True}),
            ("lambda", {"step_scheduler_with_optimizer": False}),
        ):
            torch.manual_seed(11)
            accelerator = side.accelerator(mixed_precision=precision, gradient_accumulation_steps=2, **options)
            data = torch.randn(37, 16, generator=torch.Generator().manual_seed(5))
            target = data[:, :4].argmax(1)
            model = Classifier()
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
            scheduler = SCHEDULERS[kind](optimizer)
            loader = DataLoader(TensorDataset(data, target), batch_size=4, shuffle=True)
            held_out = DataLoader(TensorDataset(data, target, torch.arange(37)), batch_size=4)
            model, optimizer, loader, held_out, scheduler = accelerator.prepare(
                model, optimizer, loader, held_out, scheduler
            )
            losses, rates, metrics = [], [], []
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the scheduler that moves at every call
                for _ in range(2):
                    for x, y in loader:
                        with accelerator.accumulate(model):
                            loss = F.cross_entropy(model(x), y)
                            accelerator.backward(loss)
                            if accelerator.sync_gradients:
                                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                            optimizer.step()
                            scheduler.step()
                            optimizer.zero_grad()
                        losses.append(accelerator.gather(loss.detach()).tolist())
                        rates.append(scheduler.get_last_lr()[0])
                    seen = []
                    for x, y, index in held_out:
                        with torch.no_grad():
                            guess = model(x).argmax(-1)
                        guess, y, index = accelerator.gather_for_metrics((guess, y, index))
                        names = accelerator.gather_for_metrics([f"n{i}" for i in index[:2].tolist()])
                        seen.append((index.tolist(), guess.tolist(), len(names)))
                    metrics.append(seen)
            found[f"{precision} {kind} {options}"] = {"losses": losses, "rates": rates, "metrics": metrics}
    return found


SCENARIOS = {
    f"{work.__name__}-{side.name}": partial(work, side) for work in (orders, training) for side in (Ours, Theirs)
}
