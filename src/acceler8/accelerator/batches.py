"""Which samples each process sees: batches of indices, and streams, divided among processes.

The order is Hugging Face Accelerate's. Take two processes, batches of 4 and samples 0 to 12:

    as they come             0123 4567 | 89.. ....
    split_batches=False      rank 0: 0123, then 89 and the start again: 8 9 10 11;  rank 1: 4567, then 12 0 1 2
    split_batches=True       rank 0: 01 45 89 12 0;  rank 1: 23 67 10 11 1 2

A round is complete when every process has its batch. What is left over behind the last complete round is the tail:
dropped (``drop_last``), filled from the start (``even_batches``), or given out as it is, which some ranks then lack.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, cycle, islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, RandomSampler, Sampler

from acceler8.accelerator.epoch_position import own_order
from acceler8.errors import ConfigError


class SeedableSampler(RandomSampler):
    """A random sampler whose order is a matter of a seed and the epoch's number alone."""

    def __init__(self, sampler: Any, seed: int | None) -> None:
        super().__init__(sampler.data_source, sampler.replacement, sampler._num_samples, torch.Generator())
        self.initial_seed = torch.random.initial_seed() if seed is None else seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Shuffle as in this epoch from now on."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        self.generator.manual_seed(self.initial_seed + self.epoch)
        yield from super().__iter__()


class ShardedBatches(Sampler[list[int]]):
    """The batches of one process out of those of ``batch_sampler``; those of one process are all of them.

    skip: batches of this process to leave out at the beginning. used_samples, used_batches: of all processes, to leave
    out before the rest is divided, in the next epoch only.
    resume_from: the ``start`` of an epoch that was interrupted; the next one has its order. resumes_own: whether that
    is the state of the sampler's own generator, or of the global one.
    Raises: ConfigError if ``split_batches`` meets a batch size that the processes do not divide.
    """

    def __init__(
        self,
        batch_sampler: Any,
        count: int = 1,
        index: int = 0,
        *,
        split_batches: bool = False,
        even_batches: bool = True,
    ) -> None:
        self.batch_sampler, self.num_processes, self.process_index = batch_sampler, count, index
        self.split_batches, self.even_batches = split_batches, even_batches
        self.batch_size: int | None = getattr(batch_sampler, "batch_size", None)
        self.drop_last: bool = getattr(batch_sampler, "drop_last", False)
        self.skip = 0
        self.used_samples = self.used_batches = 0
        self.start: Tensor | None = None
        self.resume_from: Tensor | None = None
        self.resumes_own: bool | None = None
        if split_batches:
            check_split(self.batch_size, count)

    @property
    def sampler(self) -> Any:
        """Where the indices come from; the batch sampler itself if it does not say."""
        return getattr(self.batch_sampler, "sampler", self.batch_sampler)

    @property
    def generator(self) -> torch.Generator | None:
        """What the sampler shuffles with, if that is its own."""
        found = getattr(self.sampler, "generator", None)
        return found if isinstance(found, torch.Generator) else None

    @property
    def total_batch_size(self) -> int:
        """Samples of all processes in one round."""
        if self.batch_size is None:
            raise TypeError("the batches have no fixed size, so there is no total batch size")
        return self.batch_size if self.split_batches else self.batch_size * self.num_processes

    def set_epoch(self, epoch: int) -> None:
        """Tell the sampler and the batch sampler, if they want to know."""
        for known in (self.batch_sampler, self.sampler):
            if hasattr(known, "set_epoch"):
                known.set_epoch(epoch)

    def __len__(self) -> int:
        whole = len(self.batch_sampler)
        if self.split_batches or self.num_processes == 1:
            return max(whole - self.skip, 0)
        rounds, rest = divmod(whole, self.num_processes)
        if rest and not self.drop_last and (self.even_batches or self.process_index < rest):
            rounds += 1
        return max(rounds - self.skip, 0)

    def is_even(self) -> bool:
        """Whether the next pass gives every process as many batches as the others.

        Raises: TypeError for a batch sampler without a length.
        """
        count, size = self.num_processes, self.batch_size
        if count == 1 or self.even_batches or self.drop_last:
            return True
        if self.split_batches and size is not None:
            tail = (len(self.sampler) - self.used_samples) % size
            return tail == 0 or tail > size // count * (count - 1)
        if self.used_samples and size is not None:
            return -(-(len(self.sampler) - self.used_samples) // size) % count == 0
        return (len(self.batch_sampler) - self.used_batches) % count == 0

    def __iter__(self) -> Iterator[list[int]]:
        batches = self._begin()
        if self.num_processes > 1:
            batches = self._pieces(batches) if self.split_batches else self._turns(batches)
        return islice(batches, self.skip, None)

    def _begin(self) -> Iterator[list[int]]:
        """All batches, in the order of ``resume_from`` if that is given; runs from the first one asked for."""
        resume, self.resume_from = self.resume_from, None
        generator, is_own = self.generator, self.resumes_own
        if generator is not None:
            if resume is not None:
                generator.set_state(own_order(resume, self.sampler) if is_own is False else resume)
            self.start = generator.get_state()
            yield from self._left()
            return
        if resume is not None and is_own and hasattr(self.sampler, "generator"):
            yield from self._borrowed(resume)
            return
        now = torch.get_rng_state()  # a sampler without its own generator draws from the global one when it starts
        self.start = now if resume is None else resume
        if resume is not None:
            torch.set_rng_state(resume)
        batches = self._left()
        first = next(batches, None)
        if resume is not None:
            torch.set_rng_state(now)
        if first is not None:
            yield first
            yield from batches

    def _borrowed(self, order: Tensor) -> Iterator[list[int]]:
        """In the order that a generator of its own gave the sampler, which has none now."""
        self.start = order
        self.sampler.generator = torch.Generator()
        self.sampler.generator.set_state(order)
        try:
            batches = self._left()
            first = next(batches, None)
        finally:
            self.sampler.generator = None
        if first is not None:
            yield first
            yield from batches

    def _left(self) -> Iterator[list[int]]:
        """The batches of all processes behind those that were used."""
        samples, self.used_samples = self.used_samples, 0
        batches, self.used_batches = self.used_batches, 0
        if not samples:
            yield from islice(iter(self.batch_sampler), batches, None)
            return
        size = self.batch_size
        assert size is not None  # samples are counted only where batches are cuts of them
        indices = islice(iter(self.sampler), samples, None)
        while batch := list(islice(indices, size)):
            if len(batch) == size or not self.drop_last:
                yield batch

    def _turns(self, batches: Iterator[list[int]]) -> Iterator[list[int]]:
        """Whole batches in turn."""
        count, index, size = self.num_processes, self.process_index, self.batch_size
        beginning: list[list[int]] = []
        tail: list[list[int]] = []
        while round_ := list(islice(batches, count)):
            self._check_is_last(tail)
            beginning = beginning or round_
            if len(round_) == count and (size is None or len(round_[-1]) == size):
                yield round_[index]
            else:
                tail = round_
        if not tail or self.drop_last:
            return
        if not self.even_batches:
            yield from tail[index : index + 1]
        elif size is None:  # batches of any size: whole ones again
            yield (tail + list(islice(cycle(beginning), count)))[index]
        else:
            samples = chain(chain.from_iterable(tail), cycle(chain.from_iterable(beginning)))
            yield list(islice(samples, index * size, (index + 1) * size))

    def _pieces(self, batches: Iterator[list[int]]) -> Iterator[list[int]]:
        """A part of every batch."""
        assert self.batch_size is not None
        part = self.batch_size // self.num_processes
        mine = slice(part * self.process_index, part * (self.process_index + 1))
        beginning: list[int] = []
        tail: list[int] = []
        for batch in batches:
            self._check_is_last(tail)
            beginning = beginning or list(batch)
            if len(batch) == self.batch_size:
                yield batch[mine]
            else:
                tail = list(batch)
        if not tail or self.drop_last:
            return
        if self.even_batches:
            tail += islice(cycle(beginning), self.batch_size)
        if piece := tail[mine]:
            yield piece

    def _check_is_last(self, tail: list[Any]) -> None:
        if tail:
            raise ConfigError(
                f"{type(self.batch_sampler).__name__} gave a batch that is not of batch_size={self.batch_size}, and"
                " more behind it; allowed: only the last one; leave batch_size off the batch sampler, whose batches are"
                " then taken as they are"
            )


def check_split(batch_size: Any, count: int) -> None:
    """Raise ConfigError unless the processes divide the batch."""
    if not isinstance(batch_size, int) or batch_size % count:
        raise ConfigError(
            f"split_batches=True got batch_size={batch_size}; allowed: a multiple of the {count} processes; change it,"
            " or leave split_batches out"
        )


class ShardedStream(IterableDataset[Any]):
    """The samples of one process out of an iterable dataset that every process reads from the beginning.

    batch_size: of the DataLoader, as the script gave it. A tail is filled from the first round, or dropped.
    used_samples: of all processes, to leave out.
    """

    def __init__(
        self,
        dataset: Iterable[Any],
        batch_size: int,
        drop_last: bool,
        count: int,
        index: int,
        split_batches: bool = False,
    ) -> None:
        if split_batches:
            check_split(batch_size, count)
        self.dataset, self.drop_last = dataset, drop_last
        self.num_processes, self.process_index, self.split_batches = count, index, split_batches
        self.part = batch_size // count if split_batches else batch_size
        self.epoch = self.used_samples = 0

    @property
    def total_batch_size(self) -> int:
        """Samples of all processes in one round."""
        return self.part * self.num_processes

    def set_epoch(self, epoch: int) -> None:
        """Tell the dataset, if it wants to know."""
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        whole = len(self.dataset)  # type: ignore[arg-type]
        rounds = whole // self.total_batch_size
        if whole % self.total_batch_size and not self.drop_last:
            rounds += 1
        return rounds * self.part

    def __iter__(self) -> Iterator[Any]:
        generator = getattr(self.dataset, "generator", None)
        if isinstance(generator, torch.Generator) and not hasattr(self.dataset, "set_epoch"):
            generator.manual_seed(self.epoch)
        samples, beginning = islice(iter(self.dataset), self.used_samples, None), list[Any]()
        mine = slice(self.part * self.process_index, self.part * (self.process_index + 1))
        while round_ := list(islice(samples, self.total_batch_size)):
            beginning = beginning or round_
            if len(round_) == self.total_batch_size:
                yield from round_[mine]
            elif not self.drop_last:
                yield from (round_ + list(islice(cycle(beginning), self.total_batch_size)))[mine]
