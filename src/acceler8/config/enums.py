"""The enums that scripts compare against, with Hugging Face Accelerate's names and members.

Each member is its own word: ``str(member)`` and ``member == "fp8"`` say what they seem to. Words are read in any case.
"""

from __future__ import annotations

from enum import EnumMeta, StrEnum
from typing import Any

from acceler8.config.kinds import Choice
from acceler8.errors import ConfigError, unknown_name


class _Meta(EnumMeta):
    def __contains__(cls, item: object) -> bool:
        """``"te" in FP8BackendType``, before Python 3.12 too."""
        try:
            cls(item)
        except ValueError:
            return False
        return True


class Word(StrEnum, metaclass=_Meta):
    """A word in any case. Raises ConfigError, a ValueError, for one that is not listed."""

    @classmethod
    def _missing_(cls, value: object) -> Any:
        word = str(value).strip().lower()
        for member in cls:
            if member.value.lower() == word:
                return member
        raise ConfigError(unknown_name(cls.__name__, value, cls.list()))

    @classmethod
    def list(cls) -> list[str]:
        """The words."""
        return [member.value for member in cls]


class PrecisionType(Word):
    """What layers compute in."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8 = "fp8"


BACKEND_SPELLINGS = (("torchao", "AO"), ("transformer_engine", "TE"), ("ms-amp", "MSAMP"))
"""What people also call the libraries, in lower case, and the word for it."""


class FP8BackendType(Word):
    """Who computes FP8; NO where it is not used."""

    NO = "NO"
    NATIVE = "NATIVE"
    AO = "AO"
    TE = "TE"
    MSAMP = "MSAMP"

    @classmethod
    def _missing_(cls, value: object) -> Any:
        """As the schema reads it: other spellings, such as ``torchao``, and the enum of Accelerate count too."""
        try:
            word = Choice(tuple(cls.list()), BACKEND_SPELLINGS).parse(value)
        except ValueError:
            return super()._missing_(value)
        return cls(word)


class DistributedType(Word):
    """How processes train together. Those below DEEPSPEED exist for comparisons only and cannot be configured."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    FSDP = "FSDP"
    DEEPSPEED = "DEEPSPEED"
    MULTI_NPU = "MULTI_NPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_XPU = "MULTI_XPU"
    MULTI_HPU = "MULTI_HPU"
    MULTI_NEURON = "MULTI_NEURON"
    XLA = "XLA"
    MEGATRON_LM = "MEGATRON_LM"


class DynamoBackend(Word):
    """Compilers behind torch.compile."""

    NO = "NO"
    EAGER = "EAGER"
    AOT_EAGER = "AOT_EAGER"
    INDUCTOR = "INDUCTOR"
    AOT_TS_NVFUSER = "AOT_TS_NVFUSER"
    NVPRIMS_NVFUSER = "NVPRIMS_NVFUSER"
    CUDAGRAPHS = "CUDAGRAPHS"
    OFI = "OFI"
    FX2TRT = "FX2TRT"
    ONNXRT = "ONNXRT"
    TENSORRT = "TENSORRT"
    AOT_TORCHXLA_TRACE_ONCE = "AOT_TORCHXLA_TRACE_ONCE"
    TORCHXLA_TRACE_ONCE = "TORCHXLA_TRACE_ONCE"
    IPEX = "IPEX"
    TVM = "TVM"
    HPU_BACKEND = "HPU_BACKEND"


class LoggerType(Word):
    """Where ``Accelerator(log_with=...)`` reports to; JSONL is acceler8's own file of lines."""

    ALL = "all"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    TRACKIO = "trackio"
    MLFLOW = "mlflow"
    JSONL = "jsonl"
