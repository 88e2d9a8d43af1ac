"""Hugging Face models whose loss is computed without logits: the same loss and gradients as with them."""

from __future__ import annotations

import copy
import inspect
import pickle
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import acceler8
from acceler8.errors import LabelError, PlanError
from acceler8.nn import DeferredLogits, Fp8Linear, FusedHeadLoss
from acceler8.nn.head_loss import fused_head_class
from tests.functional.support import Largest

transformers = pytest.importorskip("transformers")
functional = sys.modules["acceler8.functional.head_loss"]  # the function has its module's name

V, LENGTH = 101, 9
U = 2.0**-24
COMMON = {
    "vocab_size": V, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "attn_implementation": "eager",
}  # fmt: skip
GPT2 = {
    "vocab_size": V, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 2,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "attn_implementation": "eager",
}  # fmt: skip
by_peft = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
MIXTRAL = {"num_local_experts": 4, "output_router_logits": True, "experts_implementation": "eager"}
# name -> (configuration's class, model's class, settings)
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "llama, tied": ("LlamaConfig", "LlamaForCausalLM", {"tie_word_embeddings": True}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 8}),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", {"head_dim": 8}),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {"head_dim": 8, "final_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {"head_dim": 8, "final_logit_softcapping": 3.0}),
    "phi": ("PhiConfig", "PhiForCausalLM", {"resid_pdrop": 0.0}),  # a head with a bias
    "phi3": ("Phi3Config", "Phi3ForCausalLM", {}),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM", {"no_rope_layers": [1, 1]}),
    "granite": ("GraniteConfig", "GraniteForCausalLM", {"logits_scaling": 4.0}),
    "cohere": ("CohereConfig", "CohereForCausalLM", {"logit_scale": 0.3}),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", {}),  # its head is embed_out
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", MIXTRAL),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", GPT2),
}


def make(family: str = "llama", **more: Any) -> nn.Module:
    config, model, settings = FAMILIES[family]
    if not hasattr(transformers, model):
        pytest.skip(f"this transformers has no {model}")
    torch.manual_seed(0)
    made = getattr(transformers, model)(
        getattr(transformers, config)(**{**({} if settings is GPT2 else COMMON), **settings, **more})
    )
    with torch.no_grad():
        for p in made.parameters():
            p += 0.1 * torch.randn_like(p)
    return made.train()


def batch(seed: int = 1) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, V, (2, LENGTH), generator=g)
    labels = ids.clone()
    labels[0, :3] = -100
    return {"input_ids": ids, "labels": labels}


def fused(model: nn.Module) -> nn.Module:
    return acceler8.fused_head_loss(copy.deepcopy(model))


def gradients(model: nn.Module, upstream: float = 0.7, **inputs: Any) -> tuple[Any, dict[str, Tensor]]:
    model.zero_grad()
    out = model(**inputs)
    (out.loss * upstream).backward()
    return out, {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    total = sum(t.square().sum() for t in b.values()).sqrt()
    return (sum((a[name] - b[name]).square().sum() for name in a).sqrt() / total).item()


def compare(model: nn.Module, **inputs: Any) -> Any:
    """Loss and all gradients against the model's own path in float64, no further off than twice the own path in FP32
    and four units more: the same GEMMs in another order of sums, one softmax, and everything behind it the same code.
    """
    exact, wanted = gradients(copy.deepcopy(model).double(), **inputs)
    plain, stock = gradients(model, **inputs)
    twin = fused(model)
    out, ours = gradients(twin, **inputs)
    assert isinstance(out.logits, DeferredLogits)
    assert twin.head_loss_reasons == ()
    assert out.loss.dtype == torch.float32
    loss = exact.loss.item()
    assert abs(out.loss.item() - loss) <= 2 * abs(plain.loss.item() - loss) + 4 * U * abs(loss)
    assert distance(ours, wanted) <= 2 * distance(stock, wanted) + 4 * U
    return out


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family):
    compare(make(family), **batch())


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_options_of_the_loss(family):
    model, inputs = make(family), batch()
    for items in (5, torch.tensor(5), torch.tensor(5.0)):
        compare(model, **inputs, num_items_in_batch=items)
    ignored = int(inputs["labels"][1, 4])
    others = inputs["labels"].where(inputs["labels"] != -100, ignored)
    compare(model, input_ids=inputs["input_ids"], labels=others, ignore_index=ignored)
    shifted = torch.roll(inputs["labels"], -2, 1)  # what no shift of labels gives
    compare(model, **inputs, shift_labels=shifted)
    compare(model, input_ids=inputs["input_ids"], labels=inputs["labels"][:, -4:], logits_to_keep=4)
    compare(model, **inputs, attention_mask=(torch.arange(LENGTH) < LENGTH - 2).long().expand(2, -1))


def test_no_tensor_is_as_large_as_the_logits(monkeypatch):
    monkeypatch.setattr(functional, "_CHUNK_BYTES", 1)
    monkeypatch.setattr(functional, "_LEAST_TOKENS", 128)
    ids = torch.randint(3, 1000, (16, 32), generator=torch.Generator().manual_seed(0))
    model = make("gemma2", vocab_size=1000, hidden_size=8, intermediate_size=16)
    most = []
    for m in (fused(model), model):
        with Largest() as seen:
            m(input_ids=ids, labels=ids).loss.backward()
        most.append(seen.elements)
    assert most == [128 * 1000, 512 * 1000]


def test_labels_may_be_positional():
    model = make()
    at = list(inspect.signature(model.forward).parameters).index("labels")
    arguments = [None] * at
    arguments[0] = batch()["input_ids"]
    out = fused(model)(*arguments, batch()["labels"])
    assert isinstance(out.logits, DeferredLogits)
    torch.testing.assert_close(out.loss, model(**batch()).loss)


def test_tuples_keep_their_places():
    model, twin = make().eval(), fused(make()).eval()
    plain, ours = (m(**batch(), return_dict=False) for m in (model, twin))
    assert len(plain) == len(ours)
    torch.testing.assert_close(ours[0], plain[0])
    assert torch.equal(ours[1].detach(), plain[1].detach())


@pytest.mark.parametrize("mode", ["train", "eval", "no_grad"])
def test_logits_that_are_read_are_the_models_own(mode):
    model = make().train(mode == "train")
    twin = fused(model)
    with torch.set_grad_enabled(mode != "no_grad"):
        plain, out = model(**batch()), twin(**batch())
    torch.testing.assert_close(out.loss, plain.loss)
    assert out.loss.requires_grad == (mode != "no_grad")
    if mode == "train":  # who reads them at each step has gained nothing, and should know
        with pytest.warns(
            UserWarning, match=r"the logits of a forward with labels were read \(argmax\), so all logits"
        ):
            assert torch.equal(out.logits.argmax(-1), plain.logits.argmax(-1))
        assert twin.head_loss_reasons == ("the logits of a forward with labels were read (argmax)",)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # once
            twin(**batch()).logits.argmax(-1)
    assert torch.equal(out.logits.detach(), plain.logits.detach())
    assert len(twin.head_loss_reasons) == (mode == "train")


def test_without_labels_it_is_the_authors_forward():
    model = make().eval()
    twin, ids = fused(model), batch()["input_ids"]
    assert torch.equal(twin(input_ids=ids).logits, model(input_ids=ids).logits)
    assert type(twin(ids).logits) is Tensor
    options = {"max_new_tokens": 4, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(twin.generate(ids, **options), model.generate(ids, **options))


def test_frozen_head_or_body():
    model = make()
    model.lm_head.weight.requires_grad_(False)
    compare(model, **batch())
    model.requires_grad_(False)
    model.lm_head.weight.requires_grad_(True)
    compare(model, **batch())


def test_gradient_checkpointing():
    model = make()
    name = "activation_checkpointing_enable"  # its newer name
    getattr(model, name if hasattr(model, name) else "gradient_checkpointing_enable")()
    compare(model, **batch(), use_cache=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("autocast", [False, True])
def test_16_bit(autocast, dtype):
    """No further from float64 than twice the own path in 16 bit, and one rounding of dx more."""
    model = make("gemma2")
    exact, wanted = gradients(copy.deepcopy(model).double(), **batch())
    narrow = model if autocast else model.to(dtype)
    with torch.autocast("cpu", dtype, enabled=autocast):
        plain, stock = gradients(narrow, **batch())
        out, ours = gradients(fused(narrow), **batch())
    loss = exact.loss.item()
    last = 2.0**-8 if dtype is torch.bfloat16 else 2.0**-11
    assert out.logits.dtype is plain.logits.dtype
    assert abs(out.loss.item() - loss) <= 2 * abs(plain.loss.item() - loss) + last * loss
    assert distance(ours, wanted) <= 2 * distance(stock, wanted) + last


@by_peft
def test_lora_around_it():
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(make(), LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False))
    plain, stock = gradients(model, **batch())
    assert acceler8.fused_head_loss(model) is model
    out, ours = gradients(model, **batch())
    assert isinstance(out.logits, DeferredLogits)
    torch.testing.assert_close(out.loss, plain.loss)
    assert distance(ours, stock) < 64 * U
    assert model.head_loss_reasons == ()  # through PEFT's own delegation


REASONS: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "a hook": (lambda m: m.lm_head.register_forward_hook(lambda *a: None), "lm_head has a hook"),
    "a forward of its own": (
        lambda m: m.lm_head.__dict__.update(forward=m.lm_head.forward),
        "lm_head has a forward of",
    ),
    "a custom loss": (lambda m: setattr(m, "loss_function", custom_loss), "the model's loss_function is not that of"),
}


def custom_loss(logits: Tensor, labels: Tensor, vocab_size: int, **kwargs: Any) -> Tensor:
    return logits.square().mean()


@pytest.mark.parametrize("name", REASONS)
def test_what_does_not_fit_runs_the_authors_path_and_says_why(name):
    change, reason = REASONS[name]
    model, twin = make(), fused(make())
    for m in (model, twin):
        change(m)
    with pytest.warns(UserWarning, match=f"^fused_head_loss: {reason}.*so all logits are computed as without it"):
        out, ours = gradients(twin, **batch())
    plain, stock = gradients(model, **batch())
    assert type(out.logits) is Tensor
    assert torch.equal(out.loss, plain.loss)
    assert distance(ours, stock) == 0
    assert len(twin.head_loss_reasons) == 1
    assert twin.head_loss_reasons[0].startswith(reason)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the second time in silence
        twin(**batch())


@by_peft
def test_a_head_with_an_adapter_runs_as_it_is():
    from peft import LoraConfig, get_peft_model

    twin = fused(make())
    wrapped = get_peft_model(twin, LoraConfig(r=4, target_modules=["lm_head"], init_lora_weights=False))
    with pytest.warns(UserWarning, match="lm_head is a Linear, not nn.Linear itself"):
        out = wrapped(**batch())
    out.loss.backward()
    assert type(out.logits) is Tensor
    acceler8.fused_head_loss(wrapped, on=False)
    assert torch.equal(out.loss, wrapped(**batch()).loss)


def test_an_fp8_head_runs_as_it_is():
    model = make(vocab_size=112)
    acceler8.convert(model.lm_head, "rowwise")  # by itself: as part of the model a plan leaves it
    assert type(model.lm_head) is Fp8Linear
    plain = model(**batch())
    acceler8.fused_head_loss(model)
    with pytest.warns(UserWarning, match="lm_head is a Fp8Linear"):
        out = model(**batch())
    torch.testing.assert_close(out.loss, plain.loss)


class Reads(transformers.LlamaForCausalLM):
    """As models were written before ``loss_function``, with the shift in the forward."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any) -> Any:
        logits = self.lm_head(self.model(input_ids, **kwargs).last_hidden_state)
        loss = None
        if labels is not None:
            left = logits[..., :-1, :].contiguous()
            loss = nn.functional.cross_entropy(left.view(-1, V), labels[..., 1:].reshape(-1))
        self.last_loss = loss
        return transformers.modeling_outputs.CausalLMOutputWithPast(loss=loss, logits=logits)


def test_a_forward_that_reads_its_logits_computes_them():
    torch.manual_seed(0)
    model = Reads(transformers.LlamaConfig(**COMMON))
    twin = fused(model)
    with pytest.warns(UserWarning, match=r"the model's forward reads the logits \(getitem\)"):
        out, ours = gradients(twin, **batch())
    plain, stock = gradients(model, **batch())
    assert torch.equal(out.loss, plain.loss)
    assert distance(ours, stock) == 0
    assert twin.last_loss is out.loss  # what a forward sets on its model is set on the model


def test_shapes_that_do_not_fit_fail_as_the_author_fails():
    twin = fused(make())
    with (
        pytest.warns(UserWarning, match=r"labels \(2, 7\) do not fit logits \(2, 9, 101\)"),
        pytest.raises(ValueError, match="batch_size"),
    ):
        twin(input_ids=batch()["input_ids"], labels=batch()["labels"][:, 2:])
    wrong = batch()
    wrong["labels"][1, 5] = V
    with pytest.raises(LabelError, match="label 101 is outside the vocabulary"):
        twin(**wrong)


def test_on_twice_off_twice():
    model = make()
    author, forward, keys = type(model), type(model).forward, list(model.state_dict())
    parts = [id(m) for m in model.modules()]
    signature = inspect.signature(model.forward)
    for _ in range(2):
        assert acceler8.fused_head_loss(model) is model
        assert isinstance(model, FusedHeadLoss)
        assert isinstance(model, author)
    assert type(model) is fused_head_class(author)
    assert (type(model).__name__, type(model).__module__) == (author.__name__, author.__module__)
    assert inspect.signature(model.forward) == signature  # trainers look for labels and **kwargs there
    assert list(model.state_dict()) == keys
    assert [id(m) for m in model.modules()] == parts
    for _ in range(2):
        assert acceler8.fused_head_loss(model, on=False) is model
        assert type(model) is author
    assert author.forward is forward
    assert "_acceler8_head_loss" not in model.__dict__
    assert type(model(**batch()).logits) is Tensor


def test_copies_and_pickles_are_fused_and_saved_models_plain(tmp_path):
    twin = fused(make())
    want = twin(**batch()).loss
    for other in (copy.deepcopy(twin), pickle.loads(pickle.dumps(twin)), copy.copy(twin)):
        assert type(other) is type(twin)
        out = other(**batch())
        assert isinstance(out.logits, DeferredLogits)
        assert torch.equal(out.loss, want)
    copied = copy.deepcopy(twin)
    assert copied._acceler8_head_loss is not twin._acceler8_head_loss
    twin.save_pretrained(tmp_path)
    assert '"LlamaForCausalLM"' in (tmp_path / "config.json").read_text()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").train()
    assert type(loaded) is transformers.LlamaForCausalLM
    torch.testing.assert_close(loaded(**batch()).loss, want)


def test_threads_and_nested_calls_do_not_meet():
    model = make()
    twin = fused(model)
    inputs = [batch(seed) for seed in range(4)]
    want = [model(**i).loss.item() for i in inputs]
    got: list[list[float]] = [[] for _ in inputs]

    def work(i: int) -> None:
        for _ in range(5):
            got[i].append(twin(**inputs[i]).loss.item())

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert got == [pytest.approx([w] * 5, rel=8 * U) for w in want]
    inner: list[float] = []
    handle = twin.model.layers[1].register_forward_hook(
        lambda *a: inner.append(twin(**inputs[1]).loss.item()) if not inner and not inner.append(0.0) else None
    )
    outer = twin(**inputs[0]).loss.item()
    handle.remove()
    assert (outer, inner[1]) == (pytest.approx(want[0], rel=8 * U), pytest.approx(want[1], rel=8 * U))


def test_hooks_of_the_model_run_once_and_a_failed_call_leaves_nothing():
    twin, seen = fused(make()), []
    twin.register_forward_hook(lambda *a: seen.append("out"))
    twin.register_forward_pre_hook(lambda *a: seen.append("in"))
    twin(**batch())
    assert seen == ["in", "out"]
    before = set(twin.__dict__)
    with pytest.raises(IndexError):
        twin(input_ids=torch.tensor([[V + 5]]), labels=torch.tensor([[1]]))
    assert set(twin.__dict__) == before
    assert type(twin.lm_head) is nn.Linear


@pytest.mark.parametrize("recipe", ["rowwise", "delayed"])
@pytest.mark.parametrize("first", ["convert", "fuse"])
def test_with_fp8_layers_in_either_order(first, recipe):
    model, twin = make(), make()
    acceler8.convert(model, recipe)
    if first == "fuse":
        acceler8.fused_head_loss(twin)
        acceler8.convert(twin, recipe)
    else:
        acceler8.fused_head_loss(acceler8.convert(twin, recipe))
    plain, stock = gradients(model, **batch())
    out, ours = gradients(twin, **batch())
    assert isinstance(out.logits, DeferredLogits)
    torch.testing.assert_close(out.loss, plain.loss)
    # the gradient that enters the layers differs by rounding, so single codes may fall the other way
    assert distance(ours, stock) < 2e-2
    acceler8.verify(twin)
    acceler8.restore(twin)
    assert isinstance(twin, FusedHeadLoss)
    acceler8.fused_head_loss(twin, on=False)
    assert type(twin) is transformers.LlamaForCausalLM


@pytest.fixture
def one_process() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("unused", [False, True])
@pytest.mark.usefixtures("one_process")
def test_in_ddp(unused):
    model = make("llama, tied")
    want, stock = gradients(model, **batch())
    wrapped = nn.parallel.DistributedDataParallel(make("llama, tied"), find_unused_parameters=unused)
    acceler8.fused_head_loss(wrapped)
    for _ in range(2):
        out, ours = gradients(wrapped, **batch())
        assert isinstance(out.logits, DeferredLogits)
        torch.testing.assert_close(out.loss, want.loss)
        assert distance({name.removeprefix("module."): g for name, g in ours.items()}, stock) < 64 * U


@pytest.mark.parametrize("first", ["shard", "fuse"])
@pytest.mark.usefixtures("one_process")
def test_in_fsdp2(first):
    from torch.distributed import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    want, stock = gradients(make(), **batch())
    model = make()
    if first == "fuse":
        acceler8.fused_head_loss(model)
    mesh = init_device_mesh("cpu", (1,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    acceler8.fused_head_loss(model)
    out = model(**batch())
    (out.loss * 0.7).backward()
    assert isinstance(out.logits, DeferredLogits)
    assert model.head_loss_reasons == ()
    torch.testing.assert_close(out.loss, want.loss)
    ours = {n: p.grad.full_tensor().double() for n, p in model.named_parameters()}
    assert distance(ours, stock) < 64 * U
    acceler8.fused_head_loss(model, on=False)
    assert not isinstance(model, FusedHeadLoss)


def test_compiled_as_a_whole_it_is_the_authors():
    torch._dynamo.reset()
    model = make()
    twin = fused(model)
    compiled = torch.compile(twin, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own
        out = compiled(**batch())
    assert type(out.logits) is Tensor
    torch.testing.assert_close(out.loss, model(**batch()).loss)


def test_models_that_are_none_of_it_get_a_typed_error():
    with pytest.raises(PlanError, match=r"no causal language model in this Linear; allowed: a Hugging Face model with"):
        acceler8.fused_head_loss(nn.Linear(2, 2))
    bert = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=50, hidden_size=8, num_attention_heads=2,
                                        num_hidden_layers=1, intermediate_size=8))  # fmt: skip
    with pytest.raises(PlanError, match=r"BertForMaskedLM has no output head among its children; allowed"):
        acceler8.fused_head_loss(bert)
    wrapped = make()
    wrapped.forward = wrapped.forward
    with pytest.raises(PlanError, match="has a forward of its own on the instance; call fused_head_loss before"):
        acceler8.fused_head_loss(wrapped)
    other = make()
    other.loss_function = custom_loss
    with pytest.raises(PlanError, match=r"LlamaForCausalLM.loss_function is not ForCausalLMLoss"):
        acceler8.fused_head_loss(other)
    plain = nn.Linear(2, 2)
    assert acceler8.fused_head_loss(plain, on=False) is plain
