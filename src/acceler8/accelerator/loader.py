"""The loader that ``prepare`` returns: this process's batches on its device, word of the last one, and where to resume.

Under it is torchdata's StatefulDataLoader, made from the DataLoader that the script gave: same dataset, workers and
collating, other batches of indices. What that cannot know is added to its state: the number of the epoch, and where
the shuffling generator stood when the epoch began.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler as StatefulRandomSampler

from acceler8.accelerator import epoch_position
from acceler8.accelerator.batches import SeedableSampler, ShardedBatches, ShardedStream, check_split
from acceler8.accelerator.dispatch import Part, Reader
from acceler8.accelerator.gradients import GradientState, LoaderPlace
from acceler8.accelerator.nested import send_to_device
from acceler8.accelerator.processes import Processes
from acceler8.config.run_handlers import DataLoaderConfiguration
from acceler8.errors import CheckpointError, ConfigError, NotInThisVersionError

_log = logging.getLogger("acceler8")
_SAID = ("sampler", "samples", "num_processes", "total_batch_size", "batch_size", "num_workers")  # before the rest
RNG_TYPES = ("generator", "torch", "cuda")
# what a DataLoader does with batches of indices, whoever makes them
_KEPT = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
    "in_order",
    "snapshot_every_n_steps",
)


@dataclass(frozen=True, kw_only=True)
class LoaderContext:
    """What all loaders of one Accelerator share."""

    processes: Processes
    gradients: GradientState
    config: DataLoaderConfiguration
    device: torch.device | None
    """Where batches go; None: they stay."""
    rng_types: tuple[str, ...] = ("generator",)
    """Random states that become rank 0's on all ranks when an epoch begins."""
    strategy: str = ""
    """A strategy under which every process must have as many batches as the others; empty: none does."""


class AcceleratedLoader:
    """Wraps a StatefulDataLoader; reads one batch ahead, so that the last batch is known while it is used.

    batches: who divides the indices; None for a dataset that is a stream. reader: divides what rank 0 reads. given: the
    script's own loader. shared: a generator that becomes rank 0's when an epoch begins. ``iteration`` is the epoch,
    from 0; a complete pass moves on to the next.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        context: LoaderContext,
        *,
        batches: ShardedBatches | None = None,
        reader: Reader | None = None,
        drop_last: bool = False,
        shared: torch.Generator | None = None,
        given: DataLoader[Any] | None = None,
    ) -> None:
        self.given = loader if given is None else given
        self.loader, self.context, self.batches, self.reader = loader, context, batches, reader
        self.device, self.gradients = context.device, context.gradients
        self.iteration, self.skip, self._skipped = 0, 0, 0
        # what was used before this pass, and rounds of this process in it
        self._base, self._rounds = epoch_position.START, 0
        self._drop_last, self._shared = drop_last, shared
        self._place: LoaderPlace | None = None
        self._unread = 0  # batches of a stream to read and drop
        self._resume: dict[str, Any] | None = None
        self._resume_point: dict[str, Any] | None = None
        self._has_begun = False  # the next pass is of an epoch that began before, and whose draws were made
        self._is_resumed = False  # from load_state_dict to the next pass
        self._origin: AcceleratedLoader | None = None  # what this one reads the interrupted epoch for

    def __getattr__(self, name: str) -> Any:
        if "loader" not in self.__dict__:  # while being copied or unpickled
            raise AttributeError(name)
        return getattr(self.loader, name)

    def __len__(self) -> int:
        """Batches of this process in a whole epoch, or that a loader of ``skip_first_batches`` gives.

        So it is behind a resume too, whose first pass gives what is left: steps of a schedule are counted by it.
        """
        whole = len(self.loader)
        if self.reader is not None and not self.reader.split:
            count = self.reader.processes.num_processes
            whole = whole // count if self._drop_last else -(-whole // count)
        return whole if self._skips_in_sampler else max(whole - self.skip, 0)

    @property
    def _skips_in_sampler(self) -> bool:
        return self.batches is not None and self.reader is None

    @property
    def total_batch_size(self) -> int:
        """Samples of all processes in one step of the loop."""
        if self._skips_in_sampler:
            assert self.batches is not None
            return self.batches.total_batch_size
        if isinstance(self.loader.dataset, ShardedStream):
            return self.loader.dataset.total_batch_size
        size = self.loader.batch_size if self.batches is None else self.batches.batch_size
        if size is None:
            raise TypeError("the batches have no fixed size, so there is no total batch size")
        return size if self.reader is None or self.reader.split else size * self.reader.processes.num_processes

    @property
    def total_dataset_length(self) -> int:
        """Samples of the whole dataset."""
        dataset: Any = self.loader.dataset
        whole: Any = dataset.dataset if isinstance(dataset, ShardedStream) else dataset
        return len(whole)

    @property
    def end_of_dataloader(self) -> bool:
        """True while the last batch is used."""
        return self._place is not None and self._place.is_last

    @property
    def remainder(self) -> int:
        """Samples of the last batches of all processes that are no copies; 0: all; -1: the number is not known."""
        return -1 if self._place is None else self._place.remainder

    def set_epoch(self, epoch: int) -> None:
        """Shuffle as in this epoch from now on."""
        self.iteration = epoch
        if self.batches is not None:
            self.batches.set_epoch(epoch)
        if hasattr(self.loader.dataset, "set_epoch"):
            self.loader.dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        self._is_resumed = False
        self._share_random_states()
        self.set_epoch(self.iteration)
        resume, self._resume = self._resume, None
        parts = self._parts(resume)
        self._check_is_even()
        with self.gradients.loader(self._remainder()) as here:
            self._place = here
            part = next(parts, None)
            while part is not None:
                self._rounds += 1
                self._remember()  # where to resume once this batch is used: before the next is read
                following = next(parts, None)
                if following is None:
                    here.is_last = True
                    if self.reader is not None:
                        here.remainder = part.observed
                    self._finish()
                if self.reader is None and self.device is not None:
                    yield send_to_device(part.batch, self.device, self.context.config.non_blocking)
                else:
                    yield part.batch
                part = following
            if not here.is_last:  # there was no batch
                self._finish()

    def _check_is_even(self) -> None:
        """Raise ConfigError where a process would run out of batches first, and the others wait for it for ever."""
        batches, strategy = self.batches, self.context.strategy
        if batches is None or self.reader is not None or not strategy:
            return
        try:
            if batches.is_even():
                return
            what = f"leave some of {batches.num_processes} processes a batch short"
        except TypeError:
            what = "have a length that is not known"
        raise ConfigError(
            f"even_batches=False got batches that {what}, and the strategy {strategy!r}, whose forward and backward are"
            " exchanges that every process takes part in: the others would wait for ever; allowed: even_batches=True"
            " (gather_for_metrics drops the copies), or drop_last=True"
        )

    def _parts(self, resume: dict[str, Any] | None) -> Iterator[Part]:
        """This process's batches, those to skip left out."""
        skip = self.skip if resume is None else resume["skipped"]
        has_begun, self._has_begun = self._has_begun or resume is not None, False
        if self._skips_in_sampler:
            assert self.batches is not None
            self.batches.skip = skip
        self._skipped = skip
        self._apply_base(resume, skip)
        if self.reader is not None:
            index = self.reader.processes.process_index
            if index != 0 and not has_begun:
                torch.empty((), dtype=torch.int64).random_()  # the seed for workers that rank 0 draws
            parts = self.reader.rounds(lambda: self._begin(has_begun))
        else:
            parts = (Part(batch, 0) for batch in self._begin(has_begun))
        return parts if self._skips_in_sampler else islice(parts, 0 if resume is not None else skip, None)

    def _apply_base(self, resume: dict[str, Any] | None, skip: int) -> None:
        """Leave out what all processes used before, whoever they were."""
        point = None if resume is None else resume.get("go_on")
        told = None if resume is None else resume.get("used")
        self._base = point["used"] if point else epoch_position.START if told is None else told["base"]
        self._rounds = skip if resume is None or point or told is None else told["rounds"]
        samples, batches = self._base["samples"] or 0, self._base["batches"] or 0
        self._unread = 0
        if self.batches is not None:
            cuts = point["batches"] is None if point else batches == 0
            self.batches.used_samples, self.batches.used_batches = (samples, 0) if cuts else (0, batches)
            return
        dataset: Any = self.loader.dataset
        is_own = isinstance(dataset, ShardedStream)
        if is_own:
            dataset.used_samples = samples
        if point and point["loader"] is None and not is_own:
            self._unread = batches
        elif not point and told is not None and not self._takes_state(resume):
            self._unread = self._rounds if is_own else epoch_position.batches_used(told) or 0

    def _takes_state(self, resume: Any) -> bool:
        """Whether the loader under this one goes on by its own state; else this one reads and drops."""
        inner = (resume.get("go_on") or resume)["loader"]
        is_stream = isinstance(self.loader.dataset, IterableDataset)
        return bool(inner) and (
            not is_stream or resume.get("used") is None is resume.get("go_on") or epoch_position.holds_state(inner)
        )

    def _begin(self, has_begun: bool) -> Iterator[Any]:
        now = torch.get_rng_state()
        batches = iter(self.loader)
        for _ in range(self._unread):
            next(batches, None)
        if has_begun:  # the seed for workers was drawn when the epoch began
            torch.set_rng_state(now)
        return batches

    def _share_random_states(self) -> None:
        if self.context.processes.num_processes == 1:
            return
        device = self.context.processes.device
        for kind in self.context.rng_types:
            if kind == "generator" and self._shared is None:
                continue
            if kind == "generator":
                assert self._shared is not None
                self._shared.set_state(_from_rank_0(self._shared.get_state(), device))
            elif kind == "torch":
                torch.set_rng_state(_from_rank_0(torch.get_rng_state(), device))
            else:
                torch.cuda.set_rng_state(_from_rank_0(torch.cuda.get_rng_state(), device))

    def _remainder(self) -> int:
        if self._drop_last:
            return 0
        try:
            return (self._samples() - (self._base["samples"] or 0)) % self.total_batch_size
        except (TypeError, NotImplementedError, ZeroDivisionError):  # a stream without a length, batches of any size
            return -1

    def _samples(self) -> int:
        """Samples in an epoch: a sampler may give fewer than the dataset has, or more."""
        if self.batches is not None and self.batches.sampler is not self.batches.batch_sampler:
            return len(self.batches.sampler)
        return self.total_dataset_length

    def _remember(self) -> None:
        if not hasattr(self.loader, "state_dict"):
            return
        started = self.reader is None or self.reader.processes.process_index == 0
        self._resume_point = {
            "iteration": self.iteration,
            "skipped": self._skipped,
            "order": None if self.batches is None else self.batches.start,
            "has_own_order": self._has_own_order,
            "seed": self._seed,
            "used": self._used(),
            "beginning": None if self.reader is None else self.reader.beginning,
            "loader": self.loader.state_dict() if started else {},
            "of": self._facts(),
        }
        self._tell_origin()

    def _finish(self) -> None:
        """The epoch is read to its end: what is resumed from now on is the next one."""
        self.iteration += 1
        self._resume_point = self._at_rest()
        self._tell_origin()
        self._origin = None

    def _tell_origin(self) -> None:
        if self._origin is not None:
            self._origin.iteration, self._origin._resume_point = self.iteration, self._resume_point

    def _at_rest(self) -> dict[str, Any]:
        generator = None if self.batches is None else self.batches.generator
        order = None if generator is None else generator.get_state()
        return {"iteration": self.iteration, "skipped": 0, "order": order, "seed": self._seed, "loader": None}

    @property
    def _has_own_order(self) -> bool:
        """Whether the order is a matter of a generator of the sampler's own."""
        return self.batches is not None and self.batches.generator is not None

    def _used(self) -> dict[str, Any]:
        is_one = self.context.processes.num_processes == 1
        is_split = self.reader.split if self.reader is not None else self.context.config.split_batches
        return epoch_position.used(
            self._base, self._rounds, self._total(), 1 if is_one or is_split else self.context.processes.num_processes
        )

    def _total(self) -> int | None:
        try:
            return self.total_batch_size
        except (TypeError, NotImplementedError):  # batches of any size
            return None

    @property
    def _seed(self) -> int | None:
        """What a seedable sampler shuffles by; None for others."""
        sampler = None if self.batches is None else self.batches.sampler
        return sampler.initial_seed if isinstance(sampler, SeedableSampler) else None

    def state_dict(self) -> dict[str, Any]:
        """Where the loop stands: behind the batch that was given out last, not the one read ahead.

        After the last batch it is the beginning of the next epoch. Each process has its own.
        """
        if not hasattr(self.loader, "state_dict"):
            raise AttributeError(f"{type(self.loader).__name__} has no state; prepare a torch.utils.data.DataLoader")
        return self._at_rest() if self._resume_point is None else self._resume_point

    def _facts(self) -> dict[str, Any]:
        """What a place in the middle of an epoch is a place of."""
        sampler, dataset = (None if self.batches is None else type(self.batches.sampler)), self.given.dataset
        is_stream = isinstance(dataset, IterableDataset)
        reads = epoch_position.OWN if isinstance(self.loader.dataset, ShardedStream) else epoch_position.WHOLE
        facts: dict[str, Any] = {
            "sampler": epoch_position.name_of(sampler),
            "num_workers": getattr(self.loader, "num_workers", None),
            "dispatch_batches": self.reader is not None,
            "num_processes": self.context.processes.num_processes,
            "batching": None if self.batches is None else epoch_position.name_of(type(self.batches.batch_sampler)),
            "batch_size": self.loader.batch_size if self.batches is None else self.batches.batch_size,
            "is_stream": is_stream,
            "reads": epoch_position.SHARDS
            if is_stream and self.loader.dataset is not dataset and reads == epoch_position.WHOLE
            else reads,
            "total_batch_size": self._total(),
        }
        try:
            facts["samples"] = self._samples()
        except (TypeError, NotImplementedError):  # a stream without a length
            facts["samples"] = None
        return facts

    def fit(self, state: dict[str, Any], lost: int = 0) -> tuple[dict[str, Any], str]:
        """``state`` as this loader can take it, and what that means where the saved one differs: ``""`` if it does not.

        In the middle of another loader's epoch this one goes on behind the samples that were used, if it has the same
        in the same order; else the epoch starts from its beginning. ``lost`` batches of the end count as not used.
        """
        saved, now = state.get("of"), self._facts()
        if state["loader"] is None or not isinstance(saved, dict):  # between epochs, or not of ours
            return state, ""
        other = [name for name in now if name in saved and saved[name] != now[name]]
        if not other and not lost:
            return state, ""
        point, samples = epoch_position.go_on(state, now, lost)
        said = [name for name in other if name in _SAID] or other
        parts = [f"{name} was {saved[name]}, now {now[name]}" for name in said]
        differs = ", ".join(parts + ([f"{lost} batches of the unfinished step come again"] if lost else []))
        kept = {"iteration": state["iteration"], "skipped": 0, "seed": state["seed"], "loader": None}
        if point is None:
            again = f"; {samples} samples were used and come again" if samples and "samples" not in other else ""
            return kept | {"order": None if "sampler" in other else state["order"]}, (
                f"{differs}{again}; its epoch starts from its beginning"
            )
        base = {"samples": samples, "batches": point["batches"]}
        kept |= {key: state.get(key) for key in ("order", "has_own_order", "beginning")}
        behind = f"{samples} samples" if samples is not None else f"{point['batches']} batches"
        return kept | {"go_on": point | {"used": base}}, f"{differs}; it goes on behind the {behind} that were used"

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume there, in the process of the same number among as many. The next pass gives the batches left over.

        Of a loader that differs ``fit`` says what that means, and a warning tells.
        Raises: CheckpointError for a state that no loader has.
        """
        _check_state(state)
        state, differs = self.fit(state)
        if differs:
            _log.warning("a loader's %s", differs)
        self.iteration = state["iteration"]
        self._forget_resume_point()
        self._resume_point, self._is_resumed = state, True
        if self._seed is not None and self.batches is not None and state["seed"] is not None:
            self.batches.sampler.initial_seed = state["seed"]
        order, point = state["order"], state.get("go_on")
        inner = state["loader"] if point is None else point["loader"]
        if inner is None and point is None:
            if order is not None and self.batches is not None and self.batches.generator is not None:
                self.batches.generator.set_state(order)
            return
        if self.batches is not None:
            self.batches.resume_from, self.batches.resumes_own = order, state.get("has_own_order")
        is_reading = self.reader is None or self.reader.processes.process_index == 0
        if self.reader is not None:
            self.reader.resume_from = state["beginning"]
        self._resume = state
        if is_reading and self._takes_state(state):
            self.loader.load_state_dict(inner)  # type: ignore[attr-defined]

    def _forget_resume_point(self) -> None:
        if self._resume is None:
            return
        self._resume = self._resume_point = None
        if hasattr(self.loader, "next_iter_state"):  # torchdata's StatefulDataLoader keeps what it was given there
            self.loader.next_iter_state = None
        for part in (self.batches, self.reader):
            if part is not None:
                part.resume_from = None

    def skipping(self, num_batches: int) -> AcceleratedLoader:
        """A loader of the same batches without this process's first ``num_batches``.

        Behind ``load_state_dict`` it has the order of the epoch that was interrupted, and its first pass counts as this
        loader's: in what is saved, and in the epoch that comes next.
        """
        if num_batches < 0:
            raise ConfigError(f"skip_first_batches got num_batches={num_batches}; allowed: an integer from 0")
        begun = self._resume
        self._forget_resume_point()  # the script places itself; this loader's next pass is a whole one
        loader: Any = self.loader
        batches = self.batches
        if self._skips_in_sampler:
            batches = copy.copy(batches)
            assert batches is not None
            batches.skip = self.skip + num_batches
            loader = _stateful(loader, loader.dataset, batches)
        other = AcceleratedLoader(
            loader,
            self.context,
            batches=batches,
            reader=copy.copy(self.reader),
            drop_last=self._drop_last,
            shared=self._shared,
        )
        other.iteration, other.skip = self.iteration, self.skip + num_batches
        other._has_begun = self._has_begun or begun is not None
        other._origin, self._is_resumed = self if self._is_resumed else self._origin, False
        if begun is not None and batches is not None:
            batches.resume_from, batches.resumes_own = begun["order"], begun.get("has_own_order")
        return other


def _check_state(state: Any) -> None:
    if not isinstance(state, dict):
        raise CheckpointError(f"the state of a loader is a {type(state).__name__}; allowed: what state_dict() returns")
    for key, is_fine, allowed in (
        ("iteration", _is_count, "an integer from 0"),
        ("skipped", _is_count, "an integer from 0"),
        ("seed", lambda seed: seed is None or type(seed) is int, "an integer or None"),
        ("order", _is_random_state, "a generator's state or None"),
        ("loader", lambda inner: inner is None or isinstance(inner, dict), "a dict or None"),
        ("used", epoch_position.is_used, "what state_dict() returns"),
        ("go_on", epoch_position.is_point, "what state_dict() returns"),
    ):
        if (key not in state and key not in ("used", "go_on")) or not is_fine(state.get(key)):
            raise CheckpointError(
                f"the state of a loader has {key}={repr(state.get(key))[:80]}; allowed: {allowed}; use another one"
            )


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**53


def _is_random_state(value: Any) -> bool:
    return value is None or (isinstance(value, torch.Tensor) and value.dtype is torch.uint8)


def _from_rank_0(state: torch.Tensor, device: torch.device) -> torch.Tensor:
    sent = state.to(device)
    dist.broadcast(sent, 0)
    return sent.cpu()


def prepare_loader(loader: DataLoader[Any], context: LoaderContext) -> AcceleratedLoader:
    """Divide ``loader`` among the processes. It stays as it is, but that a sampler without a generator gets one.

    Raises: ConfigError for a batch size that ``split_batches`` cannot divide, and for what cannot be divided at all.
    """
    processes, config = context.processes, context.config
    count, index = processes.num_processes, processes.process_index
    dataset: Any = loader.dataset
    is_stream = isinstance(dataset, IterableDataset)
    if type(loader).__iter__ not in (DataLoader.__iter__, StatefulDataLoader.__iter__):
        if count > 1:
            raise NotInThisVersionError(
                f"prepare got a {type(loader).__name__}, which iterates in its own way, in process {index} of {count};"
                " allowed: torch.utils.data.DataLoader itself; divide the data by process_index in it and leave it out"
            )
        return AcceleratedLoader(loader, context, drop_last=loader.drop_last)
    dispatches = count > 1 and (is_stream and context.device is not None)
    if count > 1 and config.dispatch_batches is not None:
        dispatches = config.dispatch_batches
    if dispatches and context.device is None:
        raise ConfigError(
            "dispatch_batches=True got device_placement=False; allowed: with device placement, for batches arrive on"
            " the device; leave one of them out"
        )
    source = loader.sampler if isinstance(loader.sampler, BatchSampler) else loader.batch_sampler
    if is_stream or (source is None and count == 1):
        batches = None
    elif source is None:
        raise ConfigError(
            "prepare got a DataLoader with batch_size=None, which gives single samples; allowed with several processes:"
            " batches; set batch_size, or give it a batch sampler"
        )
    else:
        source = _seedable(source, config)
        divide = not dispatches
        batches = ShardedBatches(
            source,
            count if divide else 1,
            index if divide else 0,
            split_batches=config.split_batches and divide and count > 1,
            even_batches=config.even_batches,
        )
    shared = _shared_generator(batches, dataset, config) if count > 1 and not dispatches else None
    drop_last = loader.drop_last
    if is_stream and count > 1 and not dispatches:
        dataset = _divide_stream(loader, config, count, index)
    reader = None
    if dispatches:
        if config.split_batches:
            check_split(loader.batch_size if batches is None else batches.batch_size, count)
        reader = Reader(processes, split=config.split_batches, drop_last=drop_last)
    return AcceleratedLoader(
        _stateful(loader, dataset, batches),
        context,
        batches=batches,
        reader=reader,
        drop_last=drop_last,
        shared=shared,
        given=loader,
    )


def _seedable(source: Any, config: DataLoaderConfiguration) -> Any:
    """A batch sampler like ``source`` that shuffles by seed and epoch, if that is asked for and ``source`` shuffles."""
    sampler = getattr(source, "sampler", None)
    if not config.use_seedable_sampler or not isinstance(sampler, RandomSampler | StatefulRandomSampler):
        return source
    source = copy.copy(source)
    source.sampler = SeedableSampler(sampler, config.data_seed)
    return source


def _shared_generator(
    batches: ShardedBatches | None, dataset: Any, config: DataLoaderConfiguration
) -> torch.Generator | None:
    """What must stand alike on all ranks when an epoch begins; a sampler that has no generator gets one."""
    if batches is None:
        found = getattr(dataset, "generator", None)
        return found if isinstance(found, torch.Generator) else None
    sampler = batches.sampler
    if not hasattr(sampler, "generator") or (config.use_seedable_sampler and isinstance(sampler, RandomSampler)):
        return None
    if sampler.generator is None:
        sampler.generator = torch.Generator()
        sampler.generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    return batches.generator


def _divide_stream(loader: DataLoader[Any], config: DataLoaderConfiguration, count: int, index: int) -> Any:
    dataset: Any = loader.dataset
    shards = getattr(dataset, "n_shards", 0) if type(dataset).__module__.startswith("datasets.") else 0
    if shards >= count and not config.split_batches:  # Hugging Face datasets know how
        return dataset.shard(num_shards=count, index=index)
    if loader.batch_size is None:
        raise ConfigError(
            "prepare got an iterable dataset in a DataLoader with batch_size=None; allowed with several processes: a"
            " batch_size, or DataLoaderConfiguration(dispatch_batches=True)"
        )
    return ShardedStream(dataset, loader.batch_size, loader.drop_last, count, index, config.split_batches)


def _stateful(loader: Any, dataset: Any, batches: Iterable[list[int]] | None) -> DataLoader[Any]:
    """A StatefulDataLoader as ``loader`` is, of other batches."""
    options = {name: getattr(loader, name) for name in _KEPT if hasattr(loader, name)}
    if batches is None:
        size = dataset.part if isinstance(dataset, ShardedStream) else loader.batch_size
        options |= {"batch_size": size, "drop_last": loader.drop_last}
        if not isinstance(dataset, IterableDataset):  # single samples
            options["sampler"] = loader.sampler
    elif loader.batch_sampler is None:
        options |= {"sampler": batches, "batch_size": None}
    else:
        options["batch_sampler"] = batches
    with warnings.catch_warnings():  # torchdata 0.11 calls what torch 2.13 deprecates; remove with the next torchdata
        warnings.filterwarnings("ignore", message="'set_vital' is deprecated", category=UserWarning)
        made: DataLoader[Any] = StatefulDataLoader(dataset, **options)
    return made
