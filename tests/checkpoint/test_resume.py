"""A run that stops and resumes ends where the run that did not stop ends, to the bit."""

from __future__ import annotations

import random

import pytest
import torch
from torch.optim import lr_scheduler
from torch.utils.data import RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from acceler8.checkpoint import load, save
from tests.checkpoint.support import OPTIMIZERS, Net, assert_same, train_step, two_groups

STEPS, STOP = 8, 3

SCHEDULERS = {
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=STEPS),
    "multistep": lambda o: lr_scheduler.MultiStepLR(o, milestones=[2, 5]),
    "onecycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.02, total_steps=STEPS),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, total_iters=2), lr_scheduler.CosineAnnealingLR(o, T_max=STEPS)],
        milestones=[2],
    ),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
}


def build(make_generator, seed, dtype, optimizer, scheduler):
    net = Net(make_generator(seed), dtype)
    made = OPTIMIZERS[optimizer](two_groups(net))
    return net, made, SCHEDULERS[scheduler](made)


def run(net, optimizer, scheduler, steps):
    losses = []
    for step in steps:
        losses.append(train_step(net, optimizer, step))
        scheduler.step()
    return losses


CASES = [
    *(("adamw", scheduler, torch.float32) for scheduler in SCHEDULERS),
    *((optimizer, "cosine", torch.bfloat16) for optimizer in OPTIMIZERS if "tensor_lr" not in optimizer),
]


@pytest.mark.parametrize(("optimizer", "scheduler", "dtype"), CASES)
def test_resumed_training_equals_uninterrupted(tmp_path, make_generator, optimizer, scheduler, dtype):
    torch.manual_seed(7)
    whole = build(make_generator, 1, dtype, optimizer, scheduler)
    expected = run(*whole, range(STEPS))

    torch.manual_seed(7)
    first = build(make_generator, 1, dtype, optimizer, scheduler)
    losses = run(*first, range(STOP))
    save(
        tmp_path / "c",
        model=first[0],
        optimizer=first[1],
        extra={"scheduler": first[2]},
        progress={"step": STOP},
    )

    torch.manual_seed(99)  # another process: other weights, other random numbers
    second = build(make_generator, 2, dtype, optimizer, scheduler)
    checkpoint = load(tmp_path / "c")
    checkpoint.restore(model=second[0], optimizer=second[1], extra={"scheduler": second[2]})
    losses += run(*second, range(checkpoint.progress["step"], STEPS))

    assert losses == expected
    assert_same(dict(second[0].state_dict()), dict(whole[0].state_dict()))
    assert_same(second[1].state_dict(), whole[1].state_dict())
    assert second[2].get_last_lr() == whole[2].get_last_lr()


def test_saving_does_not_change_the_run(tmp_path, make_generator):
    runs = []
    for saves in (False, True):
        torch.manual_seed(7)
        random.seed(7)
        net, optimizer, scheduler = build(make_generator, 1, torch.float32, "adamw", "cosine")
        losses = run(net, optimizer, scheduler, range(STOP))
        if saves:
            save(tmp_path / "c", model=net, optimizer=optimizer, extra={"scheduler": scheduler})
        runs.append([*losses, *run(net, optimizer, scheduler, range(STOP, STEPS)), random.random()])
    assert runs[0] == runs[1]


def loader(seed):
    data = list(range(24))
    sampler = RandomSampler(data, generator=torch.Generator().manual_seed(seed))
    return StatefulDataLoader(data, batch_size=2, sampler=sampler)


def test_a_loader_goes_on_in_the_middle_of_an_epoch(tmp_path, make_generator):
    net = Net(make_generator(1))
    torch.manual_seed(7)
    first = loader(5)
    batches = iter(first)
    seen = [next(batches).tolist() for _ in range(4)]
    save(tmp_path / "c", model=net, extra={"loader": first})
    rest = [batch.tolist() for batch in batches]
    assert sorted(item for batch in seen + rest for item in batch) == list(range(24))

    torch.manual_seed(99)
    second = loader(5)
    load(tmp_path / "c").restore(extra={"loader": second})
    assert [batch.tolist() for batch in second] == rest
