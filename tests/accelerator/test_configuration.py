"""An Accelerator configured by code, environment and file: what holds, who decided, and that it is what runs."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import acceler8
from acceler8 import backends, recipes
from acceler8.accelerator import Accelerator
from acceler8.costs import BF16, CostTable, file_name, user_folder
from acceler8.errors import Acceler8Error, ConfigError, RecipeError
from acceler8.nn import Fp8Linear, fp8_layers, state_of
from acceler8.utils import (
    AORecipeKwargs,
    DistributedType,
    FP8BackendType,
    FP8RecipeKwargs,
    FullyShardedDataParallelPlugin,
    MSAMPRecipeKwargs,
    NativeRecipeKwargs,
    PrecisionType,
    TERecipeKwargs,
    TorchDynamoPlugin,
)
from tests.config.packages import install, uninstall


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32))


def report_line(accelerator: Accelerator, key: str) -> str:
    (line,) = [line for line in str(accelerator.fp8_report()).splitlines() if line.startswith(f"  {key} = ")]
    return " ".join(line.split())


# --- precision and arguments


@pytest.mark.parametrize("word", ["FP8", "Fp8", PrecisionType.FP8])
def test_precision_in_any_case(word) -> None:
    accelerator = Accelerator(word, cpu=True)
    assert accelerator.mixed_precision == "fp8"
    assert accelerator.fp8_enabled
    assert accelerator.fp8_backend is FP8BackendType.NATIVE
    assert isinstance(accelerator.prepare(model())[0], Fp8Linear)


def test_environment_decides_what_code_leaves_open(monkeypatch) -> None:
    assert Accelerator(cpu=True).mixed_precision == "no"
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "Fp8")
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    accelerator = Accelerator(cpu=False)
    assert (accelerator.mixed_precision, accelerator.gradient_accumulation_steps) == ("fp8", 4)
    assert accelerator.device == torch.device("cpu")
    assert report_line(accelerator, "mixed_precision").endswith("environment ACCELERATE_MIXED_PRECISION")
    assert Accelerator("bf16", gradient_accumulation_steps=2).gradient_accumulation_steps == 2


def test_precision_that_code_takes_away_is_logged(monkeypatch, caplog) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    with caplog.at_level(logging.WARNING, "acceler8"):
        accelerator = Accelerator("bf16", cpu=True)
    assert "overrides with bf16: this run is not FP8" in caplog.text
    assert not accelerator.fp8_enabled
    assert accelerator.fp8_backend is FP8BackendType.NO


def test_both_spellings_of_the_handlers() -> None:
    handler = NativeRecipeKwargs(recipe="tensorwise")
    for arguments in ({"kwargs_handlers": [handler]}, {"kwarg_handlers": (handler,)}):
        accelerator = Accelerator("fp8", cpu=True, **arguments)
        assert accelerator.native_recipe_handler is handler
        assert accelerator.has_fp8_handler
        assert accelerator.recipe == recipes.get("tensorwise")
    with pytest.raises(ConfigError, match="kwargs_handlers and kwarg_handlers, two spellings"):
        Accelerator("fp8", cpu=True, kwargs_handlers=[], kwarg_handlers=[])


# --- values reach the layers


def test_margin_and_history_reach_the_layers_by_each_route(monkeypatch, tmp_path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "mixed_precision: fp8\nfp8_config:\n  recipe: delayed\n  margin: 2\n  amax_history_len: 8\n  fp8_format: e4m3\n"
    )
    environ = {
        "ACCELERATE_FP8_RECIPE": "delayed",
        "ACCELERATE_FP8_MARGIN": "2",
        "ACCELERATE_FP8_AMAX_HISTORY_LEN": "8",
        "ACCELERATE_FP8_FORMAT": "E4M3",
    }
    handler = NativeRecipeKwargs("delayed", margin=2, amax_history_len=8, fp8_format="E4M3")
    by_code = Accelerator("fp8", cpu=True, kwargs_handlers=[handler])
    by_file = Accelerator(cpu=True, config_file=file)
    with monkeypatch.context() as patch:
        for name, value in environ.items():
            patch.setenv(name, value)
        by_environment = Accelerator("fp8", cpu=True)
    monkeypatch.setenv("ACCELER8_CONFIG_FILE", str(file))
    by_named_file = Accelerator(cpu=True)
    expected = recipes.get("delayed", formats="E4M3", margin=2, amax_history_len=8)
    outputs = []
    for accelerator in (by_code, by_file, by_environment, by_named_file):
        torch.manual_seed(0)
        prepared = accelerator.prepare(model())
        assert prepared[0]._acceler8_layer.recipe == expected
        assert state_of(prepared).amax.history_len == 8
        x = torch.randn(4, 32, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            outputs.append(prepared(x))
    assert all(torch.equal(outputs[0], other) for other in outputs[1:])
    assert report_line(by_code, "margin") == "margin = 2 code NativeRecipeKwargs(margin=)"
    assert report_line(by_environment, "margin") == "margin = 2 environment ACCELERATE_FP8_MARGIN"
    assert report_line(by_file, "margin") == f"margin = 2 yaml {file}:4"
    assert report_line(by_file, "interval") == "interval = 1 default"


def test_the_report_names_a_launchers_flag(monkeypatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    monkeypatch.setenv("ACCELERATE_FP8_RECIPE", "tensorwise")
    monkeypatch.setenv("ACCELER8_CONFIG_SOURCES", '{"fp8_config.recipe": ["FLAG", "--fp8_recipe", "tensorwise"]}')
    accelerator = Accelerator(cpu=True)
    assert report_line(accelerator, "recipe") == "recipe = tensorwise flag --fp8_recipe"
    assert report_line(accelerator, "fp8_format") == "fp8_format = HYBRID default of recipe tensorwise"
    assert report_line(accelerator, "backend") == "backend = NATIVE default"


def test_a_recipe_object_runs_as_it_is() -> None:
    mine = recipes.get("rowwise", skip=("0",)).with_gemms(wgrad=False).replace(name="mine")
    for accelerator in (
        Accelerator("fp8", cpu=True, recipe=mine, skip=iter(["nothing"])),
        Accelerator("fp8", cpu=True, kwargs_handlers=[NativeRecipeKwargs(mine, skip=["nothing"])]),
    ):
        assert accelerator.recipe == mine.replace(skip=("0", "nothing"))
    prepared = Accelerator("fp8", cpu=True, recipe=mine).prepare(model())
    assert [type(layer) for layer in prepared] == [nn.Linear, Fp8Linear]


# --- the backend


@pytest.mark.parametrize("spelling", ["te", "TE", "Te"])
def test_a_named_backend_in_any_case_and_route(monkeypatch, tmp_path, spelling: str) -> None:
    install(monkeypatch, tmp_path, "transformer_engine", "2.9.0")  # its metadata, which choosing looks at
    monkeypatch.setattr(type(backends.find("transformer_engine")), "unavailable", lambda self: None)
    file = tmp_path / "run.yaml"
    file.write_text(f"fp8_config: {{backend: {spelling}}}\n")
    accelerators = [
        Accelerator("fp8", cpu=True, config_file=file),
        Accelerator("fp8", cpu=True, backend=spelling),
        Accelerator("fp8", cpu=True, kwargs_handlers=[TERecipeKwargs()]),
    ]
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", spelling)
    accelerators.append(Accelerator("fp8", cpu=True))
    for accelerator in accelerators:
        assert accelerator.fp8_backend is FP8BackendType.TE
        assert not accelerator.delayed_fp8_autocast  # one process
        assert accelerator.recipe.is_delayed
    assert Accelerator("fp8", cpu=True, backend="native").fp8_backend is FP8BackendType.NATIVE  # code before variable


def test_a_missing_backend_is_an_import_error(monkeypatch) -> None:
    uninstall(monkeypatch, "torchao", "transformer_engine")
    for arguments in ({"backend": "ao"}, {"kwargs_handlers": [AORecipeKwargs()]}):
        with pytest.raises(ImportError, match=r"FP8 backend AO is not installed; pip install 'torchao>=0\.13'"):
            Accelerator("fp8", cpu=True, **arguments)
    with pytest.raises(ImportError, match="AO, TE, MSAMP"):
        Accelerator("fp8", cpu=True, fp8_backend_order="AO,TE,MSAMP")
    assert Accelerator("fp8", cpu=True, fp8_backend_order=["TE", "NATIVE"]).fp8_backend is FP8BackendType.NATIVE


@pytest.mark.filterwarnings("ignore:FP8RecipeKwargs is deprecated:FutureWarning")
def test_levels_are_taken_from_every_recipe_class() -> None:
    for handlers, backend, level in (
        ([MSAMPRecipeKwargs("O1")], FP8BackendType.MSAMP, "O1"),
        ([MSAMPRecipeKwargs(), NativeRecipeKwargs()], FP8BackendType.NATIVE, "O2"),
        ([FP8RecipeKwargs(optimization_level="O2")], FP8BackendType.MSAMP, "O2"),
    ):
        accelerator = Accelerator("fp8", cpu=True, kwargs_handlers=handlers)
        assert accelerator.fp8_backend is backend
        assert accelerator.level is not None
        assert accelerator.level.name == level
        assert accelerator.level.exp_avg == ("fp32" if level == "O1" else "fp8")
    assert accelerator.fp8_recipe_handler is handlers[0]
    assert accelerator.te_recipe_handler is accelerator.msamp_recipe_handler is None


# --- contradictions


def test_a_recipe_without_fp8_is_an_error_wherever_the_precision_comes_from(monkeypatch) -> None:
    with pytest.raises(RecipeError, match=r"got TERecipeKwargs with mixed_precision='no' \(default\)"):
        Accelerator(cpu=True, kwargs_handlers=[TERecipeKwargs()])
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    with pytest.raises(ValueError, match=r"'bf16' .environment ACCELERATE_MIXED_PRECISION.; allowed: a recipe only"):
        Accelerator(cpu=True, recipe="rowwise")


def test_settings_that_contradict_each_other_stop_at_construction(monkeypatch) -> None:
    monkeypatch.setenv("ACCELERATE_FP8_MARGIN", "2")
    with pytest.raises(ConfigError, match="ACCELERATE_FP8_MARGIN: margin=2 belongs to delayed scaling"):
        Accelerator("fp8", cpu=True, recipe="rowwise")
    Accelerator("bf16", cpu=True)  # kept for whoever asks for fp8
    assert Accelerator("fp8", cpu=True, recipe="delayed").recipe.margin == 2


def test_a_wrong_file_is_located(tmp_path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("mixed_precision: fp8\nfp8_config:\n  recipe: rowwize\n")
    with pytest.raises(ConfigError, match=r"run\.yaml:3: fp8_config\.recipe got 'rowwize'"):
        Accelerator(cpu=True, config_file=file)


# --- what is kept


def test_a_compiler_that_is_none_changes_nothing(monkeypatch) -> None:
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")
    assert Accelerator("no", cpu=True, dynamo_plugin=TorchDynamoPlugin()).prepare(model()) is not None


def test_two_of_one_thing() -> None:
    with pytest.raises(ConfigError, match="dynamo_plugin and dynamo_backend"):
        Accelerator(cpu=True, dynamo_plugin=TorchDynamoPlugin(), dynamo_backend="eager")


def test_names_at_the_top() -> None:
    assert acceler8.DistributedType is DistributedType
    assert acceler8.FullyShardedDataParallelPlugin is FullyShardedDataParallelPlugin
    assert acceler8.NativeRecipeKwargs is NativeRecipeKwargs


# --- recipes by pattern


def recipes_of(prepared: nn.Module) -> list[str | None]:
    return [layer._acceler8_layer.recipe.name if isinstance(layer, Fp8Linear) else None for layer in prepared]


def test_recipes_by_pattern_run_from_every_route(monkeypatch, tmp_path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text('mixed_precision: fp8\nfp8_config:\n  recipe: delayed\n  layer_recipes: {"0": tensorwise}\n')
    expected = ["tensorwise", "delayed"]
    assert recipes_of(Accelerator(cpu=True, config_file=file).prepare(model())) == expected
    mapping = {"0": "Tensorwise", "1": "delayed"}
    for accelerator in (
        Accelerator("fp8", cpu=True, recipe=mapping),
        Accelerator("fp8", cpu=True, kwargs_handlers=[NativeRecipeKwargs(recipe=mapping)]),
        Accelerator("fp8", cpu=True, recipe="delayed", kwargs_handlers=None, config_file=file),
        Accelerator("fp8", cpu=True, recipe={"0": recipes.get("tensorwise"), "1": recipes.get("delayed")}),
    ):
        assert recipes_of(accelerator.prepare(model())) == expected
    monkeypatch.setenv("ACCELERATE_FP8_LAYER_RECIPES", "0=tensorwise,1=none")
    accelerator = Accelerator("fp8", cpu=True)
    assert recipes_of(accelerator.prepare(model())) == ["tensorwise", None]
    assert report_line(accelerator, "layer_recipes") == (
        "layer_recipes = 0=tensorwise, 1=none environment ACCELERATE_FP8_LAYER_RECIPES"
    )


def test_the_report_says_how_many_layers_have_which_recipe() -> None:
    accelerator = Accelerator("fp8", cpu=True, recipe={"0": "tensorwise", "*": "rowwise"}, skip=["nothing"])
    with pytest.raises(Acceler8Error, match="skip names 'nothing', which fits no layer"):
        accelerator.prepare(model())
    accelerator = Accelerator("fp8", cpu=True, recipe={"0": "tensorwise", "*": "rowwise"})
    accelerator.prepare(nn.Sequential(*model(), nn.Linear(32, 32)))
    assert "3 of 3 layers FP8 (100% of the matrix FLOPs), recipe tensorwise (1 layer), rowwise (2 layers)" in str(
        accelerator.fp8_report()
    )
    assert report_line(accelerator, "layer_recipes").endswith("0=tensorwise, *=rowwise code Accelerator(recipe=)")
    assert "  recipe = " not in str(accelerator.fp8_report())


def test_recipe_objects_by_pattern_run_as_they_are() -> None:
    mine = recipes.get("rowwise", skip=("1",)).with_gemms(wgrad=False).replace(name="mine")
    mapping = {"0": mine, "*": recipes.get("tensorwise", eval="fp8")}
    for accelerator in (
        Accelerator("fp8", cpu=True, recipe=mapping, skip=["2"]),
        Accelerator("fp8", cpu=True, kwargs_handlers=[NativeRecipeKwargs(mapping, skip=["2"])]),
    ):
        assert accelerator.recipe.find("0")[1] == mine.replace(skip=("1", "2"))
        prepared = accelerator.prepare(nn.Sequential(*model(), nn.Linear(32, 32)))
        assert recipes_of(prepared) == ["mine", "tensorwise", None]
        keys = [line.split(" = ")[0].strip() for line in str(accelerator.fp8_report()).splitlines() if " = " in line]
        schedule, speed = ["fp8_steps", "fp8_last_layers"], ["never_slower"]
        assert keys == ["mixed_precision", "backend", "layer_recipes", *schedule, *speed, "skip"]


def test_errors_of_recipes_by_pattern() -> None:
    with pytest.raises(RecipeError, match="pattern '0': unknown recipe 'rowise'; did you mean 'rowwise'"):
        Accelerator("fp8", cpu=True, recipe={"0": "rowise"})
    with pytest.raises(RecipeError, match="mixed_precision='bf16'"):
        Accelerator("bf16", cpu=True, recipe={"0": "rowwise"})
    with pytest.raises(Acceler8Error, match="recipe has the pattern 'mpl', which fits no layer"):
        Accelerator("fp8", cpu=True, recipe={"mpl": "rowwise", "*": "tensorwise"}).prepare(model())


# --- a window of steps


def test_fp8_steps_run_from_every_route(monkeypatch, tmp_path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("mixed_precision: fp8\nfp8_config:\n  fp8_steps: '1:3'\n")
    accelerators = [
        Accelerator(cpu=True, config_file=file),
        Accelerator("fp8", cpu=True, kwargs_handlers=[NativeRecipeKwargs(fp8_steps="1:3")]),
        Accelerator("fp8", cpu=True, kwargs_handlers=[NativeRecipeKwargs(recipes.get("delayed"), fp8_steps="1:3")]),
    ]
    monkeypatch.setenv("ACCELERATE_FP8_STEPS", "1:3")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    accelerators += [Accelerator(cpu=True), Accelerator(cpu=True, recipe=recipes.get("rowwise"))]
    accelerators += [Accelerator(cpu=True, recipe={"0": recipes.get("rowwise"), "*": "delayed"})]
    for accelerator in accelerators:
        prepared = accelerator.prepare(model())
        (schedule,) = state_of(prepared).own_schedules()
        seen = []
        for _ in range(4):
            seen.append(schedule.is_on)
            accelerator.clock.tick()
        assert seen == [False, True, True, False]
        assert str(accelerator.plan.fp8_steps) == "1:3"
    assert state_of(Accelerator("fp8", cpu=True, config_file=None).prepare(model())).schedules


def test_the_report_says_the_window_and_where_the_run_is() -> None:
    accelerator = Accelerator("fp8", cpu=True, kwargs_handlers=[NativeRecipeKwargs(fp8_steps="1:")])
    accelerator.prepare(model())
    said = "FP8 only in steps from 1 on, counted from 0; step {}, the next, is in {}"
    assert said.format(0, "high precision") in str(accelerator.fp8_report())
    accelerator.clock.tick()
    assert said.format(1, "FP8") in str(accelerator.fp8_report())
    assert report_line(accelerator, "fp8_steps") == "fp8_steps = 1: code NativeRecipeKwargs(fp8_steps=)"
    plain = Accelerator("fp8", cpu=True)
    plain.prepare(model())
    assert "FP8 only" not in str(plain.fp8_report())
    assert report_line(plain, "fp8_steps") == "fp8_steps = : default"


def test_the_last_layers_run_from_every_route(monkeypatch, tmp_path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("mixed_precision: fp8\nfp8_config:\n  fp8_last_layers: {1: 1, 3: all}\n")
    mixed = {"0": recipes.get("rowwise"), "*": "delayed"}
    accelerators = [
        Accelerator(cpu=True, config_file=file),
        Accelerator("fp8", cpu=True, kwargs_handlers=[NativeRecipeKwargs(fp8_last_layers={1: 1, 3: "all"})]),
        Accelerator("fp8", cpu=True, kwargs_handlers=[NativeRecipeKwargs(mixed, fp8_last_layers="1:1,3:all")]),
    ]
    monkeypatch.setenv("ACCELERATE_FP8_LAST_LAYERS", "1:1,3:all")
    accelerators += [Accelerator("fp8", cpu=True), Accelerator("fp8", cpu=True, recipe=mixed)]
    for accelerator in accelerators:
        prepared = accelerator.prepare(model())
        seen = []
        for _ in range(4):
            seen.append([layer._acceler8_layer.schedule.is_on for _, layer in fp8_layers(prepared)])
            accelerator.clock.tick()
        assert seen == [[False, False], [False, True], [False, True], [True, True]]
        assert str(accelerator.plan.fp8_last_layers) == "1:1,3:all"


def test_the_report_says_how_far_the_depth_is() -> None:
    accelerator = Accelerator("fp8", cpu=True, kwargs_handlers=[NativeRecipeKwargs(fp8_last_layers="1:1,3:all")])
    accelerator.prepare(model())
    said = "FP8 by depth, 1:1,3:all of 2 blocks: in step {}, the next, {} of 2 FP8 layers are on{}"
    for step, now, more in ((0, 0, "; more from step 1 on"), (2, 1, "; more from step 3 on"), (3, 2, "")):
        accelerator.clock.ticks = step
        assert said.format(step, now, more) in str(accelerator.fp8_report()).splitlines()[2]
        assert str(accelerator.fp8_report()).splitlines()[2].endswith("are on" + more)
    assert report_line(accelerator, "fp8_last_layers") == (
        "fp8_last_layers = 1:1,3:all code NativeRecipeKwargs(fp8_last_layers=)"
    )


def test_a_window_and_stages_that_never_agree_are_refused_at_once() -> None:
    handler = NativeRecipeKwargs(fp8_steps=":5", fp8_last_layers="5:1")
    with pytest.raises(ConfigError, match=r"NativeRecipeKwargs\(fp8_last_layers=\): fp8_steps :5 ends before"):
        Accelerator("fp8", cpu=True, kwargs_handlers=[handler])


def test_a_window_that_is_none_is_refused_with_its_place() -> None:
    with pytest.raises(ConfigError, match=r"NativeRecipeKwargs\(fp8_steps=\): fp8_steps got '10'; allowed: START:STOP"):
        Accelerator("fp8", cpu=True, kwargs_handlers=[NativeRecipeKwargs(fp8_steps="10")])
    with pytest.raises(ConfigError, match="fp8_steps got 5:5, which holds no step"):
        NativeRecipeKwargs(fp8_steps="5:5")


# --- predicted speed


@pytest.fixture
def some_gpu(tmp_path, monkeypatch) -> None:
    """A table in a user's folder by which the second layer of ``model`` loses; only the GPU's name is stood in for."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    shapes = [(128, 32, 64), (128, 64, 32)]
    entries = {BF16: dict.fromkeys(shapes, 1.0), "rowwise": dict(zip(shapes, (0.5, 1.25), strict=True))}
    facts = {"torch": "2.11.0", "date": "2026-11-30", "commit": "abc", "source": "measured"}
    CostTable(gpu="Some GPU", entries=entries, **facts).save(user_folder() / file_name("Some GPU"))
    for module in ("conversion.speed", "accelerator.accelerator"):
        monkeypatch.setattr(f"acceler8.{module}.gpu_of", lambda device: "Some GPU")


def test_tokens_leave_slower_layers_from_every_route(some_gpu, monkeypatch, tmp_path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("mixed_precision: fp8\nfp8_config:\n  tokens: 128\n")
    own = recipes.get("rowwise")
    accelerators = [
        Accelerator(cpu=True, config_file=file),
        Accelerator("fp8", cpu=True, kwargs_handlers=[NativeRecipeKwargs(tokens=128)]),
        Accelerator("fp8", cpu=True, kwargs_handlers=[NativeRecipeKwargs(own, tokens=128)]),
    ]
    monkeypatch.setenv("ACCELERATE_FP8_TOKENS", "128")
    accelerators += [Accelerator("fp8", cpu=True), Accelerator("fp8", cpu=True, recipe=own)]
    accelerators += [Accelerator("fp8", cpu=True, recipe={"*": own})]
    for accelerator in accelerators:
        prepared = accelerator.prepare(model())
        assert [name for name, _ in fp8_layers(prepared)] == ["0"]
        assert type(prepared[1]) is nn.Linear
    report = str(accelerators[1].fp8_report())
    assert (
        "predicted (Some GPU table of 2026-11-30, 128 tokens): linear layers, forward and backward, 2.00 ms" in report
    )
    assert "left in BF16, where FP8 would be slower: 1 layer, such as 1 (0.80x)" in report
    assert report_line(accelerators[1], "tokens") == "tokens = 128 code NativeRecipeKwargs(tokens=)"
    assert report_line(accelerators[-1], "tokens") == "tokens = 128 environment ACCELERATE_FP8_TOKENS"


def test_slower_layers_stay_where_they_are_wanted(some_gpu, monkeypatch) -> None:
    def names(**settings) -> list[str]:
        handler = NativeRecipeKwargs(**settings)
        prepared = Accelerator("fp8", cpu=True, kwargs_handlers=[handler]).prepare(model())
        return [name for name, _ in fp8_layers(prepared)]

    assert names(tokens=128) == ["0"]
    assert names() == ["0", "1"]
    assert names(tokens=128, never_slower=False) == ["0", "1"]
    assert names(tokens=128, layer_recipes={"1": "rowwise"}) == ["0", "1"]
    assert names(tokens=1024) == ["0", "1"]  # not in the table
    monkeypatch.setenv("ACCELERATE_FP8_NEVER_SLOWER", "false")
    assert names(tokens=128) == ["0", "1"]
    monkeypatch.undo()
    assert names(tokens=128) == ["0", "1"]  # on a CPU


@pytest.mark.parametrize("tokens", [0, -1, True, 128.0, "many"])
def test_tokens_that_are_none_are_refused_with_their_place(tokens) -> None:
    with pytest.raises(ConfigError, match=r"NativeRecipeKwargs\(tokens=\).*allowed: an integer of 1 or more"):
        Accelerator("fp8", cpu=True, kwargs_handlers=[NativeRecipeKwargs(tokens=tokens)])


def test_a_model_converted_by_hand_follows_the_accelerators_steps() -> None:
    hand = model()
    acceler8.convert(hand, acceler8.plan(hand, fp8_steps="2:"))
    accelerator = Accelerator("fp8", cpu=True)
    accelerator.prepare(hand)
    accelerator.clock.tick()
    (schedule,) = state_of(hand).own_schedules()
    assert not schedule.is_on
    accelerator.clock.ticks = 2  # as a resume does
    assert schedule.is_on
