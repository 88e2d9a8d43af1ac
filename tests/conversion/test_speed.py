"""Predicted speed: which layers a cost table leaves in BF16, what it cannot say, and who may overrule it.

The table is written by its own writer into a user's folder: BF16 costs 1e-5 ms for each multiplication, FP8 half of
that and 1 ms more, so FP8 gains from 2 ms on: K x N x tokens above 200,000.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import acceler8
from acceler8 import recipes
from acceler8.conversion import Plan, speed
from acceler8.costs import BF16, CostTable, file_name, user_folder
from acceler8.errors import PlanError, RunError
from acceler8.nn import fp8_layers
from tests.models import Mlp
from tests.models import train as train_mlp

GPU = "Some GPU"
SIZES = (16, 32, 64, 128, 256)
GRID = [(m, k, n) for m in (32, 64, 128) for k, n in itertools.product(SIZES, SIZES)]


def bf16_ms(m: int, k: int, n: int) -> float:
    return m * k * n * 1e-5


def fp8_ms(m: int, k: int, n: int) -> float:
    return bf16_ms(m, k, n) / 2 + 1.0


def table(gpu: str = GPU, names: tuple[str, ...] = ("rowwise",), fp8: Callable[..., float] = fp8_ms) -> CostTable:
    entries = {BF16: {s: bf16_ms(*s) for s in GRID}} | {name: {s: fp8(*s) for s in GRID} for name in names}
    facts = {"torch": "2.11.0", "date": "2026-11-30", "commit": "abc", "source": "measured"}
    return CostTable(gpu=gpu, entries=entries, **facts)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder with the table of GPU, and one that lacks the recipe."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    table().save(user_folder() / file_name(GPU))
    table("Tensor GPU", ("tensorwise",)).save(user_folder() / file_name("Tensor GPU"))
    return tmp_path


def rows(plan: Plan) -> dict[str, tuple[bool, str]]:
    return {row.name.removeprefix("model.layers.0."): (row.is_fp8, row.reason) for row in plan.rows}


def llama(**config: object) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    defaults = dict(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32, tie_word_embeddings=False,
    )  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**{**defaults, **config}))


def linears(**shapes: tuple[int, int]) -> nn.ModuleDict:
    return nn.ModuleDict({name: nn.Linear(k, n, bias=False) for name, (k, n) in shapes.items()})


# ----------------------------------------------------------------------------------------------- what is left, and why


def test_a_layer_that_fp8_would_slow_down_is_left_with_the_reason(home: Path):
    plan = acceler8.plan(linears(small=(32, 32), large=(64, 128)), tokens=64, gpu=GPU)
    # small: 0.655 ms in BF16, 1.328 in FP8; large: 5.243 and 3.621
    why = "FP8 would be 0.49x here: 1.33 ms against 0.655 ms, Some GPU table of 2026-11-30"
    assert rows(plan) == {"small": (False, why), "large": (True, "fprop dgrad wgrad")}
    small, large = plan.rows
    assert (small.bf16_ms, small.fp8_ms, small.recipe) == (0.65536, 1.32768, "")
    assert (large.bf16_ms, large.fp8_ms) == (5.24288, 3.62144)
    assert large.gain == pytest.approx(5.24288 / 3.62144)
    assert plan.totals.fp8_layers == 1
    s = plan.speed
    assert s is not None
    assert (s.gpu, s.source, s.tokens, s.unknown) == (GPU, "measured", 64, 0)
    assert s.bf16_ms == pytest.approx(0.65536 + 5.24288)
    assert s.planned_ms == pytest.approx(0.65536 + 3.62144)
    assert s.fp8_bf16_ms == pytest.approx(5.24288)
    assert s.gain == pytest.approx(5.89824 / 4.2768)
    text = str(plan)
    assert (
        "predicted (Some GPU table of 2026-11-30, 64 tokens): linear layers, forward and backward, 5.90 ms in BF16,"
        " 4.28 ms as planned, 1.37x; the FP8 layers are 89% of that BF16 time\n" in text + "\n"
    )
    assert "left in BF16, where FP8 would be slower: 1 layer, such as small (0.49x); never_slower=False" in text
    assert text.count("1.44x") == 1


def test_layers_that_run_as_one_are_one_layer(home: Path):
    # 128 tokens: q alone 1.31 ms in BF16 and k, v 0.655, which FP8 loses; together 2.62, which it gains
    plan = acceler8.plan(llama(), tokens=128, gpu=GPU)
    assert {n: fp8 for n, (fp8, _) in rows(plan).items()} == {
        "self_attn.q_proj": True, "self_attn.k_proj": True, "self_attn.v_proj": True, "self_attn.o_proj": False,
        "mlp.gate_proj": True, "mlp.up_proj": True, "mlp.down_proj": True, "lm_head": False,
    }  # fmt: skip
    assert sum(row.fp8_ms for row in plan.rows[:3]) == pytest.approx(fp8_ms(128, 32, 64))
    assert sum(row.bf16_ms for row in plan.rows[:3]) == pytest.approx(bf16_ms(128, 32, 64))
    assert plan.rows[0].fp8_ms == pytest.approx(fp8_ms(128, 32, 64) / 2)  # 32 of 64 outputs
    assert sum(row.fp8_ms for row in plan.rows[4:6]) == pytest.approx(fp8_ms(128, 32, 128))
    apart = acceler8.plan(llama(), tokens=128, gpu=GPU, fuse=False)
    assert [fp8 for fp8, _ in rows(apart).values()][:4] == [False] * 4
    assert apart.rows[0].fp8_ms == fp8_ms(128, 32, 32)
    # 64 tokens: the three together lose too, and go together
    slow = acceler8.plan(llama(), tokens=64, gpu=GPU)
    why = "FP8 would be 0.79x here: 1.66 ms against 1.31 ms for q_proj, k_proj, v_proj together, Some GPU"
    assert all(rows(slow)[f"self_attn.{name}_proj"][1].startswith(why) for name in "qkv")


class Gated(nn.Module):
    """A gated MLP whose parts have names that nobody knows: gate and up run as one only inside the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 64, bias=False), nn.Linear(32, 64, bias=False)
        self.c = nn.Linear(64, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(nn.functional.silu(self.a(x)) * self.b(x))


def test_layers_that_lose_their_partner_are_asked_again(home: Path):
    gated = nn.ModuleDict({"mlp": Gated()})
    whole = acceler8.plan(gated, tokens=128, gpu=GPU)
    assert whole.fp8_names == ("mlp.a", "mlp.b", "mlp.c")
    # 64 tokens: c loses; without it a and b, which as one gain (2.62 ms), are two layers of 1.31 ms, which lose
    plan = acceler8.plan(gated, tokens=64, gpu=GPU)
    assert plan.fp8_names == ()
    assert plan.fusions == ()
    assert all("1.66 ms against 1.31 ms, Some GPU" in row.reason for row in plan.rows)
    # Llama's gate and up, which are known by name, still run as one
    assert rows(acceler8.plan(llama(), tokens=64, gpu=GPU))["mlp.gate_proj"] == (True, "fprop dgrad wgrad")


def test_a_group_wider_than_the_table_is_the_sum_of_its_layers(home: Path):
    plan = acceler8.plan(llama(intermediate_size=256), tokens=64, gpu=GPU)
    gate, up = plan.rows[4:6]
    assert gate.name.endswith("gate_proj")
    assert gate.fp8_ms == up.fp8_ms == pytest.approx(fp8_ms(64, 32, 256))
    wider = acceler8.plan(llama(intermediate_size=512), tokens=64, gpu=GPU).rows[4]
    assert (wider.is_fp8, wider.fp8_ms) == (True, None)


def test_a_tie_stays_in_fp8(home: Path):
    equal = table(fp8=bf16_ms)
    plan = acceler8.plan(linears(a=(32, 32)), tokens=64, costs=equal)
    assert plan.rows[0].is_fp8
    assert plan.rows[0].gain == 1.0
    assert "slower" not in str(plan)
    hair = table(fp8=lambda *shape: bf16_ms(*shape) * 1.001)
    plan = acceler8.plan(linears(a=(32, 32)), tokens=64, costs=hair)
    assert rows(plan)["a"][1].startswith("FP8 would be 0.99x here")  # not 1.00x


def test_one_module_under_two_names_counts_once(home: Path):
    layer = nn.Linear(64, 128, bias=False)
    plan = acceler8.plan(nn.Sequential(layer, nn.ReLU(), layer), tokens=64, gpu=GPU)
    assert plan.speed is not None
    assert plan.speed.bf16_ms == bf16_ms(64, 64, 128)
    tied = linears(a=(64, 64), b=(64, 64))
    tied["b"].weight = tied["a"].weight
    plan = acceler8.plan(tied, tokens=64, gpu=GPU)
    assert [row.reason for row in plan.rows] == ["weight tied with b.weight", "weight tied with a.weight"]
    assert plan.speed is not None
    assert plan.speed.planned_ms == plan.speed.bf16_ms == 2 * bf16_ms(64, 64, 64)


def test_tokens_between_the_points(home: Path):
    plan = acceler8.plan(linears(a=(48, 80)), tokens=50, gpu=GPU)
    expected = table().predict(50, 48, 80, "rowwise")
    assert (plan.rows[0].bf16_ms, plan.rows[0].fp8_ms) == pytest.approx(expected)


# --------------------------------------------------------------------------------------------------- what is not known


@pytest.mark.parametrize(("tokens", "gpu"), [(16, GPU), (129, GPU), (64, "Tensor GPU")])
def test_what_is_not_in_the_table_stays_in_fp8(home: Path, tokens: int, gpu: str):
    plan = acceler8.plan(linears(a=(32, 32)), tokens=tokens, gpu=gpu)
    (row,) = plan.rows
    assert (row.is_fp8, row.fp8_ms, row.gain) == (True, None, None)
    assert "not in the table" in str(plan)
    assert plan.speed is not None
    assert (plan.speed.unknown, plan.speed.gain) == (1, 1.0)
    assert "tokens): nothing; 1 layer not in the table" in str(plan.speed)
    (note,) = set(plan.notes) - set(acceler8.plan(linears(a=(32, 32))).notes)
    assert "no layer is in the" in note
    assert "so none was left in BF16" in note


def test_only_what_was_measured_is_looked_up(home: Path):
    def is_known(recipe: object, gpu: str = GPU, *, frozen: bool = False) -> bool:
        model = linears(a=(64, 128)).requires_grad_(not frozen)
        return acceler8.plan(model, recipe, tokens=64, gpu=gpu).rows[0].fp8_ms is not None

    plain = recipes.get("rowwise")
    assert is_known(plain)
    assert is_known(plain.replace(name="mine", eval="fp8"))
    assert not is_known(plain.replace(name="mine").with_gemms(wgrad=False))
    exact = recipes.Gemm(a=plain.fprop.a, b=plain.fprop.b, fast_accum=not plain.fprop.fast_accum)
    assert not is_known(plain.replace(fprop=exact))
    assert not is_known("rowwise", frozen=True)
    assert not is_known("tensorwise")
    assert is_known(recipes.get("tensorwise", formats="E4M3"), "Tensor GPU")
    assert not is_known(recipes.get("tensorwise", formats="E5M2"), "Tensor GPU")  # casts x once more
    assert not is_known("delayed", "Tensor GPU")


def test_what_is_no_linear_layer_is_not_predicted(home: Path):
    plan = acceler8.plan(nn.ModuleDict({"c": nn.Conv1d(16, 16, 3), "l": nn.Linear(64, 128)}), tokens=64, gpu=GPU)
    assert plan.rows[0].bf16_ms is None
    assert plan.speed is not None
    assert plan.speed.unknown == 1


# ------------------------------------------------------------------------------------------------------- who overrules


def test_what_was_asked_for_by_name_stays(home: Path):
    model = linears(a=(32, 32), b=(32, 32))
    patterns = {"a": "rowwise", "*": "rowwise"}
    plan = acceler8.plan(model, patterns, tokens=64, gpu=GPU)
    assert plan.fp8_names == ("a",)
    assert plan.rows[0].gain == pytest.approx(0.65536 / 1.32768)
    assert "slower in FP8, and FP8 all the same" in plan.notes[-1]
    assert "1 layer, such as a (0.49x)" in plan.notes[-1]
    assert acceler8.plan(model, tokens=64, gpu=GPU, filter_fn=lambda name, _: name == "b").fp8_names == ("b",)
    assert acceler8.plan(model, tokens=64, gpu=GPU, never_slower=False).fp8_names == ("a", "b")
    assert acceler8.plan(model, {"*": "rowwise"}, tokens=64, gpu=GPU).fp8_names == ()
    assert acceler8.plan(model, tokens=64, gpu=GPU, skip=["a"], never_slower=False).fp8_names == ("b",)


def test_a_recipe_that_only_saves_memory_is_not_left(home: Path):
    costs = table(names=("activations_only",), fp8=lambda *shape: bf16_ms(*shape) * 1.2)
    plan = acceler8.plan(linears(a=(64, 128)), "activations_only", tokens=64, costs=costs)
    assert plan.fp8_names == ("a",)
    assert "to save memory): 1 layer, such as a (0.83x)" in plan.notes[-1]


def test_a_plan_that_leaves_everything_warns(home: Path):
    (warning,) = acceler8.plan(linears(a=(32, 32)), tokens=64, gpu=GPU).warnings
    assert "FP8 would cover 0% of the matrix FLOPs" in warning
    assert "1 x FP8 would be 0.49x here" in warning


def test_a_schedule_by_depth_counts_the_blocks_as_before(home: Path):
    model = nn.Sequential(*(Mlp(width=32, hidden=64) for _ in range(3)))
    plan = acceler8.plan(model, {"1.up": "rowwise", "*": "rowwise"}, tokens=64, gpu=GPU, fp8_last_layers="0:2")
    assert plan.fp8_names == ("1.up",)
    assert plan.in_fp8(0) == ("1.up",)


# ------------------------------------------------------------------------------------------------- arguments, and form


@pytest.mark.parametrize("tokens", [0, -1, True, 64.0, "64", torch.tensor(64)])
def test_tokens_that_are_none(home: Path, tokens: object):
    with pytest.raises(PlanError, match=r"tokens=.*; allowed: an integer of 1 or more.*give batch x sequence"):
        acceler8.plan(Mlp(), tokens=tokens, gpu=GPU)


def test_arguments_that_contradict_each_other(home: Path):
    with pytest.raises(PlanError, match="plan got gpu='Some GPU' without tokens"):
        acceler8.plan(Mlp(), gpu=GPU)
    with pytest.raises(PlanError, match=r"plan got gpu='Some GPU' and costs='Some GPU'; allowed: one of them"):
        acceler8.plan(Mlp(), tokens=64, gpu=GPU, costs=table())
    with pytest.raises(PlanError, match=r"'NVIDIA H20'; did you mean 'NVIDIA H200'\? valid: .*Some GPU, Tensor GPU"):
        acceler8.plan(Mlp(), tokens=64, gpu="NVIDIA H20")
    with pytest.raises(PlanError, match="never_slower='no'; allowed: True, False"):
        acceler8.plan(Mlp(), tokens=64, gpu=GPU, never_slower="no")
    (user_folder() / file_name("Bad GPU")).write_text("{")
    with pytest.raises(RunError, match="is not JSON"):
        acceler8.plan(Mlp(), tokens=64, gpu="Bad GPU")


def test_a_file_may_be_given(home: Path):
    path = user_folder() / file_name(GPU)
    for costs in (path, str(path), CostTable.load(path)):
        assert acceler8.plan(linears(a=(32, 32)), tokens=64, costs=costs).fp8_names == ()


def test_json_round_trip(home: Path):
    plan = acceler8.plan(llama(), tokens=128, gpu=GPU)
    data = json.loads(json.dumps(plan.to_dict()))
    again = Plan.from_dict(data)
    assert again == plan
    assert str(again) == str(plan)
    with pytest.raises(PlanError, match="its speed or a fusion"):
        Plan.from_dict({**data, "speed": {"gpu": GPU}})
    before = acceler8.plan(llama()).to_dict()  # as an earlier version wrote it
    del before["speed"]
    for row in before["rows"]:
        del row["bf16_ms"], row["fp8_ms"]
    assert Plan.from_dict(before) == acceler8.plan(llama())


def test_a_derived_table_is_called_so(home: Path):
    with torch.device("meta"):
        model = linears(a=(4096, 4096))
    plan = acceler8.plan(model, tokens=16384, gpu="NVIDIA H100 80GB HBM3")
    assert "predicted (derived NVIDIA H100 80GB HBM3 table of" in str(plan)
    assert plan.speed is not None
    assert plan.speed.source == "derived"
    small = acceler8.plan(model, tokens=512, gpu="NVIDIA H100 80GB HBM3")
    assert ", derived NVIDIA H100 80GB HBM3 table of" in small.rows[0].reason


# ------------------------------------------------------------------------------------------------- where it is planned


def test_on_a_cpu_nothing_changes(home: Path):
    model = llama()
    plain, asked = acceler8.plan(model), acceler8.plan(model, tokens=64)
    assert plain.rows == asked.rows
    assert asked.speed is None
    assert plain.notes == asked.notes[:-1]
    assert asked.notes[-1] == (
        "speed not predicted: the model is on cpu; gpu= predicts for a GPU that is not here, such as"
        " 'NVIDIA H100 80GB HBM3', 'NVIDIA H200', 'Some GPU', 'Tensor GPU'"
    )


def test_a_gpu_without_a_table_and_a_call_without_tokens_are_told_once(home: Path, monkeypatch: pytest.MonkeyPatch):
    """Only the GPU's name is stood in for: there is none here."""
    monkeypatch.setattr(speed, "gpu_of", lambda device: "Another GPU")
    plain = linears(a=(32, 32), b=(32, 32))
    for tokens in (None, 64):
        plan = acceler8.plan(plain, tokens=tokens)
        assert plan.fp8_names == ("a", "b")
        assert plan.speed is None
        said = "speed not measured here: there is no cost table of Another GPU; `acceler8 bench gemm --save` makes one"
        assert plan.notes.count(said) == 1
    monkeypatch.setattr(speed, "gpu_of", lambda device: GPU)
    plan = acceler8.plan(plain)
    assert plan.fp8_names == ("a", "b")
    assert [note for note in plan.notes if "speed" in note] == [
        "speed not predicted: give tokens= (batch x sequence, of one GPU), and layers that FP8 would slow down stay in"
        " BF16"
    ]
    assert acceler8.plan(plain, tokens=64).fp8_names == ()


@pytest.mark.requires(sm=89)
def test_the_gpu_of_this_process(home: Path):
    table(torch.cuda.get_device_name()).save(user_folder() / file_name(torch.cuda.get_device_name()))
    model = linears(small=(32, 32), large=(64, 128)).cuda()
    assert acceler8.plan(model, tokens=64).fp8_names == ("large",)
    with torch.device("meta"):
        assert acceler8.plan(linears(small=(32, 32)), tokens=64).fp8_names == ()


# ---------------------------------------------------------------------------------------------------------- converting


def test_a_converted_model_has_plain_layers_where_they_were_left(home: Path):
    model = Mlp(width=32, hidden=64)
    plan = acceler8.plan(model, {"up": "rowwise", "*": "rowwise"}, tokens=64, gpu=GPU)
    acceler8.convert(model, Plan.from_dict(json.loads(json.dumps(plan.to_dict()))))
    assert [name for name, _ in fp8_layers(model)] == ["up"]
    assert type(model.down) is nn.Linear
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    acceler8.attach(model, optimizer)
    report = acceler8.verify(model, optimizer, step=lambda: train_mlp(model, 1, optimizer=optimizer))
    assert "1 layers used codes of" in str(report)
    acceler8.restore(model)
    assert type(model.up) is nn.Linear


def test_a_left_layer_computes_what_the_plain_one_does(home: Path):
    torch.manual_seed(0)
    model = linears(small=(32, 32), large=(64, 128)).bfloat16()
    x = torch.randn(64, 32).bfloat16()
    before = model["small"](x)
    acceler8.convert(model, acceler8.plan(model, tokens=64, gpu=GPU))
    assert torch.equal(model["small"](x), before)
    assert [name for name, _ in fp8_layers(model)] == ["large"]


def test_other_backends_have_entries_of_their_own(home: Path):
    pytest.importorskip("torchao")
    table(names=("rowwise", "torchao:rowwise"), fp8=lambda m, k, n: 2 * bf16_ms(m, k, n)).save(
        user_folder() / file_name(GPU)
    )
    model = linears(first=(128, 256), middle=(256, 128), last=(128, 256))
    made = acceler8.plan(model, "rowwise", "torchao", tokens=64, gpu=GPU)
    is_fp8, reason = rows(made)["middle"]
    assert not is_fp8
    assert "FP8 would be 0.50x here" in reason
    table().save(user_folder() / file_name(GPU))
    made = acceler8.plan(model, "rowwise", "torchao", tokens=64, gpu=GPU)
    assert rows(made)["middle"][0]
    assert made.speed is None
    assert [note for note in made.notes if "speed" in note] == [
        f"speed not measured: the {GPU} table of 2026-11-30 has no recipe of torchao; `acceler8 bench gemm --save` adds"
        " them"
    ]
    assert not [note for note in acceler8.plan(model, "rowwise", "torchao").notes if "speed" in note]
