"""A Llama's layers as a benchmark needs them: the shapes and names of the real ones, no rotary positions."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from acceler8.bench.presets import Preset


class Attention(nn.Module):
    """Causal grouped-query attention; h [batch, length, width] -> same."""

    def __init__(self, preset: Preset) -> None:
        super().__init__()
        self.heads, self.kv_heads = preset.heads, preset.kv_heads
        self.q_proj, self.o_proj = (nn.Linear(preset.width, preset.width, bias=False) for _ in range(2))
        self.k_proj, self.v_proj = (nn.Linear(preset.width, preset.kv_width, bias=False) for _ in range(2))

    def forward(self, h: Tensor) -> Tensor:
        """Attend to this and earlier positions."""
        q, k, v = (
            proj(h).unflatten(-1, (n, -1)).transpose(1, 2)
            for proj, n in ((self.q_proj, self.heads), (self.k_proj, self.kv_heads), (self.v_proj, self.kv_heads))
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out


class MLP(nn.Module):
    """SwiGLU; h [batch, length, width] -> same."""

    def __init__(self, preset: Preset) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(preset.width, preset.ffn, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(preset.ffn, preset.width, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        """Apply the gated MLP to every position."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))
        return out


class Layer(nn.Module):
    """Pre-norm attention and gated MLP."""

    def __init__(self, preset: Preset) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = (nn.RMSNorm(preset.width, eps=1e-5) for _ in range(2))
        self.attention, self.mlp = Attention(preset), MLP(preset)

    def forward(self, x: Tensor) -> Tensor:
        """Add attention, then the MLP, to the residual stream."""
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class Llama(nn.Module):
    """Embedding, layers, norm, untied head; tokens [batch, length] -> logits [batch, length, vocabulary]."""

    def __init__(self, preset: Preset) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(preset.vocabulary, preset.width)
        self.layers = nn.ModuleList(Layer(preset) for _ in range(preset.layers))
        self.norm = nn.RMSNorm(preset.width, eps=1e-5)
        self.lm_head = nn.Linear(preset.width, preset.vocabulary, bias=False)

    def hidden(self, tokens: Tensor) -> Tensor:
        """What the head reads, [batch, length, width]."""
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.norm(x)
        return out

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the token after each position."""
        out: Tensor = self.lm_head(self.hidden(tokens))
        return out
