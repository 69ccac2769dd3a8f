"""Decoder-only transformer with rotary positions (https://arxiv.org/abs/2104.09864) and RMSNorm (1910.07467).

With SwiGLU (2002.05202), optional grouped-query attention (2305.13245) and tied embedding (1608.05859). It knows
nothing of parallelism; `PLAN` next to it says how it may be cut.
Shapes: B rows, T tokens, V vocabulary, M model width, H query heads, K key/value heads, D head width, F hidden width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import nn
from torch.nn import functional

from sparkring.conf.manifest import DatasetManifest
from sparkring.training.data.batch import Columns
from sparkring.training.models.arguments import FromDataset, Layers, Positive, Size
from sparkring.training.models.loss import token_cross_entropy
from sparkring.training.models.sharding_plan import ShardingPlan
from sparkring.training.models.task import Task

Tensor = torch.Tensor

PLAN = ShardingPlan(
    layers=("embed", "blocks.*", "norm", "head"),
    tensor={
        "embed": "vocab",
        "blocks.*.attn": "enter",
        "blocks.*.attn.q": "column",
        "blocks.*.attn.k": "column",
        "blocks.*.attn.v": "column",
        "blocks.*.attn.o": "row",
        "blocks.*.mlp": "enter",
        "blocks.*.mlp.gate": "column",
        "blocks.*.mlp.up": "column",
        "blocks.*.mlp.down": "row",
        "blocks.*.norm1": "replicate",
        "blocks.*.norm2": "replicate",
        "norm": "replicate",
        "head": "vocab_head",
    },
    heads=("blocks.*.attn",),
)


def rotate(x_BTHD: Tensor, theta: float) -> Tensor:
    """Rotate pairs (i, i + D/2) of position t by t / theta^(2i/D); positions count from 0."""
    tokens, half = x_BTHD.shape[1], x_BTHD.shape[-1] // 2
    dtype = torch.float64 if x_BTHD.dtype == torch.float64 else torch.float32
    frequency_D = theta ** (-torch.arange(half, device=x_BTHD.device, dtype=dtype) / half)
    angle_TD = torch.arange(tokens, device=x_BTHD.device, dtype=dtype)[:, None] * frequency_D
    cos, sin = angle_TD.cos()[:, None].to(x_BTHD.dtype), angle_TD.sin()[:, None].to(x_BTHD.dtype)
    first, second = x_BTHD[..., :half], x_BTHD[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class CausalCore(nn.Module):
    """Attention over whole sequences: (B, T, H, D), (B, T, K, D) x 2 -> (B, T, H, D)."""

    def __init__(self, theta: float) -> None:
        super().__init__()
        self.theta = theta

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        grouped = q.shape[2] != k.shape[2]
        q, k = rotate(q, self.theta).transpose(1, 2), rotate(k, self.theta).transpose(1, 2)
        out = functional.scaled_dot_product_attention(q, k, v.transpose(1, 2), is_causal=True, enable_gqa=grouped)
        return out.transpose(1, 2)


class Attention(nn.Module):
    """Causal attention with grouped keys and values: (B, T, M) -> (B, T, M); each projection may be cut by heads."""

    def __init__(self, width: int, heads: int, kv_heads: int, theta: float) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_width = heads, kv_heads, width // heads
        self.q = nn.Linear(width, heads * self.head_width, bias=False)
        self.k = nn.Linear(width, kv_heads * self.head_width, bias=False)
        self.v = nn.Linear(width, kv_heads * self.head_width, bias=False)
        self.o = nn.Linear(heads * self.head_width, width, bias=False)
        self.core = CausalCore(theta)

    def forward(self, x_BTM: Tensor) -> Tensor:
        q, k, v = (layer(x_BTM).unflatten(-1, (-1, self.head_width)) for layer in (self.q, self.k, self.v))
        out: Tensor = self.o(self.core(q, k, v).flatten(-2))
        return out


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)): (B, T, M) -> (B, T, M) through a hidden width of F."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x_BTM: Tensor) -> Tensor:
        out: Tensor = self.down(functional.silu(self.gate(x_BTM)) * self.up(x_BTM))
        return out


class Block(nn.Module):
    """One layer, with RMSNorm before attention and before the MLP: (B, T, M) -> (B, T, M)."""

    def __init__(self, width: int, attn: Attention, mlp: SwiGLU) -> None:
        super().__init__()
        self.norm1, self.attn = nn.RMSNorm(width, eps=1e-6), attn
        self.norm2, self.mlp = nn.RMSNorm(width, eps=1e-6), mlp

    def forward(self, x_BTM: Tensor) -> Tensor:
        x_BTM = x_BTM + self.attn(self.norm1(x_BTM))
        return x_BTM + self.mlp(self.norm2(x_BTM))


class GPT(nn.Module):
    """tokens (B, T) int64 -> logits (B, T, V)."""

    def __init__(
        self,
        vocab: Annotated[Size, FromDataset(1, may_be_set=True)],
        width: Size = 256,
        layers: Layers = 6,
        heads: Size = 4,
        kv_heads: Size | None = None,
        hidden: Size | None = None,
        tied: bool = True,
        theta: Positive = 10_000.0,
    ) -> None:
        """Build the model from the recipe's `model.args`.

        Args:
            vocab: V, tokens of the vocabulary.
            width: M, numbers per token between blocks.
            layers: number of blocks.
            heads: H, attention heads; M / H must be even.
            kv_heads: K, heads of keys and values, a divisor of H; None: H.
            hidden: F, width of the MLP; None: 8/3 of M, rounded up to a multiple of 64.
            tied: whether the head shares the embedding's weight.
            theta: base of the rotary frequencies.
        """
        super().__init__()
        kv_heads = kv_heads or heads
        if width % heads or (width // heads) % 2 or heads % kv_heads:
            raise ValueError(
                f"model.args: width({width}) must be heads({heads}) x an even head width, and heads a multiple of "
                f"kv_heads({kv_heads})"
            )
        hidden = hidden or -(-8 * width // 3 // 64) * 64
        self.layers = layers
        self.embed = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(
            Block(width, Attention(width, heads, kv_heads, theta), SwiGLU(width, hidden)) for _ in range(layers)
        )
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.head = nn.Linear(width, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.init_weights()

    @classmethod
    def from_manifest(cls, manifest: DatasetManifest, **args: Any) -> GPT:
        """Take the vocabulary from the dataset: `cardinality` of the column `tokens`."""
        cardinality = manifest.tensor("tokens").cardinality
        if "vocab" not in args and not cardinality:
            raise ValueError("model.args.vocab: the dataset's column 'tokens' has no cardinality; give the vocabulary")
        if cardinality and args.get("vocab", cardinality) < cardinality:
            raise ValueError(
                f"model.args.vocab = {args['vocab']}: the dataset's column 'tokens' has {cardinality} tokens; "
                "make it as large, or leave it out"
            )
        return cls(**{"vocab": cardinality, **args})

    @torch.no_grad()
    def init_weights(self) -> None:
        """Initialize by Normal(0, 0.02); layers writing to the residual times 1/sqrt(2 layers) (GPT-2, section 2.3)."""
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                parameter.fill_(1.0)
            else:
                residual = name.endswith(("attn.o.weight", "mlp.down.weight"))
                parameter.normal_(0.0, 0.02 / math.sqrt(2 * self.layers) if residual else 0.02)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTM = self.embed(tokens_BT)
        for block in self.blocks:
            x_BTM = block(x_BTM)
        logits: Tensor = self.head(self.norm(x_BTM))
        return logits


class LanguageModelTask(Task):
    """Predict each token of the column `tokens` (B, T + 1); nats and bits per token.

    `pad_id` is never a target. A row's loss is the sum over its real targets, divided by T whatever their number, so
    that every token weighs the same in a step; `counted_share` is the share of T that is real.
    """

    def __init__(self, pad_id: int = -100) -> None:
        self.pad_id = pad_id

    def inputs(self, columns: Columns) -> tuple[Tensor]:
        return (columns["tokens"][:, :-1].long(),)

    def loss(self, outputs: Tensor, columns: Columns) -> Tensor:
        target_BT = columns["tokens"][:, 1:].long()
        return token_cross_entropy(outputs, target_BT, self.pad_id).mean(1)

    def metric_names(self) -> tuple[str, ...]:
        return ("token_accuracy", "bits_per_token")

    def counted_share(self, columns: Columns) -> Tensor:
        return (columns["tokens"][:, 1:] != self.pad_id).double().mean(dim=1)

    def metric_sums(self, outputs: Tensor, columns: Columns) -> dict[str, Tensor]:
        target_BT = columns["tokens"][:, 1:].long()
        right = (outputs.argmax(dim=-1) == target_BT) & (target_BT != self.pad_id)
        bits = self.loss(outputs, columns).double() / math.log(2)
        return {"token_accuracy": right.double().mean(dim=1), "bits_per_token": bits}

    def slice_sequence(self, columns: Columns, part: int, parts: int) -> Columns:
        """Return one of `parts` equal stretches of every row, and the next token as a target."""
        tokens = columns["tokens"]
        length = tokens.shape[1] - 1
        if length % parts:
            raise ValueError(f"a sequence of {length} tokens does not divide by parallel.cp={parts}")
        step = length // parts
        return {**columns, "tokens": tokens[:, part * step : (part + 1) * step + 1]}


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn from logits; temperature 0 takes the most likely one."""

    temperature: float = 0.8
    top_k: int = 40
    seed: int = 0


@torch.no_grad()
def generate(
    model: nn.Module, prompt: list[int], count: int, context: int, sampling: Sampling | None = None
) -> list[int]:
    """Generate tokens after a prompt.

    Args:
        model: tokens (1, T) -> logits (1, T, V).
        prompt: at least one token.
        count: tokens to generate.
        context: the model sees at most so many tokens, the last ones.
        sampling: None: its defaults.
    """
    sampling = sampling or Sampling()
    if not prompt:
        raise ValueError("generate needs a prompt of at least one token")
    device = next((weight.device for weight in model.parameters()), torch.device("cpu"))  # tables alone have none
    source = torch.Generator(device="cpu").manual_seed(sampling.seed)
    tokens = list(prompt)
    for _ in range(count):
        logits_V = model(torch.tensor([tokens[-context:]], device=device))[0, -1].float().cpu()
        if sampling.temperature == 0:
            tokens.append(int(logits_V.argmax()))
            continue
        best, ids = logits_V.topk(min(sampling.top_k, len(logits_V)))
        chosen = torch.multinomial(torch.softmax(best / sampling.temperature, dim=0), 1, generator=source)
        tokens.append(int(ids[chosen]))
    return tokens[len(prompt) :]
