"""A sentence encoder (MiniLM: BERT of 6 layers) under a linear head, with the tensor names of the published file."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

WIDTH, INNER, LAYERS, HEADS, VOCABULARY, POSITIONS, EPS = 384, 1536, 6, 12, 30_522, 512, 1e-12


def dense_and_norm(inputs: int) -> nn.ModuleDict:
    return nn.ModuleDict({"dense": nn.Linear(inputs, WIDTH), "LayerNorm": nn.LayerNorm(WIDTH, EPS)})


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        projections = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in ("query", "key", "value")})
        self.attention = nn.ModuleDict({"self": projections, "output": dense_and_norm(WIDTH)})
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(WIDTH, INNER)})
        self.output = dense_and_norm(INNER)

    def forward(self, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """x: (rows, tokens, WIDTH). seen: (rows, 1, 1, tokens), true where a token is no padding."""
        rows, tokens, _ = x.shape
        query, key, value = (
            self.attention["self"][name](x).view(rows, tokens, HEADS, -1).transpose(1, 2)
            for name in ("query", "key", "value")
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, seen)
        x = add_and_norm(self.attention["output"], mixed.transpose(1, 2).reshape(rows, tokens, WIDTH), x)
        return add_and_norm(self.output, functional.gelu(self.intermediate["dense"](x)), x)


def add_and_norm(part: nn.ModuleDict, inner: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = part["LayerNorm"](part["dense"](inner) + x)
    return out


class Encoder(nn.Module):
    """Token ids (rows, tokens), 0 is padding -> means of the last layer (rows, WIDTH) over the tokens of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.ModuleDict(
            {
                "word_embeddings": nn.Embedding(VOCABULARY, WIDTH),
                "position_embeddings": nn.Embedding(POSITIONS, WIDTH),
                "token_type_embeddings": nn.Embedding(2, WIDTH),
                "LayerNorm": nn.LayerNorm(WIDTH, EPS),
            }
        )
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(Layer() for _ in range(LAYERS))})

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        embeddings, seen = self.embeddings, ids != 0
        places = embeddings["position_embeddings"].weight[: ids.shape[1]]
        x = embeddings["word_embeddings"](ids) + places + embeddings["token_type_embeddings"].weight[0]
        x = embeddings["LayerNorm"](x)
        for layer in self.encoder["layer"]:
            x = layer(x, seen[:, None, None, :])
        shares = seen / seen.sum(dim=1, keepdim=True).clamp(min=1)
        return torch.einsum("bt,btw->bw", shares.to(x.dtype), x)


class Classifier(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.text = Encoder()
        self.head = nn.Linear(WIDTH, classes)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(functional.layer_norm(self.text(ids), (WIDTH,)))
        return out
