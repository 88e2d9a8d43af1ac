"""One rank of the DeepSpeed tests: ``deepspeed_worker.py RANK RANKS FOLDER SCENARIO...``, to FOLDER/SCENARIO.RANK.pt.

A scenario gives back what happened, as plain tensors and numbers; what should have happened is for the tests to say.
One thread, so that sums run in one order.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed_support import (
    ROWS_ALONE,
    WIDTH,
    Facts,
    Temperature,
    Training,
    loss_of,
    make_accelerator,
    make_data,
    make_model,
    message_of,
)
from torch import nn

import acceler8
from acceler8.conversion import window

FOLDER = Path()


def train(way: str, kind: str, recipe: Any = ROWS_ALONE, **options: Any) -> Facts:
    """Three steps of two micro-batches; then ``verify`` on two steps more."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    training = Training(make_accelerator(way, recipe=recipe, **options), kind)
    facts = training.run(make_data(kind, ranks), rank)
    facts["weights"] = training.weights()
    facts["dtypes"] = sorted({str(p.dtype) for p in training.model.parameters()})
    facts["verified"] = verified(training, kind)
    return facts


def verified(training: Training, kind: str, **options: Any) -> dict[str, str]:
    """What ``verify`` says on this rank."""
    data = iter(make_data(kind, dist.get_world_size(), seed=6))

    def step() -> None:
        for _ in range(2):
            training.micro_batch(*next(data)[dist.get_rank()])

    ignore = ("called",) if kind == "gated" else ()  # whose MLP is called by keyword
    return acceler8.verify(training.model, training.optimizer, step=step, ignore=ignore, **options).checks


def recipes(way: str) -> Facts:
    """The losses of one training in each recipe that has no scenario of its own."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    facts: Facts = {}
    for recipe in ("tensorwise", "blockwise", "mxfp8", "activations_only", "torchao tensorwise"):
        backend = {"backend": "AO"} if recipe.startswith("torchao") else {}
        training = Training(make_accelerator(way, recipe=recipe.split()[-1], **backend), "gated")
        facts[recipe] = training.run(make_data("gated", ranks), rank)
    return facts


def save(way: str, engine: str, kind: str = "plain") -> Facts:
    """Three steps, whole states, and three steps more."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    training = Training(make_accelerator(way, recipe=ROWS_ALONE, engine=engine), kind, optimizer="adamw", pace=None)
    training.run(make_data(kind, ranks), rank)
    facts: Facts = {"saved": (training.weights(), training.states())}
    facts["after"] = training.run(make_data(kind, ranks, seed=8), rank)
    return facts | {"end": (training.weights(), training.states())}


def resume(source: str, way: str, engine: str, began: bool = True, kind: str = "plain") -> Facts:
    """What ``save`` wrote, in a training that began otherwise or not at all, and three steps more."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    training = Training(make_accelerator(way, recipe=ROWS_ALONE, engine=engine), kind, optimizer="adamw", pace=None)
    if began:
        training.run(make_data(kind, ranks, seed=9), rank)
    saved = torch.load(FOLDER / f"{source}.0.pt", weights_only=True)
    is_whole = rank == 0 or way == "ddp"
    training.load(*(saved["saved"] if is_whole else ({}, {})))
    facts: Facts = {"loaded": (training.weights(), training.states())}
    facts["after"] = training.run(make_data(kind, ranks, seed=8), rank)
    return facts | {"end": (training.weights(), training.states())}


def discard(way: str) -> Facts:
    """Gradients that ``zero_grad`` drops between two steps, beside a training that never had them."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    data, facts = make_data("plain", ranks), {}
    for name in ("with", "without"):
        training = Training(make_accelerator(way, recipe=ROWS_ALONE), "plain")
        training.run(data[:2], rank)
        for of_ranks in make_data("plain", ranks, seed=7)[:2] if name == "with" else ():
            with training.accelerator.accumulate(training.model):
                training.accelerator.backward(loss_of(training.model, *of_ranks[rank]))
                training.optimizer.zero_grad()
        facts[name] = (training.run(data[2:], rank), training.weights())
    return facts


def two_losses(way: str) -> Facts:
    """A step on two losses, each with a backward of its own: by ``no_sync``, and without."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    training = Training(make_accelerator(way, recipe=ROWS_ALONE), "plain")
    accelerator, (first, second, *_) = training.accelerator, make_data("plain", ranks)
    accelerator.gradient_accumulation_steps = 1
    with accelerator.no_sync(training.model):
        accelerator.backward(loss_of(training.model, *first[rank]))
    accelerator.backward(loss_of(training.model, *second[rank]))
    training.optimizer.step()
    training.optimizer.zero_grad()
    facts: Facts = {"weights": training.weights()}
    accelerator.backward(loss_of(training.model, *first[rank]))
    facts["again"] = message_of(lambda: accelerator.backward(loss_of(training.model, *second[rank])))
    training.optimizer.zero_grad()
    facts["uneven"] = message_of(
        lambda: accelerator.join_uneven_inputs([training.model], even_batches=False).__enter__()
    )
    facts["precision"] = message_of(lambda: setattr(accelerator, "mixed_precision", "bf16"))
    accelerator.free_memory()
    return facts | {"second": Training(accelerator, "plain").run(make_data("plain", ranks)[:2], rank)["losses"]}


def evaluation(way: str) -> Facts:
    """Logits, generated tokens, and a training that goes on."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    training = Training(make_accelerator(way, recipe=ROWS_ALONE), "llama")
    training.run(make_data("llama", ranks), rank)
    plain = training.accelerator.unwrap_model(training.model).eval()
    ids = torch.arange(8)[None]
    with torch.no_grad():
        facts: Facts = {"logits": training.model(input_ids=ids).logits}
        facts["tokens"] = plain.generate(ids, max_new_tokens=6, do_sample=False)
    plain.train()
    return facts | {"after": training.run(make_data("llama", ranks, seed=8), rank), "type": type(plain).__name__}


def parts() -> Facts:
    """``from_pretrained`` under ZeRO-3, which builds weights in parts, and the same weights built whole."""
    import transformers

    rank, ranks = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        make_model("llama").save_pretrained(FOLDER / "model")
    dist.barrier()
    facts: Facts = {}
    for name, flag in (("parts", None), ("whole", False)):
        accelerator = make_accelerator("zero3", recipe=ROWS_ALONE, zero3_init_flag=flag)
        model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER / "model", dtype=torch.float32)
        is_in_parts = all(hasattr(p, "ds_id") for p in model.parameters())
        training = Training(accelerator, "llama", model=model)
        run = training.run(make_data("llama", ranks), rank)
        facts[name] = {"is_in_parts": is_in_parts, "layers": len(accelerator.plan.fp8_names), **run}
        del accelerator, model, training
        gc.collect()
    return facts


def stale() -> Facts:
    """Codes of older weights, planted: a clock that drops none, under an open window; and weights not gathered."""
    facts: Facts = {}
    training = Training(make_accelerator("zero2", recipe=ROWS_ALONE), "plain")
    states = [m.__dict__["_acceler8_model"] for m in training.model.modules() if "_acceler8_model" in m.__dict__]
    clock, (state,) = training.accelerator.clock, states
    facts["zero2, dropped"] = str(verified(training, "plain"))
    clock.unsubscribe(state.drop_codes)
    with window(training.model):
        facts["zero2, kept"] = message_of(lambda: verified(training, "plain"))
    training = Training(make_accelerator("zero2", engine="bf16", recipe=ROWS_ALONE), "plain")
    owner = training.accelerator.strategy.engine.optimizer
    own = owner._update_model_bit16_weights
    owner._update_model_bit16_weights = lambda i: None
    for flat in owner.bit16_groups_flat:  # the weights are views of it no more, so they stay as they are
        flat.data = flat.data.clone()
    facts["zero2, not gathered"] = message_of(lambda: verified(training, "plain"))
    owner._update_model_bit16_weights = own
    return facts


def refusals() -> Facts:
    """Messages of what DeepSpeed cannot be asked for, and that a second call of ``prepare`` changes nothing."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    accelerator = make_accelerator("zero2")
    model, other = nn.Sequential(nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, WIDTH)
    optimizer, of_other = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, other))
    facts: Facts = {
        "model alone": message_of(lambda: accelerator.prepare(model)),
        "optimizer alone": message_of(lambda: accelerator.prepare(optimizer)),
        "two models": message_of(lambda: accelerator.prepare(model, other, optimizer)),
    }
    coded = acceler8.optim.AdamW(model.parameters())
    facts["coded states"] = message_of(lambda: accelerator.prepare(model, coded))
    wrapped, stepped = accelerator.prepare(model, optimizer)
    facts["again"] = accelerator.prepare(wrapped) is wrapped and accelerator.prepare(optimizer) is stepped
    facts["second model"] = message_of(lambda: accelerator.prepare(other, of_other))
    facts["clip value"] = message_of(lambda: accelerator.clip_grad_value_(wrapped.parameters(), 1.0))
    facts["clip early"] = message_of(lambda: accelerator.clip_grad_norm_(wrapped.parameters(), 1.0))
    facts["clip inf"] = message_of(lambda: accelerator.clip_grad_norm_(wrapped.parameters(), 1.0, float("inf")))
    facts["group"] = message_of(lambda: stepped.add_param_group({"params": [nn.Parameter(torch.zeros(2))]}))
    facts["params"] = message_of(lambda: stepped.param_groups[0].__setitem__("params", []))
    facts["closure"] = message_of(lambda: stepped.step(lambda: None))
    wrong = {"state": {0: {"momentum_buffer": torch.zeros(3)}}, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}
    facts["shape"] = message_of(lambda: stepped.load_state_dict(wrong))
    facts["groups"] = message_of(lambda: stepped.load_state_dict({"state": {}, "param_groups": []}))
    facts["no state"] = message_of(lambda: stepped.load_state_dict({"param_groups": []}))
    wrong["state"] = {0: {"momentum_buffer": torch.zeros(WIDTH, WIDTH)}, 1: {"momentum_buffer": torch.tensor(0.0)}}
    facts["mixed"] = message_of(lambda: stepped.load_state_dict(wrong))
    strategy = accelerator.strategy
    facts["weights"] = message_of(lambda: strategy.load_model_state(wrapped, {"0.weight": torch.zeros(3)}, print))
    number, of_number = nn.Sequential(nn.Linear(WIDTH, WIDTH), Temperature()), make_accelerator("zero3")
    facts["number"] = message_of(lambda: of_number.prepare(number, torch.optim.SGD(number.parameters(), lr=0.1)))
    file = make_accelerator("zero2", config={"gradient_clipping": 0.5})
    training = Training(file, "plain")
    facts["clip of the file"] = message_of(lambda: training.run(make_data("plain", ranks), rank))
    return facts


WAYS = ("ddp", "zero0", "zero1", "zero2", "zero3")
SCENARIOS: dict[str, Callable[[], Facts]] = {
    **{f"plain-{way}": partial(train, way, "plain") for way in WAYS},
    **{f"llama-{way}": partial(train, way, "llama") for way in WAYS},
    **{f"gated-{way}": partial(train, way, "gated", "rowwise") for way in WAYS},
    **{f"delayed-{way}": partial(train, way, "plain", "delayed") for way in WAYS},
    **{f"torchao-{way}": partial(train, way, "plain", "rowwise", backend="AO") for way in WAYS},
    **{f"torchao-tensorwise-{way}": partial(train, way, "llama", "tensorwise", backend="AO") for way in WAYS},
    **{f"bf16-{way}": partial(train, way, "gated", engine="bf16") for way in WAYS},
    **{f"fused-{way}": partial(train, way, "llama", "rowwise", engine="bf16") for way in WAYS},
    **{f"bert-{way}": partial(train, way, "bert", "rowwise", engine="bf16") for way in WAYS},
    "bf16-accumulated-in-fp32": partial(
        train, "zero1", "gated", engine="bf16", config={"data_types": {"grad_accum_dtype": "fp32"}}
    ),
    **{
        f"offload-zero{stage}": partial(
            train, f"zero{stage}", "plain", zero={"offload_optimizer": {"device": "cpu"}, **more}
        )
        for stage, more in ((2, {}), (3, {"offload_param": {"device": "cpu"}}))
    },
    **{f"save-{way}-{engine}": partial(save, way, engine) for way in WAYS for engine in ("fp32", "bf16")},
    **{
        f"resume-{way}-from-save-{other}": partial(resume, f"save-{other}-bf16", way, "bf16", began=way != "zero3")
        for way in WAYS
        for other in (*WAYS, "four")
    },
    **{f"save-number-{way}": partial(save, way, "bf16", "number") for way in WAYS},
    **{
        f"resume-number-{way}": partial(resume, f"save-number-{way}", way, "bf16", began=False, kind="number")
        for way in WAYS
    },
    **{f"discard-{way}": partial(discard, way) for way in WAYS},
    **{f"two-losses-{way}": partial(two_losses, way) for way in WAYS},
    **{f"evaluation-{way}": partial(evaluation, way) for way in WAYS},
    **{f"recipes-{way}": partial(recipes, way) for way in WAYS},
    "parts": parts,
    "stale": stale,
    "refusals": refusals,
}


def main(rank: int, ranks: int, folder: Path, names: list[str]) -> None:
    global FOLDER
    FOLDER = folder
    torch.set_num_threads(1)
    store = f"file://{folder / 'rendezvous'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    for name in names:
        torch.save(SCENARIOS[name](), folder / f"{name}.{rank}.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
