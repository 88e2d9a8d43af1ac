"""Checks that two processes make together; a scenario that returns has passed."""

from __future__ import annotations

import copy
import tempfile
import time
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

import acceler8
from acceler8 import Accelerator, recipes
from acceler8.costs import BF16, CostTable, file_name, user_folder
from acceler8.errors import ConfigError, NotInThisVersionError, ShapeError
from acceler8.nn import state_of
from acceler8.utils import (
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    NativeRecipeKwargs,
)
from tests.accelerator.ddp_parity import Stream
from tests.accelerator.ddp_training import Model, flat
from tests.models import operands

Pair = namedtuple("Pair", "left right")


def rank() -> int:
    return dist.get_rank()


def same_on_all(x: Tensor) -> bool:
    """Equal on both ranks, to the bit."""
    parts = [torch.empty_like(x) for _ in range(2)]
    dist.all_gather(parts, x.contiguous())
    return torch.equal(*parts)


def collectives() -> None:
    a = Accelerator(cpu=True)
    me = a.process_index
    gathered = a.gather(
        {"x": torch.full((2, 3), float(me)), "y": [torch.tensor(me), Pair(torch.ones(1), torch.zeros(0, 2))]}
    )
    assert gathered["x"].tolist() == [[0.0] * 3] * 2 + [[1.0] * 3] * 2
    assert gathered["y"][0].tolist() == [0, 1]
    assert type(gathered["y"][1]) is Pair
    assert gathered["y"][1].right.shape == (0, 2)
    for dtype in (torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.bfloat16, torch.float64):
        assert a.gather(torch.tensor([me, 1]).to(dtype)).tolist() == [0, 1, 1, 1], dtype
    assert a.gather(torch.tensor([me + 1.0]).to(torch.float8_e4m3fn)).float().tolist() == [1.0, 2.0]
    assert type(a.gather(OrderedDict(x=torch.ones(1)))) is OrderedDict
    assert not a.gather(torch.ones(2, requires_grad=True)).requires_grad
    with pytest.raises(ShapeError, match=r"pad_across_processes first") as caught:
        a.gather([torch.ones(2), torch.ones(1 + me)])
    assert f"in process {me}" in str(caught.value)
    with pytest.raises(TypeError, match="gather got a str; allowed: tensors"):
        a.gather(["text"])
    assert a.gather_for_metrics(["a", str(me)]) == ["a", "0", "a", "1"]
    assert a.gather_for_metrics({"k": "v"}) == [{"k": "v"}] * 2
    uneven = a.gather_for_metrics([torch.ones(1 + me)], use_gather_object=True)
    assert [len(t) for t in uneven] == [1, 2]

    assert a.reduce(torch.tensor([me + 1])).item() == 3
    assert a.reduce({"k": torch.tensor(me + 1.0)}, "mean")["k"].item() == 1.5
    assert a.reduce(torch.tensor(me + 1), "mean").item() == 1.5
    assert a.reduce(torch.tensor([me == 1, False]), "max").tolist() == [True, False]
    own = torch.tensor([1.0])
    assert a.reduce(own).item() == 2
    assert own.item() == 1
    with pytest.raises(ConfigError, match="did you mean 'mean'"):
        a.reduce(own, "meen")
    with pytest.raises(ConfigError, match="multiply what it returns"):
        a.reduce(own, scale=2.0)

    padded = a.pad_across_processes([torch.full((1 + me, 2), 5.0), torch.tensor(3)], pad_index=-1)
    assert padded[0].tolist() == ([[5.0, 5.0], [-1.0, -1.0]] if me == 0 else [[5.0, 5.0]] * 2)
    assert padded[1].item() == 3
    first = a.pad_across_processes(torch.full((2, 1 + me), 5), dim=-1, pad_first=True)
    assert first.tolist() == ([[0, 5]] * 2 if me == 0 else [[5, 5]] * 2)

    with a.split_between_processes(["A", "B", "C"]) as mine:
        assert mine == (["A", "B"] if me == 0 else ["C"])
    with a.split_between_processes(("A", "B", "C"), apply_padding=True) as mine:
        assert mine == (("A", "B") if me == 0 else ("C", "C"))
    inputs = {"x": torch.arange(3), "y": [1, 2, 3]}
    with a.split_between_processes(inputs, apply_padding=True) as mine:
        assert mine["x"].tolist() == ([0, 1] if me == 0 else [2, 2])
        assert mine["y"] == ([1, 2] if me == 0 else [3, 3])
    assert len(inputs["x"]) == 3
    with a.split_between_processes(["A"], apply_padding=True) as mine:
        assert mine == ["A"]
    with pytest.raises(ConfigError, match=r"lengths \[1, 2\]"), a.split_between_processes({"x": [1], "y": [1, 2]}):
        pass

    done: list[str] = []
    a.on_main_process(lambda: done.append("main"))()
    a.on_local_main_process(lambda: done.append("local main"))()
    a.on_last_process(lambda: done.append("last"))()
    a.on_process(process_index=1)(lambda: done.append("one"))()
    a.on_local_process(lambda: done.append("local one"), local_process_index=1)()
    assert done == (["main", "local main"] if me == 0 else ["last", "one", "local one"])
    with pytest.raises(ConfigError, match="the number of a process"):
        a.on_process(print)
    for first_of in (a.main_process_first, a.local_main_process_first):
        dist.barrier()
        with first_of():
            if me == 0:
                time.sleep(0.3)
            at = torch.tensor([time.monotonic()], dtype=torch.float64)
        order = a.gather(at)
        assert order[1] - order[0] > -0.05, order
    assert not a.check_trigger()
    if me == 1:
        a.set_trigger()
    assert a.check_trigger()
    assert not a.check_trigger()


def models() -> None:
    a = Accelerator(cpu=True)
    model, other = Model(), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with torch.no_grad():
        other[1].running_mean.fill_(float(rank()))
    frozen = nn.Linear(4, 4).requires_grad_(False)
    prepared = a.prepare(model, other, frozen)
    assert [type(m) for m in prepared] == [DistributedDataParallel, DistributedDataParallel, nn.Linear]
    assert prepared[0].module is model
    assert a.unwrap_model(prepared[0]) is model
    assert a.unwrap_model(frozen) is frozen
    assert a.prepare(model) is prepared[0]
    assert a.prepare(prepared[0]) is prepared[0]
    prepared[1](torch.ones(4, 4) * rank())
    prepared[1](torch.ones(4, 4) * rank())  # buffers are rank 0's when a forward begins
    assert same_on_all(flat(model))
    with a.no_sync(model):  # the inner model will do
        prepared[0](torch.ones(2, 64) * (rank() + 1)).sum().backward()
    assert not same_on_all(model.up.weight.grad)
    prepared[0](torch.ones(2, 64)).sum().backward()
    assert same_on_all(model.up.weight.grad)
    own = DistributedDataParallel(Model())  # wrapped by the script
    assert a.prepare(own) is own
    assert DistributedDataParallelKwargs().to_kwargs() == {}

    each = Accelerator(
        cpu=True, gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2, sync_each_batch=True)
    )
    model = each.prepare(Model())
    with each.accumulate(model):
        assert not each.sync_gradients
        model(torch.ones(2, 64) * (rank() + 1)).sum().backward()
    assert same_on_all(model.module.up.weight.grad)


class Branches(nn.Module):
    """Each process uses its own branch."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.head = nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.branches[rank()](x))


def unused() -> None:
    handler = DistributedDataParallelKwargs(find_unused_parameters=True, comm_hook="fp16")
    a = Accelerator("fp8", recipe="delayed", cpu=True, kwargs_handlers=[handler])
    assert a.ddp_handler is handler
    model = Branches()
    model, optimizer = a.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    for step in range(3):
        a.backward(model(torch.ones(4, 64) * (step + 1) * (rank() + 1)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    assert same_on_all(flat(model))
    data = state_of(model).amax.data
    assert same_on_all(data)
    assert (
        operands(state_of(model).amax)[1] > 0
    ).all()  # a branch that this process did not take has the other's amaxes


def amaxes() -> None:
    """What one rank saw counts for all; a NaN that one rank saw keeps the past of all."""
    a = Accelerator("fp8", recipe="delayed", cpu=True)
    model = acceler8.convert(Model(), recipes.get("delayed"))  # converted by hand, on a clock of its own
    state = state_of(model)
    state.amax.data[3].fill_(1.0 + rank())  # histories become rank 0's
    state.amax.steps = 5 * rank()
    model, optimizer = a.prepare(model, torch.optim.SGD(model.parameters(), lr=0.0))
    assert (state.amax.data[3] == 1).all()
    assert state.amax.steps == 0
    calls = []
    real = dist.all_reduce
    dist.all_reduce = lambda tensor, *args, **kwargs: (calls.append(tensor.numel()), real(tensor, *args, **kwargs))[1]
    try:
        for value in (1.0, 2.0, torch.nan, 4.0):
            before = state.amax.data[2:].clone()
            x = torch.ones(4, 64)
            x[0, 0] = 10 + value if rank() == 1 else 3.0
            loss = model(x).square().mean()
            a.backward(torch.nan_to_num(loss))
            optimizer.step()
            optimizer.zero_grad()
            assert same_on_all(state.amax.data)
            seen = state.amax.data[-1, 0].item()
            if value == value:
                assert seen == 10 + value
            else:
                assert torch.equal(state.amax.data[2:, 0], before[:, 0])
    finally:
        dist.all_reduce = real
    assert calls == [len(state.amax.names)] * 4  # one a step
    acceler8.step(model)  # its own clock, ticked by hand, shares too
    assert same_on_all(state.amax.data)
    plain = a.unwrap_model(model)
    acceler8.restore(plain)
    ticks = len(state.clock._subscribers)
    assert ticks == 0


def found_inf() -> None:
    handler = GradScalerKwargs(init_scale=1024.0)
    a = Accelerator("fp16", cpu=True, kwargs_handlers=[handler])
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model, optimizer, scheduler = a.prepare(model, optimizer, scheduler)
    assert a.scaler.state_dict()["scale"] == 1024.0
    before = flat(model).clone()
    for poisoned in (True, False):
        a.backward(model(torch.ones(2, 64)).square().mean())
        if poisoned and rank() == 1:
            model.module.up.weight.grad[0, 0] = torch.inf
        a.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        assert a.optimizer_step_was_skipped == poisoned
        assert torch.equal(flat(model), before) == poisoned
        assert scheduler.get_last_lr() == [0.1 if poisoned else 0.025]
        assert same_on_all(flat(model))
    assert a.scaler.state_dict()["scale"] == 512.0


def resume() -> None:
    """A loop that stops behind a batch goes on in a fresh loader as if it had not stopped, this epoch and the next."""
    made: dict[str, tuple[Callable[[], DataLoader], dict[str, Any]]] = {
        "shuffled": (lambda: DataLoader(range(37), 4, shuffle=True), {}),
        "generator": (lambda: DataLoader(range(37), 4, shuffle=True, generator=torch.Generator().manual_seed(3)), {}),
        "seedable": (lambda: DataLoader(range(37), 4, shuffle=True), {"use_seedable_sampler": True}),
        "split": (lambda: DataLoader(range(37), 4, shuffle=True), {"split_batches": True}),
        "stream": (lambda: DataLoader(Stream(37), 4), {"dispatch_batches": False}),
        "dispatched": (lambda: DataLoader(Stream(37), 4), {}),
        "dispatched shuffled": (lambda: DataLoader(range(37), 4, shuffle=True), {"dispatch_batches": True}),
        "workers": (lambda: DataLoader(range(37), 4, shuffle=True, num_workers=1), {}),
    }
    for name, (make, options) in made.items():
        for stop in (1, 5, 8):
            torch.manual_seed(9)
            loader = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options)).prepare(make())
            seen: list[Any] = []
            at: Any = None
            for _ in range(3):
                for batch in loader:
                    seen.append(batch.tolist())
                    if len(seen) == stop:
                        at = copy.deepcopy(loader.state_dict()), torch.get_rng_state()
            torch.manual_seed(99)
            again = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options)).prepare(make())
            again.load_state_dict(at[0])
            torch.set_rng_state(at[1])
            assert again.state_dict() is at[0]
            rest = [batch.tolist() for _ in range(3) for batch in again][: len(seen) - stop]
            assert rest == seen[stop:], (name, stop, rest, seen)
    a = Accelerator(cpu=True)
    loader = a.prepare(DataLoader(range(37), 4))
    whole = [batch.tolist() for batch in loader]
    view = a.skip_first_batches(loader, 1)
    batches = iter(view)
    next(batches)
    fresh = a.prepare(DataLoader(range(37), 4))
    fresh.load_state_dict(view.state_dict())  # the view's place, in the whole loader
    assert [batch.tolist() for batch in fresh] == whole[2:]
    assert [batch.tolist() for batch in fresh] == whole
    assert [batch.tolist() for batch in a.skip_first_batches(DataLoader(range(8), 4), 1)] == [[4, 5, 6, 7]]


def loaders() -> None:
    a = Accelerator(cpu=True)
    loader = a.prepare(DataLoader(range(37), 4))
    assert (len(loader), loader.total_batch_size, loader.total_dataset_length) == (5, 8, 37)
    assert a.prepare(loader) is loader
    torch.manual_seed(rank())  # ranks that were not seeded alike still shuffle alike
    for options in ({}, {"use_seedable_sampler": True, "data_seed": 3}):
        shuffling = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options))
        loader = shuffling.prepare(DataLoader(range(16), 4, shuffle=True))
        for _ in range(2):
            gathered = torch.cat([shuffling.gather(batch) for batch in loader]).tolist()
            assert gathered != sorted(gathered)
            assert sorted(gathered) == [*range(16)]
    subset = DataLoader(range(37), 4, sampler=torch.utils.data.SubsetRandomSampler(range(9)))
    kept = []
    for loader in (a.prepare(DataLoader(range(37), 4)), a.prepare(subset), a.prepare(DataLoader(Stream(37), 4))):
        gathered = [a.gather_for_metrics(batch) for batch in loader]
        kept.append(sorted(torch.cat(gathered).tolist()))
        assert loader.end_of_dataloader
    assert kept == [[*range(37)], [*range(9)], [*range(37)]]
    outer = a.prepare(DataLoader(range(40), 4))
    inner = a.prepare(DataLoader(range(9), 4))
    for _ in outer:
        assert sum(len(a.gather_for_metrics(batch)) for batch in inner) == 9
    sized = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=False))

    class Sized(Stream):
        def __len__(self) -> int:
            return self.size

    for options in ({"batch_size": 4}, {"batch_size": 4, "drop_last": True}):
        loader = sized.prepare(DataLoader(Sized(37), **options))
        gathered = [sized.gather_for_metrics(batch) for batch in loader]
        assert len(gathered) == len(loader)
        assert sorted(torch.cat(gathered).tolist()) == [*range(32 if "drop_last" in options else 37)]

    records = [{"text": torch.ones(2, dtype=torch.bool), "n": i} for i in range(5)]
    nested = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    parts = [(b["text"].dtype, b["n"].tolist()) for b in nested.prepare(DataLoader(records, 2))]
    assert parts == [(torch.bool, [0, 1] if rank() == 0 else [2, 3]), (torch.bool, [4] if rank() == 0 else [0])]

    with pytest.raises(ConfigError, match="a multiple of the 2 processes"):
        Accelerator(cpu=True, split_batches=True).prepare(DataLoader(range(9), 3))
    with pytest.raises(ConfigError, match="dataloader_config and split_batches="):
        Accelerator(cpu=True, split_batches=True, dataloader_config=DataLoaderConfiguration())
    with pytest.raises(ConfigError, match="single samples"):
        a.prepare(DataLoader(range(9), batch_size=None))
    with pytest.raises(TypeError, match="dispatch_batches=False"):
        list(nested.prepare(DataLoader(["a", "b", "c", "d"], 2))) if rank() == 0 else _fails_with_rank_0(nested)

    class Own(DataLoader):
        def __iter__(self) -> Iterator[Any]:
            return super().__iter__()

    with pytest.raises(NotInThisVersionError, match="iterates in its own way"):
        a.prepare(Own(range(9)))

    class Broken(IterableDataset):
        def __iter__(self) -> Iterator[int]:
            yield from range(8)
            raise OSError("the disk is gone")

    with pytest.raises(OSError if rank() == 0 else RuntimeError, match="the disk is gone"):
        list(a.prepare(DataLoader(Broken(), 2)))


def _fails_with_rank_0(accelerator: Accelerator) -> None:
    try:
        list(accelerator.prepare(DataLoader(["a", "b", "c", "d"], 2)))
    except RuntimeError as error:
        raise TypeError(str(error)) from None


def joined() -> None:
    """Uneven batches: 37 samples make 5 batches for one process and 5 for the other, 33 make 5 and 4."""
    a = Accelerator("bf16", cpu=True, even_batches=False)
    model = Model()
    data = torch.randn(33, 64, generator=torch.Generator().manual_seed(1))
    model, optimizer, loader = a.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, 4))
    with a.join_uneven_inputs([model]):
        steps = 0
        for batch in loader:
            a.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
    assert steps == (5 if rank() == 0 else 4)
    even = Accelerator(cpu=True)
    loader = even.prepare(DataLoader(data, 4))
    with even.join_uneven_inputs([], even_batches=False):
        assert len(loader) == (5 if rank() == 0 else 4)
    assert len(loader) == 5
    delayed = Accelerator("fp8", recipe="delayed", cpu=True)
    model = delayed.prepare(Model())
    with (
        pytest.raises(NotInThisVersionError, match="keep even_batches=True"),
        delayed.join_uneven_inputs([model], False),
    ):
        pass
    with delayed.join_uneven_inputs([model]):
        pass


def cost_tables() -> None:
    """Machines may have tables of their own; all plan by the first one's, or by none. The GPU is only a name here."""
    shapes = [(64, k, n) for k in (16, 512) for n in (16, 512)]

    def save(fp8: float) -> None:
        entries = {BF16: dict.fromkeys(shapes, 1.0), "rowwise": dict.fromkeys(shapes, fp8)}
        facts = {"torch": "2.11", "date": "2026-11-30", "commit": "a", "source": "measured"}
        CostTable(gpu="Some GPU", entries=entries, **facts).save(user_folder() / file_name("Some GPU"))

    def fp8_layers_of(*, never_slower: bool = True) -> int:
        handler = NativeRecipeKwargs(tokens=64, never_slower=never_slower)
        a = Accelerator("fp8", cpu=True, kwargs_handlers=[handler])
        a.prepare(Model())
        assert a.plan is not None
        return len(a.plan.fp8_names)

    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as own:
        patch.setenv("XDG_DATA_HOME", own)
        patch.setattr("acceler8.conversion.speed.gpu_of", lambda device: "Some GPU")
        patch.setattr("acceler8.accelerator.accelerator.gpu_of", lambda device: "Some GPU")
        everything = fp8_layers_of()
        assert everything > 0
        if rank() == 1:
            save(2.0)
        assert fp8_layers_of() == everything  # the first has none
        save(2.0 if rank() == 0 else 0.5)
        assert fp8_layers_of() == 0
        assert fp8_layers_of(never_slower=False) == everything
        if rank() == 1:
            (Path(own) / "acceler8" / "cost_tables" / file_name("Some GPU")).unlink()
        assert fp8_layers_of() == 0


SCENARIOS = {
    work.__name__: work
    for work in (collectives, models, unused, amaxes, found_inf, resume, loaders, joined, cost_tables)
}
