"""The schema: every setting, once.

Fields, variables, YAML keys, flags, the wizard's questions, the tables of the documentation and the JSON schema are
all made from these models, so they cannot disagree. A field that is None was not given; what it then means depends on
the backend (``Setting.defaults``) or on the engine. Names are Hugging Face Accelerate's where it has the setting.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated as A
from typing import Any

from acceler8.config.enums import BACKEND_SPELLINGS, DistributedType, DynamoBackend, FP8BackendType, PrecisionType
from acceler8.config.kinds import (
    Bool,
    Choice,
    GpuIds,
    Host,
    Int,
    LayerPatterns,
    Names,
    Number,
    Stages,
    Steps,
    Text,
    ThreeBools,
    Variables,
    Words,
)
from acceler8.config.setting import Setting

BACKENDS = tuple(word for word in FP8BackendType.list() if word != "NO")
RECIPES = ("tensorwise", "rowwise", "blockwise", "mxfp8", "delayed", "activations_only")
GW_HP = "rowwise_with_gw_hp"
"""torchao's name for ``rowwise`` with wgrad in high precision."""
_WORDS = (*RECIPES, GW_HP)
RECIPES_OF = {"AO": ("tensorwise", "rowwise", GW_HP), "TE": ("delayed", "tensorwise", "blockwise", "mxfp8")}
"""What other backends have of them on some GPU, as their tables of capabilities say; the wizard offers it."""
_LAYERWISE = ("NATIVE", "AO", "TE")  # backends that take a recipe, layer by layer
SAVE_POLICIES = ("fp8", "fp8_compressed", "bf16")
PRECISIONS = tuple(PrecisionType.list())
DISTRIBUTED_TYPES = tuple(DistributedType.list()[: DistributedType.list().index("DEEPSPEED") + 1])
DYNAMO_BACKENDS = tuple(DynamoBackend.list())
SHARDING_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")


class Section:
    """A group of settings: a frozen dataclass."""


def _fp8(name: str, *, env: str | None = None, flag: str | None = None, **rest: Any) -> Setting:
    """A setting of ``fp8_config``: variable ACCELERATE_FP8_<NAME>, flag --fp8_<name>."""
    bare = name.removeprefix("fp8_")
    return Setting(env=(f"ACCELERATE_FP8_{(env or bare).upper()}",), flags=(flag or f"fp8_{bare}",), **rest)


@dataclass(frozen=True, kw_only=True)
class Fp8Config(Section):
    """How FP8 is computed."""

    backend: A[
        str | None,
        _fp8(
            "backend",
            kind=Choice((*BACKENDS, "NO"), BACKEND_SPELLINGS),
            help="Who computes FP8. Not given: the first of backend_order that is available.",
            ask="Which FP8 backend?",
        ),
    ] = None
    backend_order: A[
        tuple[str, ...] | None,
        _fp8(
            "backend_order",
            kind=Words(BACKENDS),
            help="Order in which a backend is looked for when none is named (MSAMP is never taken unnamed).",
        ),
    ] = None
    recipe: A[
        str | None,
        _fp8(
            "recipe",
            kind=Choice(_WORDS),
            help="Granularity and time of the scales (rowwise_with_gw_hp: rowwise, wgrad in high precision).",
            ask="Which recipe?",
            backends=_LAYERWISE,
            defaults={"NATIVE": "rowwise", "AO": "tensorwise", "TE": "delayed"},
        ),
    ] = None
    layer_recipes: A[
        tuple[str, ...] | None,
        _fp8(
            "layer_recipes",
            kind=LayerPatterns(_WORDS),
            help="Recipes of single layers, by pattern (as in skip); a layer that none fits has recipe.",
            backends=_LAYERWISE,
            defaults=dict.fromkeys(_LAYERWISE, ()),
        ),
    ] = None
    fp8_steps: A[
        str | None,
        _fp8(
            "fp8_steps",
            kind=Steps(),
            help="The steps in which layers compute in FP8; outside they are in high precision.",
            ask="In which steps is FP8 on (START:STOP, counted from 0)?",
            backends=_LAYERWISE,
            defaults=dict.fromkeys(_LAYERWISE, ":"),
        ),
    ] = None
    fp8_last_layers: A[
        str | None,
        _fp8(
            "fp8_last_layers",
            kind=Stages(),
            help="How many of the model's last blocks are in FP8 from which step on, such as 0:4,1000:8,2000:all.",
            ask="How many of the last layers are in FP8, from which step on (STEP:K,...)?",
            backends=_LAYERWISE,
            defaults=dict.fromkeys(_LAYERWISE, "0:all"),
        ),
    ] = None
    tokens: A[
        int | None,
        _fp8(
            "tokens",
            kind=Int(1),
            help="Tokens of one forward on one GPU (batch x sequence), for which the speed of layers is predicted.",
            backends=("NATIVE",),
            defaults={"NATIVE": None},
        ),
    ] = None
    never_slower: A[
        bool | None,
        _fp8(
            "never_slower",
            kind=Bool(),
            help="With tokens: leave layers in BF16 that FP8 would slow down, by the cost table of this GPU.",
            backends=("NATIVE",),
            defaults={"NATIVE": True},
            is_bare=True,
        ),
    ] = None
    skip: A[
        tuple[str, ...] | None,
        _fp8(
            "skip",
            kind=Names(),
            help="Layers that stay in high precision: names, dotted prefixes or suffixes, globs.",
            ask="Layers to leave in high precision, with commas between them (beside the default ones)",
            backends=_LAYERWISE,
            defaults=dict.fromkeys(_LAYERWISE, ()),
        ),
    ] = None
    pow2_scales: A[
        bool | None,
        _fp8(
            "pow2_scales",
            kind=Bool(),
            help="Round scales down to powers of two.",
            backends=("NATIVE", "AO"),
            defaults={"NATIVE": False, "AO": False},
            is_bare=True,
        ),
    ] = None
    save_for_backward: A[
        str | None,
        _fp8(
            "save_for_backward",
            kind=Choice(SAVE_POLICIES),
            help="What stays of activations until backward: FP8 codes, also those before norms and gates, or BF16.",
            ask="What stays of activations until backward?",
            backends=("NATIVE",),
            defaults={"NATIVE": "fp8"},
        ),
    ] = None
    use_autocast_during_eval: A[
        bool | None,
        _fp8(
            "use_autocast_during_eval",
            kind=Bool(),
            help="Run FP8 in eval() too, instead of high precision.",
            ask="Run FP8 during evaluation too?",
            backends=_LAYERWISE,
            defaults=dict.fromkeys(_LAYERWISE, False),
            is_bare=True,
        ),
    ] = None
    margin: A[
        int | None,
        _fp8(
            "margin",
            kind=Int(-16, 16),
            help="Headroom of delayed scales.",
            ask="Headroom of the scales, in powers of two?",
            backends=("NATIVE", "TE"),
            defaults={"NATIVE": 0, "TE": 0},
            unit="powers of two",
        ),
    ] = None
    interval: A[
        int | None,
        _fp8(
            "interval",
            kind=Int(1),
            help="How often delayed scales are computed anew.",
            ask="Steps between two updates of the scales?",
            backends=("NATIVE", "TE"),
            defaults={"NATIVE": 1, "TE": 1},
            unit="steps",
        ),
    ] = None
    fp8_format: A[
        str | None,
        _fp8(
            "fp8_format",
            kind=Choice(("HYBRID", "E4M3", "E5M2")),
            help="HYBRID: E4M3 forward, E5M2 for gradients. The default of NATIVE and AO depends on the recipe.",
            ask="Which FP8 format?",
            backends=_LAYERWISE,
            defaults={"TE": "HYBRID"},
            aliases=("format",),
        ),
    ] = None
    amax_history_len: A[
        int | None,
        _fp8(
            "amax_history_len",
            kind=Int(1),
            help="Length of the amax history of delayed scaling.",
            ask="Length of the amax history?",
            backends=("NATIVE", "TE"),
            defaults={"NATIVE": 1024, "TE": 1024},
            unit="steps",
            aliases=("amax_history_length",),
        ),
    ] = None
    amax_compute_algo: A[
        str | None,
        _fp8(
            "amax_compute_algo",
            kind=Choice(("max", "most_recent")),
            help="How the amax history becomes one amax.",
            ask="How does the history become one amax?",
            backends=("NATIVE", "TE"),
            defaults={"NATIVE": "max", "TE": "most_recent"},
            aliases=("amax_compute_algorithm",),
        ),
    ] = None
    override_linear_precision: A[
        tuple[bool, bool, bool] | None,
        Setting(
            kind=ThreeBools(),
            help="Which of fprop, dgrad, wgrad run in high precision.",
            env=tuple(f"ACCELERATE_FP8_OVERRIDE_{gemm}" for gemm in ("FPROP", "DGRAD", "WGRAD")),
            flags=("fp8_override_linear_precision",),
            ask="Run fprop, dgrad or wgrad in high precision?",
            backends=_LAYERWISE,
            defaults=dict.fromkeys(_LAYERWISE, (False,) * 3),
        ),
    ] = None
    use_mxfp8_block_scaling: A[
        bool | None,
        _fp8(
            "use_mxfp8_block_scaling",
            kind=Bool(),
            help="MXFP8 block scaling instead of delayed scaling (NATIVE: recipe mxfp8).",
            backends=("TE",),
            defaults={"TE": False},
            is_bare=True,
        ),
    ] = None
    enable_fsdp_float8_all_gather: A[
        bool | None,
        _fp8(
            "enable_fsdp_float8_all_gather",
            kind=Bool(),
            help="Gather FSDP2's weights in FP8.",
            ask="Gather FSDP2's weights in FP8?",
            backends=("AO", "NATIVE"),
            defaults={"AO": True, "NATIVE": False},
        ),
    ] = None
    pad_inner_dim: A[
        bool | None,
        _fp8(
            "pad_inner_dim",
            kind=Bool(),
            help="Fill the contracted dimension of GEMMs up to a multiple of 16.",
            ask="Fill the inner dimension of GEMMs up to a multiple of 16?",
            backends=("AO",),
            defaults={"AO": True},
        ),
    ] = None
    skip_first_and_last: A[
        bool | None,
        _fp8(
            "skip_first_and_last",
            kind=Bool(),
            help="Leave the first and the last linear layer in high precision.",
            ask="Leave the first and the last linear layer in high precision?",
            backends=("AO",),
            defaults={"AO": True},
        ),
    ] = None
    module_filter_func: A[
        str | None,
        _fp8(
            "module_filter_func",
            kind=Text(),
            help="MODULE:FUNCTION of a module and its name: False leaves a layer. Replaces what is left by default.",
            backends=("AO",),
            defaults={"AO": None},
        ),
    ] = None
    convert_norms: A[
        bool | None,
        _fp8(
            "convert_norms",
            kind=Bool(),
            help="LayerNorm and RMSNorm run as TransformerEngine's too, in training.",
            ask="Run LayerNorm and RMSNorm as TransformerEngine's too?",
            backends=("TE",),
            defaults={"TE": True},
        ),
    ] = None
    opt_level: A[
        str | None,
        _fp8(
            "opt_level",
            kind=Choice(("O1", "O2", "O3"), tuple((f"{zero}{n}", f"O{n}") for n in "123" for zero in ("0", ""))),
            help="Levels of MS-AMP. O1: FP8 gradients. O2: and optimizer states. O3: and weights.",
            ask="Which level?",
            defaults={"MSAMP": "O2"},
            aliases=("optimization_level",),
        ),
    ] = None


def _fsdp(name: str, *, env: str | None = None, **rest: Any) -> Setting:
    """A setting of ``fsdp_config``: key and flag fsdp_<name>, variable FSDP_<NAME>."""
    return Setting(env=(f"FSDP_{(env or name).upper()}",), flags=(f"fsdp_{name}",), **rest)


@dataclass(frozen=True, kw_only=True)
class FsdpConfig(Section):
    """Fully sharded data parallel."""

    fsdp_version: A[int | None, _fsdp("version", kind=Int(1, 2), help="FSDP 1 or 2.", ask="Which FSDP?")] = None
    fsdp_sharding_strategy: A[
        str | None,
        _fsdp(
            "sharding_strategy",
            kind=Choice(SHARDING_STRATEGIES, tuple((str(i), w) for i, w in enumerate(SHARDING_STRATEGIES, 1))),
            help="FSDP 1: what is sharded.",
            ask="What is sharded?",
        ),
    ] = None
    fsdp_reshard_after_forward: A[
        str | None,
        _fsdp(
            "reshard_after_forward",
            kind=Choice(
                ("true", "false", *SHARDING_STRATEGIES),
                (("yes", "true"), ("no", "false")),
            ),
            help="FSDP 2: true frees gathered weights after forward (FSDP 1: a sharding strategy).",
            ask="Free gathered weights after forward?",
        ),
    ] = None
    fsdp_offload_params: A[
        bool | None,
        _fsdp("offload_params", kind=Bool(), help="Keep weights and gradients on the CPU.", ask="Offload to the CPU?"),
    ] = None
    fsdp_auto_wrap_policy: A[
        str | None,
        _fsdp(
            "auto_wrap_policy",
            kind=Choice(("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")),
            help="What becomes one sharded unit.",
            ask="What becomes one sharded unit?",
        ),
    ] = None
    fsdp_transformer_layer_cls_to_wrap: A[
        tuple[str, ...] | None,
        _fsdp(
            "transformer_layer_cls_to_wrap",
            env="transformer_cls_to_wrap",
            kind=Names(),
            help="Class names of the layers that become one unit each.",
            ask="Class names of the layers that become one unit each",
        ),
    ] = None
    fsdp_min_num_params: A[
        int | None,
        _fsdp(
            "min_num_params",
            kind=Int(0),
            help="SIZE_BASED_WRAP: parameters of a unit at least.",
            ask="Parameters of a unit at least?",
            unit="parameters",
        ),
    ] = None
    fsdp_backward_prefetch: A[
        str | None,
        _fsdp(
            "backward_prefetch",
            kind=Choice(("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")),
            help="FSDP 1: when the next unit is gathered in backward.",
            ask="When is the next unit gathered in backward?",
            aliases=("fsdp_backward_prefetch_policy",),
        ),
    ] = None
    fsdp_state_dict_type: A[
        str | None,
        _fsdp(
            "state_dict_type",
            kind=Choice(("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT")),
            help="Form of checkpoints.",
            ask="Form of checkpoints?",
        ),
    ] = None
    fsdp_forward_prefetch: A[
        bool | None,
        _fsdp(
            "forward_prefetch",
            kind=Bool(),
            help="FSDP 1: gather the next unit during forward.",
            ask="Gather the next unit during forward?",
        ),
    ] = None
    fsdp_use_orig_params: A[
        bool | None,
        _fsdp(
            "use_orig_params",
            kind=Bool(),
            help="FSDP 1: keep the original parameters.",
            ask="Keep the original parameters?",
        ),
    ] = None
    fsdp_cpu_ram_efficient_loading: A[
        bool | None,
        _fsdp(
            "cpu_ram_efficient_loading",
            kind=Bool(),
            help="Only the first process loads the checkpoint.",
            ask="Load the checkpoint in the first process only?",
        ),
    ] = None
    fsdp_sync_module_states: A[
        bool | None,
        _fsdp(
            "sync_module_states",
            kind=Bool(),
            help="FSDP 1: every process starts from the first one's weights.",
            ask="Start every process from the first one's weights?",
        ),
    ] = None
    fsdp_activation_checkpointing: A[
        bool | None,
        _fsdp(
            "activation_checkpointing",
            kind=Bool(),
            help="Recompute activations in backward.",
            ask="Recompute activations in backward?",
        ),
    ] = None
    fsdp_activation_checkpointing_offload: A[
        bool | None,
        _fsdp("activation_checkpointing_offload", kind=Bool(), help="Keep checkpointed activations on the CPU."),
    ] = None
    fsdp_ignored_modules: A[
        str | None, _fsdp("ignored_modules", kind=Text(), help="Names (a regular expression) that are not sharded.")
    ] = None


def _dynamo(name: str, **rest: Any) -> Setting:
    return Setting(env=(f"ACCELERATE_DYNAMO_{name.upper()}",), flags=(f"dynamo_{name}",), **rest)


@dataclass(frozen=True, kw_only=True)
class DynamoConfig(Section):
    """torch.compile."""

    dynamo_backend: A[
        str | None,
        _dynamo(
            "backend",
            kind=Choice(DYNAMO_BACKENDS),
            help="Compiler behind torch.compile; NO: not compiled.",
            ask="Which compiler?",
        ),
    ] = None
    dynamo_mode: A[
        str | None,
        _dynamo(
            "mode",
            kind=Choice(("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")),
            help="What the compiler optimises for.",
            ask="Which mode?",
        ),
    ] = None
    dynamo_use_fullgraph: A[
        bool | None,
        _dynamo("use_fullgraph", kind=Bool(), help="Refuse graph breaks.", ask="Refuse graph breaks?", is_bare=True),
    ] = None
    dynamo_use_dynamic: A[
        bool | None,
        _dynamo("use_dynamic", kind=Bool(), help="Compile for changing shapes.", ask="Do shapes change?", is_bare=True),
    ] = None
    dynamo_use_regional_compilation: A[
        bool | None,
        _dynamo(
            "use_regional_compilation",
            kind=Bool(),
            help="Compile one of the repeated blocks instead of the whole model.",
            ask="Compile repeated blocks once?",
            is_bare=True,
        ),
    ] = None


def _deepspeed(name: str, *, env: str | None = None, **rest: Any) -> Setting:
    """A setting of ``deepspeed_config``: key and flag <name>."""
    return Setting(env=(env or f"ACCELERATE_DEEPSPEED_{name.upper()}",), flags=(name,), **rest)


_DEVICES = Choice(("none", "cpu", "nvme"))


@dataclass(frozen=True, kw_only=True)
class DeepSpeedConfig(Section):
    """DeepSpeed ZeRO."""

    zero_stage: A[int | None, _deepspeed("zero_stage", kind=Int(0, 3), help="ZeRO stage.", ask="Which ZeRO stage?")] = (
        None
    )
    gradient_accumulation_steps: A[
        int | None,
        _deepspeed(
            "gradient_accumulation_steps",
            env="ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
            kind=Int(1),
            help="Micro-batches of an optimizer step.",
            ask="Micro-batches of a step?",
            unit="micro-batches",
        ),
    ] = None
    gradient_clipping: A[
        float | None,
        _deepspeed(
            "gradient_clipping",
            env="ACCELERATE_GRADIENT_CLIPPING",
            kind=Number(),
            help="Greatest norm of the gradients; none: not clipped.",
            ask="Greatest gradient norm? (none: not clipped)",
        ),
    ] = None
    offload_optimizer_device: A[
        str | None,
        _deepspeed(
            "offload_optimizer_device",
            kind=_DEVICES,
            help="Where optimizer states live; none: the GPU.",
            ask="Where do optimizer states live?",
        ),
    ] = None
    offload_param_device: A[
        str | None,
        _deepspeed(
            "offload_param_device",
            kind=_DEVICES,
            help="Where parameters live; none: the GPU.",
            ask="Where do parameters live?",
        ),
    ] = None
    offload_optimizer_nvme_path: A[
        str | None,
        _deepspeed(
            "offload_optimizer_nvme_path",
            kind=Text(),
            help="Folder for optimizer states on NVMe.",
            ask="Folder for optimizer states?",
        ),
    ] = None
    offload_param_nvme_path: A[
        str | None,
        _deepspeed(
            "offload_param_nvme_path",
            kind=Text(),
            help="Folder for parameters on NVMe.",
            ask="Folder for parameters?",
        ),
    ] = None
    zero3_init_flag: A[
        bool | None,
        _deepspeed(
            "zero3_init_flag",
            env="ACCELERATE_DEEPSPEED_ZERO3_INIT",
            kind=Bool(),
            help="ZeRO-3: build the model sharded.",
            ask="Build the model sharded?",
        ),
    ] = None
    zero3_save_16bit_model: A[
        bool | None,
        _deepspeed(
            "zero3_save_16bit_model",
            kind=Bool(),
            help="ZeRO-3: gather weights to save them.",
            ask="Gather 16-bit weights to save them?",
        ),
    ] = None
    deepspeed_config_file: A[
        str | None,
        Setting(
            kind=Text(),
            env=("ACCELERATE_DEEPSPEED_CONFIG_FILE",),
            flags=("deepspeed_config_file",),
            help="DeepSpeed's own JSON; it then says everything.",
            ask="Path of DeepSpeed's JSON?",
        ),
    ] = None
    deepspeed_moe_layer_cls_names: A[
        tuple[str, ...] | None,
        Setting(
            kind=Names(),
            env=("ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES",),
            flags=("deepspeed_moe_layer_cls_names",),
            help="Class names of mixture-of-experts layers.",
            ask="Class names of the mixture-of-experts layers?",
        ),
    ] = None
    deepspeed_multinode_launcher: A[
        str | None,
        Setting(
            kind=Choice(("pdsh", "standard", "openmpi", "mvapich", "mpich", "slurm", "nossh")),
            env=("ACCELER8_DEEPSPEED_MULTINODE_LAUNCHER",),
            flags=("deepspeed_multinode_launcher",),
            is_idle=True,
            help="How several machines are reached; here torchrun's rendezvous is used (standard).",
            ask="How are the machines reached?",
        ),
    ] = None
    deepspeed_hostfile: A[
        str | None,
        Setting(
            kind=Text(),
            env=("ACCELER8_DEEPSPEED_HOSTFILE",),
            flags=("deepspeed_hostfile",),
            is_idle=True,
            help="DeepSpeed's hostfile.",
            ask="Path of the hostfile?",
        ),
    ] = None
    deepspeed_exclusion_filter: A[
        str | None,
        Setting(
            kind=Text(),
            env=("ACCELER8_DEEPSPEED_EXCLUSION_FILTER",),
            flags=("deepspeed_exclusion_filter",),
            is_idle=True,
            help="Hosts to leave out.",
            ask="Hosts to leave out?",
        ),
    ] = None
    deepspeed_inclusion_filter: A[
        str | None,
        Setting(
            kind=Text(),
            env=("ACCELER8_DEEPSPEED_INCLUSION_FILTER",),
            flags=("deepspeed_inclusion_filter",),
            is_idle=True,
            help="Hosts to use.",
            ask="Hosts to use?",
        ),
    ] = None


def _top(name: str, *, env: str | None = None, flags: tuple[str, ...] | None = None, **rest: Any) -> Setting:
    """A setting of the top level: variable ACCELERATE_<NAME> unless Accelerate has another, flag --<name>."""
    return Setting(env=(env or f"ACCELERATE_{name.upper()}",), flags=flags or (name,), **rest)


@dataclass(frozen=True, kw_only=True)
class Config(Section):
    """Everything."""

    distributed_type: A[
        str | None,
        _top(
            "distributed_type",
            kind=Choice(DISTRIBUTED_TYPES),
            help="How several processes train together. Not given: MULTI_GPU or MULTI_CPU for several, NO for one.",
            ask="How do processes train together?",
        ),
    ] = None
    num_processes: A[
        int | None,
        _top("num_processes", kind=Int(1), help="Processes, over all machines.", ask="How many processes in all?"),
    ] = None
    num_machines: A[int | None, _top("num_machines", kind=Int(1), help="Machines.", ask="How many machines?")] = None
    machine_rank: A[
        int | None,
        _top("machine_rank", kind=Int(0), help="Number of this machine, from 0.", ask="Number of this machine?"),
    ] = None
    main_process_ip: A[
        str | None,
        _top(
            "main_process_ip",
            kind=Host(),
            help="Host of machine 0. Not given: this machine, on its loopback.",
            ask="Host of machine 0?",
        ),
    ] = None
    main_process_port: A[
        int | None,
        _top(
            "main_process_port",
            kind=Int(0, 65535),
            help="Port of machine 0 (0 or not given, on one machine: a free one).",
            ask="Port of machine 0?",
        ),
    ] = None
    rdzv_backend: A[
        str | None,
        _top(
            "rdzv_backend",
            kind=Choice(("static", "c10d")),
            help="How machines find each other.",
            ask="How do machines find each other?",
        ),
    ] = None
    same_network: A[
        bool | None,
        _top(
            "same_network",
            kind=Bool(),
            is_idle=True,
            help="Machines share a local network.",
            ask="Are all machines on one local network?",
            is_bare=True,
        ),
    ] = None
    max_restarts: A[int | None, _top("max_restarts", kind=Int(0), help="Restarts after a failure.")] = None
    monitor_interval: A[
        float | None, _top("monitor_interval", kind=Number(0.01), help="How often workers are looked at.", unit="s")
    ] = None
    gpu_ids: A[
        str | None,
        _top("gpu_ids", kind=GpuIds(), help="GPUs of this machine: all, or numbers with commas.", ask="Which GPUs?"),
    ] = None
    use_cpu: A[
        bool | None,
        _top(
            "use_cpu",
            flags=("use_cpu", "cpu"),
            kind=Bool(),
            help="Train on the CPU.",
            ask="Train on the CPU only?",
            is_bare=True,
        ),
    ] = None
    num_cpu_threads_per_process: A[
        int | None,
        _top("num_cpu_threads_per_process", kind=Int(1), help="OMP_NUM_THREADS of each process.", unit="threads"),
    ] = None
    enable_cpu_affinity: A[
        bool | None,
        _top(
            "enable_cpu_affinity",
            env="ACCELERATE_CPU_AFFINITY",
            kind=Bool(),
            is_idle=True,
            help="Bind each process to its GPU's cores.",
            ask="Bind each process to the cores near its GPU?",
            is_bare=True,
        ),
    ] = None
    main_training_function: A[
        str | None,
        _top("main_training_function", kind=Text(), is_idle=True, help="For TPUs; kept so that files round-trip."),
    ] = None
    debug: A[
        bool | None,
        _top(
            "debug",
            env="ACCELERATE_DEBUG_MODE",
            kind=Bool(),
            is_idle=True,
            help="Check collectives across processes.",
            ask="Check collectives for errors while running (slower)?",
            is_bare=True,
        ),
    ] = None
    environment: A[
        dict[str, str] | None,
        _top(
            "environment",
            env="ACCELER8_ENVIRONMENT",
            flags=("environment",),
            kind=Variables(),
            help="Variables for the processes, such as NCCL_DEBUG.",
        ),
    ] = None
    mixed_precision: A[
        str | None,
        _top(
            "mixed_precision",
            kind=Choice(PRECISIONS),
            help="What layers compute in.",
            ask="Which precision?",
        ),
    ] = None
    fp8_config: Fp8Config = field(default_factory=Fp8Config)
    dynamo_config: DynamoConfig = field(default_factory=DynamoConfig)
    fsdp_config: FsdpConfig = field(default_factory=FsdpConfig)
    deepspeed_config: DeepSpeedConfig = field(default_factory=DeepSpeedConfig)
