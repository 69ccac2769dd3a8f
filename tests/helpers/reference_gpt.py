"""The GPT of published measurements: LayerNorm, biases, an MLP of 4 x the width, learned positions, a tied head.

published_steps.py traces it for the rows of a table, which name its sizes and how it was cut. Operations that
Megatron-LM fuses (bias and GELU; bias, dropout and residual) are one here. Nothing trains it.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from sparkring.training.models.sharding_plan import ShardingPlan

Tensor = torch.Tensor

PLAN = ShardingPlan(
    layers=("embed", "blocks.*", "norm", "head"),
    tensor={
        "embed": "vocab",
        "blocks.*.attn": "enter",
        "blocks.*.attn.qkv": "column",
        "blocks.*.attn.o": "row",
        "blocks.*.mlp": "enter",
        "blocks.*.mlp.up": "column",
        "blocks.*.mlp.down": "row",
        "blocks.*.norm1": "replicate",
        "blocks.*.norm2": "replicate",
        "norm": "replicate",
        "head": "vocab_head",
    },
    heads=("blocks.*.attn",),
)


class ReferenceCore(nn.Module):
    """Causal attention (B, H, T, D) x 3 -> (B, T, H, D), by one kernel or with the scores in memory."""

    def __init__(self, fused: bool, dropout: bool) -> None:
        super().__init__()
        self.fused, self.dropout = fused, dropout

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.fused:
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        scores = ((q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5).neg().softmax(-1)  # neg: the mask's bytes
        return ((torch.native_dropout(scores, 0.1, True)[0] if self.dropout else scores) @ v).transpose(1, 2)


class ReferenceAttention(nn.Module):
    """Causal attention with one projection for queries, keys and values: (B, T, M) -> (B, T, M)."""

    def __init__(self, width: int, heads: int, fused: bool, dropout: bool) -> None:
        super().__init__()
        self.heads = self.kv_heads = heads
        self.qkv, self.o = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.core = ReferenceCore(fused, dropout)

    def forward(self, x_BTM: Tensor) -> Tensor:
        q, k, v = self.qkv(x_BTM).unflatten(-1, (self.heads, -1)).transpose(1, 2).chunk(3, dim=-1)
        out: Tensor = self.o(self.core(q, k, v).flatten(-2))
        return out


class ReferenceMlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BTM: Tensor) -> Tensor:
        out: Tensor = self.down(functional.gelu(self.up(x_BTM)))
        return out


class ReferenceBlock(nn.Module):
    def __init__(self, width: int, heads: int, fused: bool, dropout: bool) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width), ReferenceAttention(width, heads, fused, dropout)
        self.norm2, self.mlp = nn.LayerNorm(width), ReferenceMlp(width)

    def forward(self, x_BTM: Tensor) -> Tensor:
        x_BTM = x_BTM + self.attn(self.norm1(x_BTM))
        return x_BTM + self.mlp(self.norm2(x_BTM))


class ReferenceEmbedding(nn.Embedding):
    """Embedding of tokens, and of their positions."""

    def __init__(self, vocab: int, width: int, tokens: int) -> None:
        super().__init__(vocab, width)
        self.position = nn.Parameter(torch.empty(tokens, width))

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return super().forward(tokens_BT) + self.position


class ReferenceGPT(nn.Module):
    """tokens (B, T) int64 -> logits (B, T, V)."""

    def __init__(
        self, vocab: int, width: int, layers: int, heads: int, tokens: int, fused: bool = True, dropout: bool = False
    ) -> None:
        """Make it, best on the meta device.

        Args:
            vocab: V.
            width: M.
            layers: blocks.
            heads: of attention.
            tokens: T.
            fused: whether attention is one kernel, or its scores are in memory.
            dropout: whether unfused attention drops scores.
        """
        super().__init__()
        self.embed = ReferenceEmbedding(vocab, width, tokens)
        self.blocks = nn.ModuleList(ReferenceBlock(width, heads, fused, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTM = self.embed(tokens_BT)
        for block in self.blocks:
            x_BTM = block(x_BTM)
        logits: Tensor = self.head(self.norm(x_BTM))
        return logits
