"""The questions of ``acceler8 config``, in Accelerate's order, with its defaults where it has the question.

``Wizard`` knows what to ask when; a ``Prompter`` knows how. Texts, allowed values and parsing are those of the schema,
so an answer means what the same text means on every other route. A setting that is known beforehand is not asked.
With ``DefaultAnswers`` for a prompter the wizard gives the configuration of someone who accepts every default.

Left out of Accelerate's questions: other accelerators than GPUs, SageMaker, mpirun, Megatron-LM, context and tensor
parallelism. DeepSpeed is not asked about after "CPU only".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from acceler8.config.backend_choice import schedule_problem
from acceler8.config.kinds import Bool, Choice
from acceler8.config.registry import ENTRIES, Entry
from acceler8.config.schema import BACKENDS, DYNAMO_BACKENDS, RECIPES_OF, SAVE_POLICIES, SHARDING_STRATEGIES
from acceler8.config.sources import DEFAULT, Effective, Precedence, RouteValues, Source, merge

ANSWER = Source(Precedence.FLAG, "answer")
_OPTIONAL = "(empty: not given)"


class Prompter(Protocol):
    """Puts one question and waits; raises KeyboardInterrupt or EOFError if the user leaves."""

    def choose(self, question: str, help: str, words: tuple[str, ...], default: str) -> str:
        """One of ``words``."""
        ...

    def confirm(self, question: str, help: str, default: bool) -> bool:
        """Yes or no."""
        ...

    def text(self, question: str, help: str, default: str, problem: Callable[[str], str | None]) -> str:
        """A line for which ``problem`` has none; with the problem shown, it is asked again."""
        ...

    def say(self, line: str) -> None:
        """Show a line."""
        ...


class DefaultAnswers:
    """Answers every question with its default."""

    def choose(self, question: str, help: str, words: tuple[str, ...], default: str) -> str:
        """The default."""
        return default

    def confirm(self, question: str, help: str, default: bool) -> bool:
        """The default."""
        return default

    def text(self, question: str, help: str, default: str, problem: Callable[[str], str | None]) -> str:
        """The default."""
        return default

    def say(self, line: str) -> None:
        """Nothing to say to nobody."""


class Wizard:
    """Asks for a configuration. ``known``: settings that are not asked; ``missing``: what a backend lacks here."""

    def __init__(
        self, prompter: Prompter, known: RouteValues | None = None, missing: Callable[[str], list[str]] | None = None
    ) -> None:
        self._prompter = prompter
        self._known = known or RouteValues()
        self._answers = RouteValues()
        self._source = DEFAULT if isinstance(prompter, DefaultAnswers) else ANSWER
        self._missing = missing or (lambda backend: [])

    def run(self) -> Effective:
        """All questions; the answers and what was known."""
        self._ask_machines()
        if self["distributed_type"] == "NO":
            self._ask("use_cpu", False)
        else:
            self._take("use_cpu", self["distributed_type"] == "MULTI_CPU")
        self._ask_dynamo()
        self._ask_engine()
        self._ask_processes()
        if self["deepspeed_config.deepspeed_config_file"] is None:
            self._ask_precision()
        return merge([self._answers, self._known])

    def __getitem__(self, path: str) -> Any:
        """The value so far; None if there is none."""
        for route in (self._known, self._answers):
            if path in route.values:
                return route.values[path].value
        return None

    @property
    def _has_gpus(self) -> bool:
        return not self["use_cpu"] and self["distributed_type"] != "MULTI_CPU"

    def _ask_machines(self) -> None:
        kinds = {"NO": "no distributed training", "MULTI_CPU": "multi-CPU", "MULTI_GPU": "multi-GPU"}
        if self["distributed_type"] is None:
            chosen = self._prompter.choose(
                "Which type of machine?", ENTRIES["distributed_type"].setting.help, tuple(kinds.values()), kinds["NO"]
            )
            self._take("distributed_type", next(name for name, words in kinds.items() if words == chosen))
        if self["distributed_type"] == "NO":
            return
        self._ask("num_machines", 1)
        if self["num_machines"] > 1:
            ranks = tuple(str(rank) for rank in range(self["num_machines"]))
            self._ask("machine_rank", 0, words=ranks if len(ranks) <= 32 else None)
            self._ask("main_process_ip", None, is_needed=True)
            self._ask("main_process_port", 29500)
            self._ask("same_network", True)
            if not self["same_network"]:
                self._ask("rdzv_backend", "static")
        self._ask("debug", False)

    def _ask_dynamo(self) -> None:
        section = "dynamo_config.dynamo_"
        is_known = self[section + "backend"] is not None
        if not is_known and not self._prompter.confirm("Compile the model with torch.compile?", "TorchDynamo.", False):
            return
        compilers = tuple(name for name in DYNAMO_BACKENDS if name != "NO")
        self._ask(section + "backend", "INDUCTOR", words=compilers)
        if is_known or not self._prompter.confirm("Change the defaults of torch.compile?", "Mode and shapes.", False):
            return
        self._ask(section + "mode", "default")
        for switch in ("use_fullgraph", "use_dynamic", "use_regional_compilation"):
            self._ask(section + switch, False)

    def _ask_engine(self) -> None:
        kind = self["distributed_type"]
        if kind in ("NO", "MULTI_GPU") and self._has_gpus and "distributed_type" not in self._known.values:
            if self._prompter.confirm("Use DeepSpeed?", "ZeRO stages 0 to 3.", False):
                self._take("distributed_type", "DEEPSPEED")
            elif kind == "MULTI_GPU" and self._prompter.confirm("Use FSDP?", "Fully sharded data parallel.", False):
                self._take("distributed_type", "FSDP")
        if self["distributed_type"] == "DEEPSPEED":
            self._ask_deepspeed()
        elif self["distributed_type"] == "FSDP":
            self._ask_fsdp()

    def _ask_deepspeed(self) -> None:
        section = "deepspeed_config."
        file = section + "deepspeed_config_file"
        if self[file] is None and self._prompter.confirm(
            "Use a JSON file of DeepSpeed?", ENTRIES[file].setting.help, False
        ):
            self._ask(file, None, is_needed=True)
        if self[file] is None:
            self._ask_zero(section)
        self._ask(section + "zero3_init_flag", False)
        layers = section + "deepspeed_moe_layer_cls_names"
        if self[layers] is None and self._prompter.confirm("Train a mixture of experts?", "MoE layers.", False):
            self._ask(layers, None, is_needed=True)
        if (self["num_machines"] or 1) > 1:
            self._ask(section + "deepspeed_multinode_launcher", "pdsh")
            if self[section + "deepspeed_multinode_launcher"] != "standard":
                self._ask(section + "deepspeed_hostfile", None)
                self._ask(section + "deepspeed_exclusion_filter", None)
                self._ask(section + "deepspeed_inclusion_filter", None)

    def _ask_zero(self, section: str) -> None:
        self._ask(section + "zero_stage", 2, words=("0", "1", "2", "3"))
        if self[section + "zero_stage"] >= 2:
            self._ask(section + "offload_optimizer_device", "none")
            self._ask(section + "offload_param_device", "none")
            for part in ("param", "optimizer"):
                if self[f"{section}offload_{part}_device"] == "nvme":
                    self._ask(f"{section}offload_{part}_nvme_path", "/nvme")
        self._ask(section + "gradient_accumulation_steps", 1)
        self._ask(section + "gradient_clipping", None)
        if self[section + "zero_stage"] == 3:
            self._ask(section + "zero3_save_16bit_model", False)

    def _ask_fsdp(self) -> None:
        section = "fsdp_config.fsdp_"
        self._ask(section + "version", 2, words=("1", "2"))
        is_first = self[section + "version"] == 1
        if is_first:
            self._ask(section + "reshard_after_forward", "FULL_SHARD", words=SHARDING_STRATEGIES)
        else:
            self._ask(section + "reshard_after_forward", "true", words=("true", "false"))
        self._ask(section + "offload_params", False)
        self._ask(section + "auto_wrap_policy", "TRANSFORMER_BASED_WRAP")
        if self[section + "auto_wrap_policy"] == "TRANSFORMER_BASED_WRAP":
            self._ask(section + "transformer_layer_cls_to_wrap", None)
        elif self[section + "auto_wrap_policy"] == "SIZE_BASED_WRAP":
            self._ask(section + "min_num_params", 100_000_000)
        if is_first:
            self._ask(section + "backward_prefetch", "BACKWARD_PRE")
        forms = ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT")
        self._ask(
            section + "state_dict_type", forms[0] if is_first else forms[2], words=forms[:: 1 if is_first else -2]
        )
        if is_first:
            self._ask(section + "forward_prefetch", False)
            self._ask(section + "use_orig_params", True)
        self._ask(section + "cpu_ram_efficient_loading", True)
        if is_first and self[section + "cpu_ram_efficient_loading"]:
            self._take(section + "sync_module_states", True)
        elif is_first:
            self._ask(section + "sync_module_states", True)
        self._ask(section + "activation_checkpointing", False)

    def _ask_processes(self) -> None:
        kind, machines = self["distributed_type"], self["num_machines"] or 1
        if kind == "NO":
            self._take("num_processes", 1)
        else:
            least = 2 if kind == "MULTI_GPU" and machines == 1 else machines

            def problem(count: int) -> str | None:
                if count < least or count % machines:
                    return f"got {count}; allowed: {least} or more" + f", a multiple of {machines}" * (machines > 1)
                return None

            self._ask("num_processes", least, problem=problem)
        if kind in ("NO", "MULTI_GPU") and self._has_gpus:
            self._ask("gpu_ids", "all")
            self._ask("enable_cpu_affinity", False)

    def _ask_precision(self) -> None:
        self._ask("mixed_precision", "no")
        if self["mixed_precision"] != "fp8":
            return
        backend = "fp8_config.backend"
        self._ask(backend, "NATIVE", words=BACKENDS)
        for line in self._missing(self[backend]):
            self._prompter.say(f"Note: {line}. The file can be written all the same.")
        asked = {"NATIVE": self._ask_native, "TE": self._ask_te, "AO": self._ask_ao, "MSAMP": self._ask_msamp}
        asked.get(self[backend], lambda: None)()

    def _ask_native(self) -> None:
        self._ask_fp8("recipe")
        self._ask_fp8("use_autocast_during_eval")
        if self["fp8_config.recipe"] == "delayed":
            self._ask_fp8("margin")
            self._ask_fp8("interval")
        if self["fp8_config.recipe"] in ("tensorwise", "delayed"):
            self._ask_fp8("fp8_format", "HYBRID")
        if self["fp8_config.recipe"] == "delayed":
            self._ask_fp8("amax_history_len")
            self._ask_fp8("amax_compute_algo")
        if self["fp8_config.recipe"] != "activations_only":
            self._ask_gemms()
        self._ask_what_is_saved()
        self._ask("fp8_config.skip", None)
        self._ask_schedule()

    def _ask_what_is_saved(self) -> None:
        of_x_only = self["fp8_config.recipe"] == "activations_only"  # it saves x in FP8, or it would be BF16
        words = tuple(word for word in SAVE_POLICIES if word != "bf16") if of_x_only else SAVE_POLICIES
        self._ask("fp8_config.save_for_backward", "fp8", words=words)

    def _ask_schedule(self) -> None:
        steps, stages = "fp8_config.fp8_steps", "fp8_config.fp8_last_layers"
        if self[steps] is not None and self[stages] is not None:
            return
        if self._prompter.confirm("Turn FP8 on by a schedule?", "By steps, or the last layers first.", False):
            self._ask(steps, None, problem=lambda value: schedule_problem(value, self[stages]))
            self._ask(stages, None, problem=lambda value: schedule_problem(self[steps], value))

    def _ask_te(self) -> None:
        recipe = self._ask_recipe("TE")
        self._ask_fp8("use_autocast_during_eval")
        if recipe == "delayed":
            for name in ("margin", "interval", "fp8_format", "amax_history_len", "amax_compute_algo"):
                self._ask_fp8(name)
        self._ask_gemms()

    def _ask_recipe(self, backend: str) -> str:
        """One of the words that the backend has."""
        path = "fp8_config.recipe"
        self._ask(path, ENTRIES[path].setting.defaults[backend], words=RECIPES_OF[backend])
        return str(self[path])

    def _ask_ao(self) -> None:
        self._ask_recipe("AO")
        self._ask_fp8("enable_fsdp_float8_all_gather")
        self._ask_fp8("pad_inner_dim")

    def _ask_msamp(self) -> None:
        self._ask_fp8("opt_level")

    def _ask_fp8(self, name: str, default: Any = None) -> None:
        entry = ENTRIES[f"fp8_config.{name}"]
        backend = self["fp8_config.backend"]
        self._ask(entry.path, entry.setting.defaults.get(backend, default))

    def _ask_gemms(self) -> None:
        entry = ENTRIES["fp8_config.override_linear_precision"]
        if self[entry.path] is not None:
            return
        gemms = (False, False, False)
        if self._prompter.confirm(str(entry.setting.ask), entry.setting.help, False):
            first, second, third = (
                self._prompter.confirm(f"Run {gemm} in high precision?", entry.setting.help, False)
                for gemm in ("fprop", "dgrad", "wgrad")
            )
            gemms = (first, second, third)
        self._take(entry.path, gemms)

    def _ask(
        self,
        path: str,
        default: Any,
        *,
        words: tuple[str, ...] | None = None,
        problem: Callable[[Any], str | None] | None = None,
        is_needed: bool = False,
    ) -> None:
        """Ask for a setting unless it is known. ``default`` None: an empty answer leaves it out, if not needed."""
        if self[path] is not None:
            return
        entry = ENTRIES[path]
        kind = entry.setting.kind
        question, help = str(entry.setting.ask), _help(entry)
        if isinstance(kind, Bool):
            self._take(path, self._prompter.confirm(question, help, bool(default)))
        elif words or isinstance(kind, Choice):
            options = words or (kind.words if isinstance(kind, Choice) else ())
            self._take(path, self._prompter.choose(question, help, options, str(default)))
        else:
            shown = "" if default is None else kind.text(default)
            help += "" if default is not None or is_needed else f" {_OPTIONAL}"
            answer = self._prompter.text(question, help, shown, _problem_finder(entry, problem, is_needed))
            self._take(path, answer)

    def _take(self, path: str, raw: Any) -> None:
        if path not in self._known.values:
            self._answers.put(path, raw, self._source)


def _help(entry: Entry) -> str:
    unit = f" In {entry.setting.unit}." if entry.setting.unit else ""
    return f"{entry.setting.help}{unit} Allowed: {entry.setting.kind.allowed}."


def _problem_finder(
    entry: Entry, problem: Callable[[Any], str | None] | None, is_needed: bool
) -> Callable[[str], str | None]:
    def find(text: str) -> str | None:
        try:
            value = entry.setting.parse(text)
        except ValueError as error:
            return str(error)
        if value is None:
            return f"got nothing; allowed: {entry.setting.kind.allowed}" if is_needed else None
        return problem(value) if problem else None

    return find
