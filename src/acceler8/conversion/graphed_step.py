"""A training step as a CUDA graph: recorded once, then replayed without its Python and its launches.

    step = acceler8.GraphedStep(train_step, model, optimizer)        train_step: forward, backward, optimizer.step()
    for x, y in loader:
        loss = step(x, y)

A small FP8 model waits for the host: a layer casts six times a step, each cast is a launch or two. A replay has none of
that. What it cannot do is decide anew, so everything that Python decides in a step is compared before each replay: the
layers in FP8 by a schedule, what norms learned of their readers, modes, hooks, frozen weights, shapes, learning rates
that are plain numbers, where the optimizers' state and the gradients lie. Where something differs the step runs eagerly
again until it is settled and is then captured anew; one line in the log says why. The eager steps are steps of the
training like any other, so that a graphed training has the numbers of an eager one.

In the graph are the casts of the weights (codes never outlive a step: windows have to be opened in it) and, under
delayed scaling, the step boundary's update of the amax state; what a boundary counts on the host is counted at each
replay.

Source: Nguyen et al. 2021, "Accelerating PyTorch with CUDA Graphs"; ``torch.cuda.make_graphed_callables`` for warm-up
on a side stream. That takes a module's forward and backward apart; here optimizer and step boundary are in the graph.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from acceler8.conversion.step_guards import Gradients, Guards, argument
from acceler8.errors import PlanError, RunError
from acceler8.nn import Fp8Linear, find_states, fp8_layers
from acceler8.nn.gradients import stored_gradient
from acceler8.scaling import AmaxState, StepClock

_log = logging.getLogger("acceler8")
_MOST_GRAPHS = 8
_MOST_CHANGES = 8  # without a capture, before a warning
_Key = tuple[Hashable, Hashable]  # arguments' shapes and values; which boundary of an interval, and gradients at hand


class Capture(Protocol):
    """What records a function of no arguments and gives its replay."""

    def warm_up(self, function: Callable[[], Any]) -> Any:
        """Run it as it would be recorded."""

    def record(self, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """``(replay, result)``: its Python ran once, its work runs with each ``replay()``, into the same result."""


class CudaGraphs:
    """``torch.cuda.CUDAGraph``, all that live in one memory pool, on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._alive: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()

    def warm_up(self, function: Callable[[], Any]) -> Any:
        """Eagerly, on the stream on which graphs are captured: gradients are added where they were made."""
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            result = function()
        current.wait_stream(self._stream)
        tree_map_only(Tensor, lambda t: t.record_stream(current) if t.is_cuda else None, result)
        return result

    def record(self, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Capture; nothing runs on the GPU."""
        if not self._alive:  # PyTorch refuses a pool whose graphs are gone while a tensor still lies in it
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            result = function()
        self._alive.add(graph)
        return graph.replay, result


class _Recorded(NamedTuple):
    replay: Callable[[], None]
    inputs: list[Tensor]
    result: Any
    ticks: list[tuple[StepClock, int]]
    counts: list[tuple[AmaxState, int]]
    gradients: Gradients


class GraphedStep:
    """``train_step`` of a converted model, replayed as a CUDA graph. Call it with what ``train_step`` takes.

    train_step: one whole training step on tensors, in any nesting of tuples, lists and dicts, and on None, bool, int,
        float, str, bytes, ``torch.dtype`` and ``torch.device``, each value of which has a graph of its own. It gives
        back tensors, the loss say, which come as copies without a gradient. No ``.item()``, no copy to the host, no
        data-dependent control flow in it; ``optimizer.zero_grad()`` belongs into it too.
    optimizers: those that it steps, with ``capturable=True`` where they have that. A learning rate that changes should
        be a tensor: of a number the graph keeps the value, and each new one is captured anew. With one
        that changes at each step nothing is ever captured, and a warning in the log says so once.
    warmup: eager steps with nothing new in them before a capture, at least 1. capture: None takes CUDA graphs for a
        model on a GPU; a model elsewhere runs eagerly, and a line in the log says so once.
    Layers that are observed (``record_statistics``) run eagerly for as long as they are.
    Raises: PlanError for a model that is not converted, on several devices, in DistributedDataParallel, and at a call
        inside an open ``acceler8.window`` or with an argument of another type; RunError if ``train_step`` cannot be
        captured, and then nothing has happened: an eager ``train_step`` goes on from there.
    """

    def __init__(
        self,
        train_step: Callable[..., Any],
        model: nn.Module,
        *optimizers: Optimizer,
        warmup: int = 2,
        capture: Capture | None = None,
    ) -> None:
        if type(warmup) is not int or warmup < 1:
            raise PlanError(
                f"GraphedStep got warmup={warmup!r}; allowed: an integer from 1, eager steps before a capture"
            )
        _check_kinds(train_step, model, optimizers)
        self._train_step, self._warmup = train_step, warmup
        self._states = find_states(model)
        if not self._states:
            raise PlanError(
                f"GraphedStep got a {type(model).__name__} that is not converted; call acceler8.convert first"
            )
        if foreign := [state.backend for state in self._states if state.backend != "native"]:
            raise PlanError(
                f"GraphedStep got a model of backend {foreign[0]!r}; allowed: native; plan it with backend='native', or"
                " let torch.compile(mode='reduce-overhead') make graphs of a torchao model"
            )
        if isinstance(model, nn.parallel.DistributedDataParallel):
            raise PlanError("GraphedStep got a model in DistributedDataParallel; allowed: one process, a plain model")
        devices = {p.device for p in model.parameters()}
        if len(devices) > 1:
            raise PlanError(
                f"GraphedStep got parameters on {', '.join(sorted(map(str, devices)))}; allowed: one device"
            )
        (device,) = devices
        if capture is None and device.type == "cuda":
            capture = CudaGraphs(device)
        if capture is None:
            _log.info("GraphedStep: the model is on %s, which has no CUDA graphs; each step runs eagerly", device)
        self._capture = capture
        # found once: to look through a model at each step costs more than a replay
        self._layers = [layer for _, layer in fp8_layers(model)]
        self._guards = Guards(model, optimizers)
        self._graphs: dict[_Key, _Recorded] = {}
        self._settled: dict[str, Hashable] = {}
        self._eager_steps = 0
        self._changes = 0  # since a capture or replay
        self._warned = False
        self._seen: set[Hashable] = set()  # arguments that an eager step had: kernels for their shapes are loaded
        self.captures = 0
        """How often the step was captured."""
        self.replays = 0
        """How many steps were replays."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One training step on these arguments."""
        if any(codes.is_open for state in self._states for codes in state.codes):
            raise PlanError("GraphedStep was called inside acceler8.window; open the window in train_step")
        leaves, spec = tree_flatten((args, kwargs))
        arguments = tuple(map(argument, leaves)), spec
        if any(not isinstance(layer, Fp8Linear) for layer in self._layers):
            raise PlanError("GraphedStep got a model that was restored since; make a new one behind acceler8.convert")
        if self._capture is None:
            return self._detached(self._train_step(*args, **kwargs))
        if any(layer._acceler8_layer.observer is not None for layer in self._layers):
            return self._detached(self._capture.warm_up(lambda: self._train_step(*args, **kwargs)))
        self._compare(arguments)
        key = self._key(arguments)
        recorded = self._graphs.get(key)
        if recorded is not None and not recorded.gradients.fit():
            _log.info("GraphedStep: a gradient's memory changed, so the step is captured again")
            del self._graphs[key]  # and no other: one that makes gradients, for this one to add to, is as it was
            recorded, self._eager_steps = None, 0
        if recorded is None:
            if self._eager_steps < self._warmup or key[0] not in self._seen:
                self._eager_steps += 1
                self._seen.add(key[0])
                return self._detached(self._capture.warm_up(lambda: self._train_step(*args, **kwargs)))
            recorded = self._record(key, leaves, spec)
        else:
            _copy_into(recorded.inputs, leaves)
            for clock, ticks in recorded.ticks:
                clock.ticks += ticks
            for amax, steps in recorded.counts:
                amax.steps += steps
        recorded.replay()
        recorded.gradients.leave()
        self.replays, self._changes = self.replays + 1, 0
        return self._detached(recorded.result)

    def _record(self, key: _Key, leaves: list[Any], spec: Any) -> _Recorded:
        assert self._capture is not None
        # said here and not at the eager step: warm-up may have met all shapes before anything was captured
        if self._graphs and all(known[0] != key[0] for known in self._graphs):
            _log.info("GraphedStep: the arguments' shapes changed, so the step is captured for these too")
        if len(self._graphs) >= _MOST_GRAPHS:
            self._graphs.pop(next(iter(self._graphs)))
        static = [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        for old, new in zip(leaves, static, strict=True):
            if isinstance(old, Tensor):
                new.requires_grad_(old.requires_grad)
        args, kwargs = tree_unflatten(static, spec)
        clocks = self._leading_clocks()
        amaxes = [state.amax for state in self._states if state.amax is not None]
        before = [clock.ticks for clock in clocks], [amax.steps for amax in amaxes]
        stepped, gradients = [set(clock.stepped) for clock in clocks], Gradients(self._guards.parameters())
        self._drop_codes()  # made in memory that is not the graph's, of weights that will be others
        torch.clear_autocast_cache()
        try:
            replay, result = self._capture.record(
                # without the autograd graph, which would keep gradients' nodes, and so later steps, on this stream
                lambda: tree_map_only(Tensor, Tensor.detach, self._train_step(*args, **kwargs))
            )
        except BaseException as error:
            # none of the work was done, so what Python counted and made goes too, and eager steps can go on from here
            for clock, ticks, numbers in zip(clocks, before[0], stepped, strict=True):
                clock.ticks, clock.stepped = ticks, numbers
            for amax, steps in zip(amaxes, before[1], strict=True):
                amax.steps = steps
            gradients.undo()
            if not isinstance(error, RuntimeError):
                raise
            raise RunError(
                f"train_step could not be captured: {_first_line(error)}; allowed: work on the GPU only,"
                " no .item(), no copies from or to the host, optimizers with capturable=True; run train_step itself to"
                " train eagerly"
            ) from error
        finally:
            self._drop_codes()  # a graph's memory is written at each replay
        gradients.captured()
        recorded = _Recorded(
            replay, [leaf for leaf in static if isinstance(leaf, Tensor)], result,
            [(clock, clock.ticks - was) for clock, was in zip(clocks, before[0], strict=True)],
            [(amax, amax.steps - was) for amax, was in zip(amaxes, before[1], strict=True)],
            gradients,
        )  # fmt: skip
        self._graphs[key] = recorded
        self.captures += 1
        return recorded

    def _leading_clocks(self) -> list[StepClock]:
        """The models' clocks, each once, without those that another of them sets."""
        clocks = list({id(state.clock): state.clock for state in self._states}.values())
        led = {id(other) for clock in clocks for other in clock._led}
        return [clock for clock in clocks if id(clock) not in led]

    def _drop_codes(self) -> None:
        for state in self._states:
            state.drop_codes()

    def _compare(self, arguments: Hashable) -> None:
        """Start anew, and say why, if what Python decides is not what it was."""
        now = self._guards.decisions()
        if now != self._settled:
            changed = [name for name in now if now[name] != self._settled.get(name)]
            if self._graphs:
                _log.info("GraphedStep: %s changed, so the step is captured again", " and ".join(changed))
            self._graphs.clear()
            self._settled, self._eager_steps = now, 0
            self._seen.clear()
            self._count_change(changed)
        elif arguments not in self._seen:
            self._count_change(["the arguments' shapes or values"])

    def _count_change(self, changed: list[str]) -> None:
        self._changes += 1
        if self._changes >= _MOST_CHANGES and not self._warned:
            self._warned = True
            _log.warning(
                "GraphedStep: all steps are eager, for %d times something changed before a step could be captured; the"
                " last time %s. Make numbers that change tensors and keep the rest as it is, or run train_step itself",
                self._changes, " and ".join(changed),
            )  # fmt: skip

    def _key(self, arguments: Hashable) -> _Key:
        """What this step's graph is found by."""
        # under an interval some boundaries bring new scales and others do not
        phase = tuple(
            (state.amax.steps + 1) % state.amax.interval == 0 for state in self._states if state.amax is not None
        )
        return arguments, (phase, self._guards.have_gradients())

    @staticmethod
    def _detached(result: Any) -> Any:
        return tree_map_only(Tensor, lambda t: t.detach().clone(), result)


def _check_kinds(train_step: Any, model: Any, optimizers: tuple[Any, ...]) -> None:
    """Raise PlanError for what is none of these."""
    wrong = [] if callable(train_step) else [f"train_step={type(train_step).__name__}"]
    wrong += [] if isinstance(model, nn.Module) else [f"model={type(model).__name__}"]
    wrong += [f"optimizer={type(other).__name__}" for other in optimizers if not isinstance(other, Optimizer)]
    if wrong or not optimizers:
        raise PlanError(
            f"GraphedStep got {', '.join(wrong) or 'no optimizer'}; allowed: a function, a module and the optimizers"
            " that the function steps, whose numbers are compared: GraphedStep(train_step, model, optimizer)"
        )
    if any(stored_gradient(p) is not None for p in model.parameters()):
        raise PlanError(
            f"GraphedStep got a {type(model).__name__} at a training level, whose gradients are stored in FP8 by hooks"
            " that a graph does not replay; allowed: models whose gradients are PyTorch's; step this one eagerly"
        )


def _first_line(error: RuntimeError) -> str:
    """CUDA's errors go on with how to debug them."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def _copy_into(static: list[Tensor], leaves: list[Any]) -> None:
    with torch.no_grad():
        for into, leaf in zip(static, (leaf for leaf in leaves if isinstance(leaf, Tensor)), strict=True):
            into.copy_(leaf, non_blocking=True)
