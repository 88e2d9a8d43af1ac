"""The plan: which layers, why, how much of the model, and that making one changes nothing."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import acceler8
from acceler8 import recipes
from acceler8.conversion import Plan
from acceler8.errors import PlanError, RecipeError
from acceler8.nn import fp8_layers
from tests.models import RECIPES, Mlp


def reasons(plan: Plan) -> dict[str, str]:
    return {row.name: row.reason for row in plan.rows if not row.is_fp8}


def skipped(layer: nn.Module, recipe: str = "rowwise") -> str:
    """Why a layer stays in high precision."""
    return reasons(acceler8.plan(nn.ModuleDict({"layer": layer, "other": nn.Linear(16, 16)}), recipe))["layer"]


# ------------------------------------------------------------------------------------------- transformers models


def llama(**config: object) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    defaults = dict(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32, tie_word_embeddings=False,
    )  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**{**defaults, **config}))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(
        BertConfig(vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
    )


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=2, n_positions=32))


def test_llama():
    model = llama()
    plan = acceler8.plan(model)
    one = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
    one += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
    assert list(plan.fp8_names) == [f"model.layers.{i}.{name}" for i in (0, 1) for name in one]
    assert reasons(plan) == {"lm_head": "output head (get_output_embeddings)"}
    block = 2 * 32 * 32 + 2 * 16 * 32 + 3 * 64 * 32
    t = plan.totals
    assert (t.fp8_layers, t.layers) == (14, 15)
    assert t.fp8_parameters == 2 * block
    assert t.parameters == sum(p.numel() for p in model.parameters())
    assert t.fp8_flops_per_token == 6 * 2 * block
    assert t.flops_per_token == 6 * (2 * block + 96 * 32)
    assert t.flops_share == pytest.approx(2 * block / (2 * block + 96 * 32))
    assert plan.warnings == ()


def test_llama_converted_trains_and_verifies():
    from transformers import LlamaForCausalLM

    model = llama()
    acceler8.convert(model, acceler8.plan(model))
    assert isinstance(model, LlamaForCausalLM)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, 96, (2, 16), generator=torch.Generator().manual_seed(0))

    def step() -> None:
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()

    assert "14 layers used codes of their new weight" in str(acceler8.verify(model, optimizer, step=step))


def test_llama_with_tied_embeddings():
    model = llama(tie_word_embeddings=True)
    plan = acceler8.plan(model)
    assert reasons(plan)["lm_head"] == "output head (get_output_embeddings)"
    acceler8.convert(model, plan)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    acceler8.verify(model)


def test_bert():
    plan = acceler8.plan(bert())
    one = ["attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"]
    one += ["intermediate.dense", "output.dense"]
    want = [f"bert.encoder.layer.{i}.{name}" for i in (0, 1) for name in one] + ["bert.pooler.dense"]
    assert list(plan.fp8_names) == want
    assert reasons(plan) == {"classifier": "output head (by its name)"}


def test_gpt2_is_conv1d_and_the_plan_warns():
    plan = acceler8.plan(gpt2())
    assert plan.fp8_names == ()
    assert reasons(plan)["transformer.h.0.attn.c_attn"] == "Conv1D is not nn.Linear"
    (warning,) = plan.warnings
    assert warning.startswith("FP8 would cover 0% of the matrix FLOPs (0 of 9 layers), so training would run almost as")
    assert "8 x Conv1D is not nn.Linear" in warning
    assert f"WARNING: {warning}" in str(plan)


def test_mixtral_runs_little_of_itself_in_fp8_and_says_so():
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = dict(vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
    model = MixtralForCausalLM(MixtralConfig(**sizes, num_key_value_heads=1, num_local_experts=4))
    plan = acceler8.plan(model)
    assert plan.totals.fp8_layers == 8
    rows = [row for row in plan.rows if row.name.endswith("mlp.experts")]
    assert [row.reason for row in rows] == ["MixtralExperts is not nn.Linear"] * 2
    assert all(row.parameters == 4 * 3 * 64 * 32 for row in rows)
    attention = 2 * (2 * 32 * 32 + 2 * 16 * 32)
    t = plan.totals
    assert (t.fp8_parameters, t.parameters) == (attention, sum(p.numel() for p in model.parameters()))


class Experts(nn.Module):
    """Fused experts: 3-D Parameters that no nn.Linear owns."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.zeros(4, 32, 128))
        self.down = nn.Parameter(torch.zeros(4, 64, 32))


def test_fused_experts_show_in_the_coverage():
    model = nn.ModuleDict({"attention": nn.Linear(32, 32, bias=False), "experts": Experts()})
    plan = acceler8.plan(model)
    assert reasons(plan) == {"experts": "Experts is not nn.Linear"}
    row = plan.rows[1]
    assert (row.type, row.shape, row.parameters) == ("Experts", (4, 32, 128), 4 * 32 * 128 + 4 * 64 * 32)
    assert (plan.totals.fp8_parameters, plan.totals.parameters) == (32 * 32, 32 * 32 + row.parameters)
    assert len(plan.warnings) == 1
    assert "1 x Experts is not nn.Linear" in plan.warnings[0]


# ---------------------------------------------------------------------------------------- layers that stay, and why


class MyLinear(nn.Linear):
    pass


def in_dtype(dtype: torch.dtype) -> nn.Linear:
    layer = nn.Linear(16, 16, bias=False)
    layer.weight = nn.Parameter(torch.zeros(16, 16).to(dtype), requires_grad=False)
    return layer


def with_hooked_weight() -> nn.Linear:
    """Old-style weight norm: the weight is an attribute that a hook computes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.utils.weight_norm(nn.Linear(16, 32))


def with_own_forward() -> nn.Linear:
    """As accelerate's and other libraries' hooks leave a layer."""
    layer = nn.Linear(16, 16)
    original = layer.forward
    layer.forward = lambda x: original(x)
    return layer


def sparse_weight() -> nn.Linear:
    layer = nn.Linear(16, 16)
    layer.weight = nn.Parameter(layer.weight.detach().to_sparse())
    return layer


class Wrapped(torch.Tensor):
    """Stands for a quantisation library's tensor subclass, which claims a high-precision dtype."""


def subclass_weight() -> nn.Linear:
    layer = nn.Linear(16, 16)
    layer.weight = nn.Parameter(torch.zeros(16, 16).as_subclass(Wrapped))
    return layer


STAY = {
    "a subclass": (MyLinear(16, 16), "MyLinear is a subclass of nn.Linear: its own forward would be lost"),
    "in_features": (nn.Linear(30, 16), "30 not a multiple of 16, which FP8 GEMM needs"),
    "both": (nn.Linear(30, 17), "30 and 17 not a multiple of 16, which FP8 GEMM needs"),
    "int8": (in_dtype(torch.int8), "weight is int8, not bf16, fp16 or fp32"),
    "float64": (in_dtype(torch.float64), "weight is float64, not bf16, fp16 or fp32"),
    "weight norm": (
        parametrizations.weight_norm(nn.Linear(16, 32)),
        "parametrised (its weight is computed, not stored)",
    ),
    "old weight norm": (with_hooked_weight(), "its weight is computed, not stored"),
    "own forward": (
        with_own_forward(),
        "its forward was replaced on the instance (a library's hook, say), so FP8 would",
    ),
    "sparse": (sparse_weight(), "weight is a Parameter of layout torch.sparse_coo, not a dense tensor"),
    "tensor subclass": (subclass_weight(), "weight is a Wrapped of layout torch.strided, not a dense tensor"),
    "embedding": (nn.Bilinear(16, 16, 16), "Bilinear is not nn.Linear"),
    "convolution": (nn.Conv1d(16, 16, 3), "Conv1d is not nn.Linear"),
}


@pytest.mark.parametrize("kind", STAY)
def test_a_layer_that_cannot_be_fp8_is_listed_with_the_reason(kind):
    layer, reason = STAY[kind]
    assert skipped(layer).startswith(reason)


def test_sixteen_bit_weights_are_taken():
    for dtype in (torch.bfloat16, torch.float16):
        plan = acceler8.plan(nn.ModuleDict({"layer": nn.Linear(16, 32, dtype=dtype)}))
        assert plan.fp8_names == ("layer",)
        assert plan.rows[0].dtype == str(dtype).removeprefix("torch.")


def test_odd_widths_matter_only_where_a_gemm_is_in_fp8():
    assert acceler8.plan(nn.Linear(30, 17), "activations_only").fp8_names == ("(root)",)


def test_a_parametrised_layer_has_one_row_with_its_own_numbers():
    layer = nn.Linear(16, 32)
    parametrize.register_parametrization(layer, "weight", nn.Tanh())
    plan = acceler8.plan(nn.ModuleDict({"layer": layer}))
    (row,) = plan.rows
    assert (row.name, row.shape, row.parameters) == ("layer", (32, 16), 16 * 32 + 32)


def test_embeddings_and_norms_are_no_rows():
    model = nn.Sequential(nn.Embedding(100, 16), nn.EmbeddingBag(100, 16), nn.LayerNorm(16), nn.Linear(16, 16))
    assert [row.name for row in acceler8.plan(model).rows] == ["3"]


def test_tied_weights_stay():
    model = nn.ModuleDict({"a": nn.Linear(32, 32), "b": nn.Linear(32, 32), "c": nn.Linear(32, 32)})
    model["c"].weight = model["a"].weight
    assert reasons(acceler8.plan(model)) == {"a": "weight tied with c.weight", "c": "weight tied with a.weight"}


def test_lora_adapters_and_their_frozen_base():
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(Mlp(), LoraConfig(r=8, target_modules=["up"]))
    plan = acceler8.plan(model)
    rows = {row.name.removeprefix("base_model.model."): row for row in plan.rows}
    assert rows["up.base_layer"].is_fp8
    assert rows["up.base_layer"].reason == "fprop dgrad (frozen: no wgrad)"
    assert rows["up.base_layer"].flops_per_token == 4 * 32 * 64
    assert "8 not a multiple of 16" in rows["up.lora_A.default"].reason


def test_an_uninitialised_lazy_layer_is_an_error():
    with pytest.raises(PlanError, match=r"'0\.weight' is not initialised yet; run the model's forward once"):
        acceler8.plan(nn.Sequential(nn.LazyLinear(16)))


def test_a_model_without_matrices():
    plan = acceler8.plan(nn.LayerNorm(16))
    assert plan.rows == ()
    assert plan.warnings[0].endswith("Why: the model has no weight matrices")
    str(plan)


# ------------------------------------------------------------------------------------------- skip, filter_fn, recipe


class Deep(nn.Module):
    def __init__(self, layers: int = 60) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mlp() for _ in range(layers))


@pytest.mark.parametrize(
    ("skip", "left"),
    [
        (["up"], ["layers.0.up", "layers.1.up"]),
        (["layers.1"], ["layers.1.up", "layers.1.down"]),
        (["layers.0.down", "layers.1.up"], ["layers.0.down", "layers.1.up"]),
        (["*.1.*"], ["layers.1.up", "layers.1.down"]),
        ((), []),
    ],
)
def test_skip(skip, left):
    found = reasons(acceler8.plan(Deep(2), skip=skip))
    assert sorted(found) == sorted(left)
    assert all(reason.startswith("skipped by name (") for reason in found.values())


def test_a_recipes_own_skip_list_counts_too():
    plan = acceler8.plan(Deep(2), recipes.get("rowwise", skip=("layers.0",)), skip=["layers.1.up"])
    assert plan.fp8_names == ("layers.1.down",)


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("donw", "skip names 'donw', which fits no layer; did you mean 'down'? there are: down, layers, norm, up"),
        ("layers.59.upp", "skip names 'layers.59.upp', which fits no layer; did you mean 'layers.59.up'?"),
        ("layers.[7].zzz*", "skip names 'layers.[7].zzz*', which fits no layer"),
        ("", "skip names '', which fits no layer"),
    ],
)
def test_a_skip_that_fits_nothing_names_the_nearest(pattern, said):
    for call in (
        lambda: acceler8.plan(Deep(), skip=[pattern]),
        lambda: acceler8.plan(Deep(), recipes.get("rowwise", skip=(pattern,))),
    ):
        with pytest.raises(PlanError) as error:
            call()
        assert str(error.value).startswith(said)
        assert len(str(error.value)) < 1500


def test_skip_takes_a_list():
    with pytest.raises(PlanError, match=r"write skip=\['up'\]"):
        acceler8.plan(Mlp(), skip="up")


def test_filter_fn_sees_only_layers_that_would_be_converted():
    asked = []

    def wide(name: str, module: nn.Module) -> bool:
        asked.append(name)
        return module.out_features > 32

    model = nn.ModuleDict({"a": nn.Linear(32, 64), "b": nn.Linear(64, 32), "lm_head": nn.Linear(32, 64)})
    plan = acceler8.plan(model, filter_fn=wide)
    assert plan.fp8_names == ("a",)
    assert reasons(plan)["b"] == "left by filter_fn"
    assert asked == ["a", "b"]


def test_unknown_names():
    with pytest.raises(RecipeError, match="unknown recipe 'rowise'; did you mean 'rowwise'"):
        acceler8.plan(Mlp(), "rowise")
    with pytest.raises(PlanError, match="unknown backend 'nativ'; did you mean 'native'"):
        acceler8.plan(Mlp(), backend="nativ")


def test_what_is_fp8_of_a_layer():
    def said(recipe: object, *, frozen: bool = False) -> str:
        (row,) = acceler8.plan(nn.Linear(16, 16).requires_grad_(not frozen), recipe).rows
        assert row.is_fp8 == ("nothing" not in row.reason)
        return row.reason

    assert said("rowwise") == "fprop dgrad wgrad"
    assert said("rowwise", frozen=True) == "fprop dgrad (frozen: no wgrad)"
    assert said(recipes.get("rowwise").with_gemms(wgrad=False)) == "fprop dgrad"
    assert said("activations_only") == "x kept for backward in E4M3 rowwise"
    assert said("activations_only", frozen=True) == "nothing of it is in FP8 by this recipe: frozen"
    off = recipes.get("rowwise").with_gemms(fprop=False, dgrad=False, wgrad=False)
    assert said(off) == "nothing of it is in FP8 by this recipe"
    half = off.replace(fprop=recipes.Gemm(a=recipes.get("rowwise").fprop.a, b=recipes.Operand()))
    assert said(half) == "fprop in high precision on E4M3 rowwise values"


def test_notes_say_what_the_recipe_and_the_device_do():
    plan = acceler8.plan(Mlp(), recipes.get("rowwise", formats="E5M2"))
    assert "wgrad re-quantises x in E4M3: no GPU multiplies E5M2 x E5M2" in plan.notes
    assert any(note.startswith("emulated: the CPU has no rowwise FP8 GEMM") for note in plan.notes)
    assert any("x is kept for backward in E4M3 rowwise" in n for n in acceler8.plan(Mlp(), "activations_only").notes)


# --------------------------------------------------------------------------------------------------- form and effect


@pytest.mark.parametrize("recipe", RECIPES)
def test_json_round_trip(recipe):
    plan = acceler8.plan(llama(), recipe, skip=["down_proj"])
    again = Plan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert again == plan
    assert str(again) == str(plan)


def test_json_that_is_no_plan_is_an_error():
    data = acceler8.plan(Mlp()).to_dict()
    with pytest.raises(PlanError, match="unknown plan key 'rowz'; did you mean 'rows'"):
        Plan.from_dict({**data, "rowz": []})
    with pytest.raises(PlanError, match="plan lacks totals"):
        Plan.from_dict({key: value for key, value in data.items() if key != "totals"})
    with pytest.raises(PlanError, match=r"a row or the totals.*'width'"):
        Plan.from_dict({**data, "rows": [{**data["rows"][0], "width": 1}]})
    with pytest.raises(PlanError, match=r"a row or the totals.*'shape'"):
        Plan.from_dict({**data, "rows": [{"name": "up"}]})
    broken = json.loads(json.dumps(data))
    broken["recipe"]["fprop"]["a"]["format"] = "E4M4"
    with pytest.raises(RecipeError, match="unknown format 'E4M4'"):
        Plan.from_dict(broken)


def test_the_table_has_a_line_a_layer_and_keeps_brackets():
    text = str(acceler8.plan(Deep(2), skip=["layers.[1].*"]))
    lines = text.splitlines()
    for name in ("layers.0.up", "layers.1.down"):
        assert sum(name in line for line in lines) == 1
    assert "skipped by name (layers.[1].*)" in text
    assert "FP8: 2 of 4 layers" in text
    assert max(map(len, lines)) <= 130
    odd = nn.Module()
    odd.add_module("x[bold]:smile:", nn.Linear(16, 16))
    assert "x[bold]:smile:" in str(acceler8.plan(odd))


def test_a_plan_changes_nothing():
    model = Mlp()
    before = {name: (type(m), dict(vars(m))) for name, m in model.named_modules()}
    acceler8.plan(model, "delayed")
    for name, module in model.named_modules():
        assert type(module) is before[name][0]
        assert dict(vars(module)) == before[name][1]


def test_one_module_under_two_names_is_one_layer():
    layer = torch.nn.Linear(32, 32)
    plan = acceler8.plan(torch.nn.Sequential(layer, torch.nn.ReLU(), layer))
    assert plan.fp8_names == ("0",)


# ----------------------------------------------------------------------------------------- what is kept for backward


def test_what_is_kept_for_backward_is_the_plans_before_the_recipes():
    model = llama()
    assert "kept for backward" not in str(acceler8.plan(model))
    plan = acceler8.plan(model, recipes.get("rowwise", save_for_backward="fp8"), save_for_backward="fp8_compressed")
    assert plan.recipe == recipes.get("rowwise", save_for_backward="fp8_compressed")
    assert "kept for backward: inputs of norms and MLPs' activations in FP8 (1x128)" in str(plan)
    assert plan.warnings == ()
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
    assert "kept for backward: inputs as they are" in str(acceler8.plan(model, save_for_backward="bf16"))
    converted = acceler8.convert(llama(), save_for_backward="bf16")
    layers = [layer for _, layer in fp8_layers(converted)]
    assert {layer._acceler8_layer.recipe.save_for_backward for layer in layers} == {"bf16"}


def test_what_is_kept_for_backward_of_recipes_by_pattern():
    mapping = {"*.mlp.*": "tensorwise", "model.layers.0": None, "*": recipes.get("rowwise", save_for_backward="bf16")}
    plan = acceler8.plan(llama(), mapping)
    assert [n for n in plan.notes if "kept" in n] == [
        "rowwise: kept for backward: inputs as they are, cast again for wgrad"
    ]
    plan = acceler8.plan(llama(), mapping, save_for_backward="fp8_compressed")
    assert [own and own.save_for_backward for _, own in plan.recipe.patterns] == [
        "fp8_compressed",
        None,
        "fp8_compressed",
    ]
    assert sum("kept for backward: inputs of norms" in note for note in plan.notes) == 2


def test_what_cannot_be_kept_for_backward():
    with pytest.raises(RecipeError, match="unknown save_for_backward 'fp16'"):
        acceler8.plan(Mlp(), save_for_backward="fp16")
    with pytest.raises(RecipeError, match="save_for_backward='bf16' with recipe 'activations_only'"):
        acceler8.plan(Mlp(), "activations_only", save_for_backward="bf16")
    with pytest.raises(RecipeError, match=r"pattern 'up': save_for_backward='bf16' with recipe 'activations_only'"):
        acceler8.plan(Mlp(), {"up": "activations_only", "*": "rowwise"}, save_for_backward="bf16")
    model = Mlp()
    with pytest.raises(PlanError, match="convert got save_for_backward beside a Plan"):
        acceler8.convert(model, acceler8.plan(model), save_for_backward="bf16")


def test_a_policy_that_keeps_no_less_is_warned_of():
    warning = "save_for_backward fp8_compressed keeps no less than fp8 here"
    plain = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))
    assert any(warning in w for w in acceler8.plan(plain, save_for_backward="fp8_compressed").warnings)
    mlp = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
    assert acceler8.plan(mlp, save_for_backward="fp8_compressed").warnings == ()
    assert any(warning in w for w in acceler8.plan(llama(), save_for_backward="fp8_compressed", fuse=False).warnings)
    assert not any(warning in w for w in acceler8.plan(plain, save_for_backward="bf16").warnings)
    assert acceler8.plan(Mlp(), save_for_backward="fp8_compressed").warnings == ()  # it has a norm
