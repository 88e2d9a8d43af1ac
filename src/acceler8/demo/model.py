"""A small Llama-style language model over bytes: what the demo trains.

RMSNorm, rotary positions, grouped-query attention through PyTorch's SDPA, SwiGLU and an untied output head:
the shape of the models that people train in FP8, with the same layer names (``q_proj`` ... ``down_proj``), so
what the demo reports about a layer group carries over. The vocabulary is the 256 bytes: no tokenizer to fetch
and any text works. Every matrix is a plain ``nn.Linear`` without bias, and nothing here knows about FP8;
conversion finds the layers by itself.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from acceler8.demo.settings import ModelSize

VOCABULARY = 256
ROPE_BASE = 10_000.0


class RMSNorm(nn.Module):
    """Root-mean-square norm with a learned gain, computed in FP32.

    Shape: x [..., dim] -> y [..., dim] in the dtype of ``x``; an all-zero row stays zero.
    Source: Zhang and Sennrich 2019, arXiv:1910.07467.
    """

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dimension of ``x``."""
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), self.eps).to(x.dtype)


def rotary_tables(length: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the cosine and sine of every position's rotation angles.

    Shape: cos, sin [length, head_dim] fp32, the two halves equal (the "rotate half" layout of Llama).
    Source: Su et al. 2021, arXiv:2104.09864, eq. 34.
    """
    exponents = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), ROPE_BASE**-exponents)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate queries or keys by their position; x [batch, heads, length, head_dim], dtype kept."""
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x.float() * cos + turned * sin).to(x.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention; x [batch, length, dim] -> [batch, length, dim]."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = size.heads, size.kv_heads, size.head_dim
        self.q_proj = nn.Linear(size.dim, size.heads * size.head_dim, bias=False)
        self.k_proj = nn.Linear(size.dim, size.kv_heads * size.head_dim, bias=False)
        self.v_proj = nn.Linear(size.dim, size.kv_heads * size.head_dim, bias=False)
        self.o_proj = nn.Linear(size.heads * size.head_dim, size.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attend to this and earlier positions."""
        batch, length, _ = x.shape
        q = self.q_proj(x).view(batch, length, self.heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(batch, length, self.kv_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, self.kv_heads, self.head_dim).transpose(1, 2)
        y = F.scaled_dot_product_attention(
            rotate(q, cos, sin),
            rotate(k, cos, sin),
            v,
            is_causal=True,
            enable_gqa=self.heads != self.kv_heads,
        )
        out: Tensor = self.o_proj(y.transpose(1, 2).reshape(batch, length, -1))
        return out


class GatedMLP(nn.Module):
    """SwiGLU, ``down(silu(gate(x)) * up(x))``; x [batch, length, dim] -> same (arXiv:2002.05202)."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size.dim, size.ffn, bias=False)
        self.up_proj = nn.Linear(size.dim, size.ffn, bias=False)
        self.down_proj = nn.Linear(size.ffn, size.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the gated MLP to every position."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    """One pre-norm transformer layer; x [batch, length, dim] -> same."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.input_norm = RMSNorm(size.dim)
        self.self_attn = Attention(size)
        self.post_norm = RMSNorm(size.dim)
        self.mlp = GatedMLP(size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Add attention, then the MLP, to the residual stream."""
        x = x + self.self_attn(self.input_norm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_norm(x))
        return out


class ByteLlama(nn.Module):
    """Predict the next byte; bytes [batch, length] int64 -> logits [batch, length, 256]."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.head_dim = size.head_dim
        self.embed_tokens = nn.Embedding(VOCABULARY, size.dim)
        self.layers = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = RMSNorm(size.dim)
        self.lm_head = nn.Linear(size.dim, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the byte after each position."""
        cos, sin = rotary_tables(tokens.shape[1], self.head_dim, tokens.device)
        x = self.embed_tokens(tokens)
        for block in self.layers:
            x = block(x, cos, sin)
        logits: Tensor = self.lm_head(self.norm(x))
        return logits


def build_model(size: ModelSize, seed: int) -> ByteLlama:
    """Build the model on the CPU in FP32; the weights depend on ``size`` and ``seed`` alone.

    Matrices start at std 1/sqrt(in_features); the two that write to the residual stream are smaller by sqrt(2
    * layers), so that depth does not grow the stream (Radford et al. 2019, GPT-2, section 2.3). The global
    generator is left alone.
    """
    with torch.device("meta"):
        model = ByteLlama(size)
    model = model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
                continue
            std = 0.02 if "embed" in name or "lm_head" in name else parameter.shape[1] ** -0.5
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                std /= (2 * size.layers) ** 0.5
            parameter.normal_(0.0, std, generator=generator)
    return model


def next_byte_loss(model: nn.Module, windows: Tensor) -> Tensor:
    """Mean cross entropy in nats per byte; windows [batch, length + 1] int64. The loss itself is FP32."""
    logits = model(windows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())
