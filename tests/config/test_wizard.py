"""What the wizard asks, in which order, and what it makes of the answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from acceler8 import backends
from acceler8.config import ENTRIES, Effective, Precedence
from acceler8.config.resolve import check, parse_assignments
from acceler8.config.schema import GW_HP, RECIPES_OF
from acceler8.config.wizard import DefaultAnswers, Wizard


class Scripted:
    """Answers by the start of the question; the default otherwise. Remembers what it was asked."""

    def __init__(self, answers: dict[str, Any] | None = None) -> None:
        self.answers = answers or {}
        self.asked: list[str] = []
        self.helps: list[str] = []
        self.said: list[str] = []
        self.words: dict[str, tuple[str, ...]] = {}

    def _answer(self, question: str, help: str, default: Any) -> Any:
        self.asked.append(question)
        self.helps.append(help)
        return next((answer for start, answer in self.answers.items() if question.startswith(start)), default)

    def choose(self, question: str, help: str, words: tuple[str, ...], default: str) -> str:
        self.words[question] = words
        answer = self._answer(question, help, default)
        assert answer in words, (question, answer, words)
        assert default in words
        return answer

    def confirm(self, question: str, help: str, default: bool) -> bool:
        return self._answer(question, help, default)

    def text(self, question: str, help: str, default: str, problem: Callable[[str], str | None]) -> str:
        answer = self._answer(question, help, default)
        assert problem(answer) is None, (question, answer, problem(answer))
        return answer

    def say(self, line: str) -> None:
        self.said.append(line)


def run(answers: dict[str, Any] | None = None, *known: str, missing: Any = None) -> tuple[Scripted, Effective]:
    prompter = Scripted(answers)
    return prompter, Wizard(prompter, parse_assignments(known), missing).run()


FP8 = {"Which precision?": "fp8"}
MULTI = {"Which type of machine?": "multi-GPU", "How many processes": "8"}


def test_defaults_are_those_of_someone_who_presses_enter():
    prompter, effective = run()
    assert effective.given() == Wizard(DefaultAnswers()).run().given()
    assert prompter.asked == [
        "Which type of machine?",
        "Train on the CPU only?",
        "Compile the model with torch.compile?",
        "Use DeepSpeed?",
        "Which GPUs?",
        "Bind each process to the cores near its GPU?",
        "Which precision?",
    ]
    assert effective["distributed_type"] == "NO"
    assert effective["mixed_precision"] == "no"


TE = {
    "backend": "TE",
    "recipe": "delayed",
    "use_autocast_during_eval": False,
    "margin": 0,
    "interval": 1,
    "fp8_format": "HYBRID",
    "amax_history_len": 1024,
    "amax_compute_algo": "most_recent",
    "override_linear_precision": (False, False, False),
}


@pytest.mark.parametrize(
    ("backend", "section"),
    [
        ("TE", TE),
        ("AO", {"backend": "AO", "recipe": "tensorwise", "enable_fsdp_float8_all_gather": True, "pad_inner_dim": True}),
        ("MSAMP", {"backend": "MSAMP", "opt_level": "O2"}),
        (
            "NATIVE",
            {
                "backend": "NATIVE",
                "recipe": "rowwise",
                "use_autocast_during_eval": False,
                "override_linear_precision": (False, False, False),
                "save_for_backward": "fp8",
            },
        ),
    ],
)
def test_each_backend_asks_its_own_questions_in_order(backend: str, section: dict[str, Any]):
    _, effective = run(FP8 | {"Which FP8 backend?": backend})
    found = {path.removeprefix("fp8_config."): value for path, value in effective.given("fp8_config").items()}
    assert found == section
    assert check(effective) == []


def test_another_backend_is_asked_for_its_own_recipes():
    for backend, name in (("AO", "torchao"), ("TE", "transformer_engine")):
        has = {row.recipe for row in backends.find(name).capabilities()}
        assert set(RECIPES_OF[backend]) - {GW_HP} == has
    prompter, effective = run(FP8 | {"Which FP8 backend?": "TE", "Which recipe?": "blockwise"})
    assert effective["fp8_config.recipe"] == "blockwise"
    assert not any("Length of" in text or "Headroom" in text for text in prompter.asked)
    assert check(effective) == []
    _, effective = run(FP8 | {"Which FP8 backend?": "AO", "Which recipe?": "rowwise_with_gw_hp"})
    assert effective["fp8_config.recipe"] == "rowwise_with_gw_hp"
    assert prompter.words["Which recipe?"] == ("delayed", "tensorwise", "blockwise", "mxfp8")


def test_te_in_accelerates_order():
    prompter, effective = run(FP8 | {"Which FP8 backend?": "TE", "Run fprop, dgrad": True, "Run wgrad": True})
    texts = [ENTRIES[f"fp8_config.{key}"].setting.ask for key in TE]
    gemms = [f"Run {gemm} in high precision?" for gemm in ("fprop", "dgrad", "wgrad")]
    assert prompter.asked[-len(texts) - 3 :] == texts + gemms
    assert effective["fp8_config.override_linear_precision"] == (False, False, True)


def test_the_delayed_recipe_is_asked_about_its_history():
    answers = FP8 | {"Which recipe?": "delayed", "Headroom": "2", "Length of": "16", "Layers to": "lm_head, *.gate"}
    _, effective = run(answers)
    assert effective["fp8_config.margin"] == 2
    assert effective["fp8_config.amax_history_len"] == 16
    assert effective["fp8_config.skip"] == ("lm_head", "*.gate")
    assert effective["fp8_config.fp8_format"] == "HYBRID"
    assert check(effective) == []


def test_what_is_kept_for_backward_is_asked_as_the_recipe_allows():
    question = "What stays of activations"
    _, effective = run(FP8 | {question: "bf16"})
    assert effective["fp8_config.save_for_backward"] == "bf16"
    assert check(effective) == []
    for answer in ("fp8", "fp8_compressed"):
        _, effective = run(FP8 | {"Which recipe?": "activations_only", question: answer})
        assert effective["fp8_config.save_for_backward"] == answer
        assert check(effective) == []
    prompter, _ = run(FP8 | {"Which recipe?": "activations_only"})
    assert prompter.words[ENTRIES["fp8_config.save_for_backward"].setting.ask] == ("fp8", "fp8_compressed")


SCHEDULE = FP8 | {"Turn FP8 on by a schedule?": True}
PATH_OF_STAGES = "fp8_config.fp8_last_layers"


def test_a_schedule_is_asked_about_if_one_is_wanted():
    prompter, effective = run(FP8)
    assert prompter.asked[-2:] == [ENTRIES["fp8_config.skip"].setting.ask, "Turn FP8 on by a schedule?"]
    assert "fp8_config.fp8_steps" not in effective.given()
    answers = SCHEDULE | {"In which steps": " 100 : ", "How many of the last": "0:4, 1000:ALL"}
    prompter, effective = run(answers)
    keys = ("fp8_steps", "fp8_last_layers")
    assert prompter.asked[-2:] == [ENTRIES[f"fp8_config.{key}"].setting.ask for key in keys]
    assert [effective[f"fp8_config.{key}"] for key in keys] == ["100:", "0:4,1000:all"]
    assert check(effective) == []
    _, effective = run(SCHEDULE | {"How many of the last": "5:all"})  # an empty answer leaves the other out
    assert effective.given("fp8_config").keys() & {f"fp8_config.{key}" for key in keys} == {PATH_OF_STAGES}
    assert "Turn FP8 on by a schedule?" not in run(FP8 | {"Which FP8 backend?": "TE"})[0].asked


def test_what_is_known_of_a_schedule_is_not_asked():
    prompter, effective = run(SCHEDULE | {"How many of the last": "0:4"}, "fp8_steps=100:")
    assert not any(question.startswith("In which steps") for question in prompter.asked)
    assert (effective["fp8_config.fp8_steps"], effective[PATH_OF_STAGES]) == ("100:", "0:4")
    prompter, _ = run(SCHEDULE, "fp8_steps=100:", "fp8_last_layers=0:4")
    assert "Turn FP8 on by a schedule?" not in prompter.asked


def test_several_machines():
    answers = MULTI | {
        "How many machines?": "2",
        "Number of this machine?": "1",
        "Host of": "10.0.0.1",
        "Are all machines": False,
        "How do machines find": "c10d",
    }
    _, effective = run(answers)
    assert (
        effective.given()
        | {
            "distributed_type": "MULTI_GPU",
            "num_machines": 2,
            "machine_rank": 1,
            "main_process_ip": "10.0.0.1",
            "main_process_port": 29500,
            "same_network": False,
            "rdzv_backend": "c10d",
            "num_processes": 8,
        }
        == effective.given()
    )
    assert check(effective) == []


@pytest.mark.parametrize("version", ["1", "2"])
def test_fsdp(version: str):
    prompter, effective = run(MULTI | FP8 | {"Use FSDP?": True, "Which FSDP?": version})
    assert effective["distributed_type"] == "FSDP"
    assert effective["fsdp_config.fsdp_reshard_after_forward"] == ("FULL_SHARD" if version == "1" else "true")
    assert effective["fsdp_config.fsdp_state_dict_type"] == (
        "FULL_STATE_DICT" if version == "1" else "SHARDED_STATE_DICT"
    )
    assert effective["fsdp_config.fsdp_sync_module_states"] == (True if version == "1" else None)
    assert "Which GPUs?" not in prompter.asked
    assert check(effective) == []


@pytest.mark.parametrize("version", ["1", "2"])
def test_torchao_under_fsdp_keeps_efficient_loading(version: str):
    answers = MULTI | FP8 | {"Use FSDP?": True, "Which FSDP?": version, "Which FP8 backend?": "AO"}
    _, effective = run(answers)
    assert effective["fsdp_config.fsdp_cpu_ram_efficient_loading"] is True
    assert check(effective) == []


@pytest.mark.parametrize("stage", ["0", "1", "2", "3"])
def test_deepspeed(stage: str):
    answers = MULTI | FP8 | {"Use DeepSpeed?": True, "Which ZeRO stage?": stage, "Greatest gradient": "1.0"}
    _, effective = run(answers)
    assert effective["deepspeed_config.zero_stage"] == int(stage)
    assert effective["deepspeed_config.gradient_clipping"] == 1.0
    assert (effective["deepspeed_config.offload_param_device"] == "none") == (stage in "23")
    assert (effective["deepspeed_config.zero3_save_16bit_model"] is False) == (stage == "3")
    assert check(effective) == []


def test_a_file_of_deepspeed_ends_the_questions_about_precision():
    answers = MULTI | {"Use DeepSpeed?": True, "Use a JSON file": True, "Path of DeepSpeed": "ds.json"}
    prompter, effective = run(answers)
    assert effective["deepspeed_config.deepspeed_config_file"] == "ds.json"
    assert "Which precision?" not in prompter.asked
    assert check(effective) == []


def test_the_cpu_is_not_asked_about_gpus():
    prompter, effective = run({"Which type of machine?": "multi-CPU", "How many processes": "2"} | FP8)
    assert effective["use_cpu"] is True
    assert not {"Which GPUs?", "Use DeepSpeed?", "Use FSDP?"} & set(prompter.asked)
    assert check(effective) == []


def test_what_is_known_is_not_asked_and_wins():
    known = ("mixed_precision=fp8", "backend=te", "distributed_type=fsdp", "margin=3", "num_processes=4")
    prompter, effective = run({}, *known)
    asked = {"Which type of machine?", "Use FSDP?", "Which precision?", "Which FP8 backend?", "How many processes"}
    assert not asked & set(prompter.asked)
    assert effective["fp8_config.margin"] == 3
    assert effective.source("fp8_config.margin").precedence is Precedence.FLAG
    assert effective["fsdp_config.fsdp_version"] == 2


def test_what_is_missing_is_said_at_once():
    prompter, _ = run(FP8 | {"Which FP8 backend?": "TE"}, missing=lambda backend: [f"no {backend} here"])
    assert len(prompter.said) == 1
    assert "no TE here" in prompter.said[0]


def test_each_question_has_one_line_of_help():
    everything = {"Compile the model": True, "Change the defaults": True, "Use FSDP?": True, "Which recipe?": "delayed"}
    prompter, _ = run(MULTI | SCHEDULE | everything)
    assert all(help and "\n" not in help for help in prompter.helps)
    assert "None" not in prompter.asked


@pytest.mark.parametrize(
    ("question", "answers", "wrong", "reason"),
    [
        ("How many processes", {"Which type of machine?": "multi-GPU"}, "1", "allowed: 2 or more"),
        ("How many processes", {"Which type of machine?": "multi-GPU"}, "two", "got 'two'; allowed: an integer"),
        ("Which GPUs?", {}, "0,0", "allowed: all, or different numbers"),
        ("Headroom", FP8 | {"Which FP8 backend?": "TE"}, "99", "allowed: an integer from -16 to 16"),
        ("In which steps", SCHEDULE, "100", "allowed: START:STOP"),
        ("How many of the last", SCHEDULE, "4", "allowed: STEP:K with commas"),
        ("How many of the last", SCHEDULE | {"In which steps": ":9"}, "9:all", "fp8_steps :9 ends before"),
        ("Host of", {"Which type of machine?": "multi-GPU", "How many machines?": "2"}, "", "got nothing"),
    ],
)
def test_a_wrong_answer_gets_its_reason(question: str, answers: dict[str, Any], wrong: str, reason: str):
    with pytest.raises(AssertionError, match=reason):
        run(answers | {question: wrong})
