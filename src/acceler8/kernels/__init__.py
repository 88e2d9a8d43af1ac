"""Operations on tensors, one a file: formula, plain-PyTorch reference, Triton kernel, dispatch."""

from __future__ import annotations

from acceler8.kernels._activations import ACTIVATIONS
from acceler8.kernels._triton import HAVE_TRITON
from acceler8.kernels.activation import (
    activation_backward,
    activation_backward_ref,
    activation_forward,
    activation_ref,
)
from acceler8.kernels.amax import amax_ref, compute_amax
from acceler8.kernels.cast_and_sum import column_sums_ref, quantize_and_sum, quantize_concatenated_and_sum
from acceler8.kernels.concatenated import quantize_concatenated
from acceler8.kernels.cross_entropy import check_labels, cross_entropy_, cross_entropy_ref
from acceler8.kernels.dequantize import dequantize
from acceler8.kernels.gated import gated, gated_backward, gated_backward_ref, gated_ref
from acceler8.kernels.norm import Normed, norm_backward, norm_backward_ref, norm_forward, norm_ref
from acceler8.kernels.quantize import Quantized, quantize, quantize_ref
from acceler8.kernels.scaled_matmul import (
    check_operands,
    has_hardware_matmul,
    multiply,
    scaled_matmul,
    scaled_matmul_ref,
)
from acceler8.kernels.statistics import CastStatistics, read_statistics
from acceler8.kernels.transpose import transpose_bytes, transpose_codes, transpose_ref

__all__ = [
    "ACTIVATIONS",
    "HAVE_TRITON",
    "CastStatistics",
    "Normed",
    "Quantized",
    "activation_backward",
    "activation_backward_ref",
    "activation_forward",
    "activation_ref",
    "amax_ref",
    "check_labels",
    "check_operands",
    "column_sums_ref",
    "compute_amax",
    "cross_entropy_",
    "cross_entropy_ref",
    "dequantize",
    "gated",
    "gated_backward",
    "gated_backward_ref",
    "gated_ref",
    "has_hardware_matmul",
    "multiply",
    "norm_backward",
    "norm_backward_ref",
    "norm_forward",
    "norm_ref",
    "quantize",
    "quantize_and_sum",
    "quantize_concatenated",
    "quantize_concatenated_and_sum",
    "quantize_ref",
    "read_statistics",
    "scaled_matmul",
    "scaled_matmul_ref",
    "transpose_bytes",
    "transpose_codes",
    "transpose_ref",
]
