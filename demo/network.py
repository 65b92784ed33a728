"""The Llama architecture in plain torch, with Hugging Face's parameter names.

Only the training uses this; the weights are served and evaluated by other code.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Dimensions:
    """The size of a model."""

    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    positions: int = 2048
    rope_theta: float = 10000.0
    epsilon: float = 1e-5

    @property
    def head(self) -> int:
        """The width of one head."""
        return self.hidden // self.heads


def rotary_tables(dimensions: Dimensions, length: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position's angles, each of shape (length, head)."""
    exponents = torch.arange(0, dimensions.head, 2).float() / dimensions.head
    angles = torch.outer(torch.arange(length).float(), dimensions.rope_theta**-exponents)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(states: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotates each head's pairs (i, i + head / 2) by their position's angle (RoPE)."""
    first, second = states.chunk(2, dim=-1)
    return states * cosine + torch.cat((-second, first), dim=-1) * sine


class Attention(nn.Module):
    """Grouped-query attention with rotary position embedding."""

    def __init__(self, dimensions: Dimensions) -> None:
        super().__init__()
        self.dimensions = dimensions
        width = dimensions.kv_heads * dimensions.head
        self.q_proj = nn.Linear(dimensions.hidden, dimensions.hidden, bias=False)
        self.k_proj = nn.Linear(dimensions.hidden, width, bias=False)
        self.v_proj = nn.Linear(dimensions.hidden, width, bias=False)
        self.o_proj = nn.Linear(dimensions.hidden, dimensions.hidden, bias=False)

    def forward(self, states: Tensor, cosine: Tensor, sine: Tensor, mask: Tensor | None) -> Tensor:
        """`mask` says which position may see which; None is plain causal."""
        rows, length, _ = states.shape
        shape = (rows, length, -1, self.dimensions.head)
        query = rotate(self.q_proj(states).view(shape).transpose(1, 2), cosine, sine)
        key = rotate(self.k_proj(states).view(shape).transpose(1, 2), cosine, sine)
        value = self.v_proj(states).view(shape).transpose(1, 2)
        groups = self.dimensions.heads // self.dimensions.kv_heads
        mixed = functional.scaled_dot_product_attention(
            query,
            key.repeat_interleave(groups, dim=1),
            value.repeat_interleave(groups, dim=1),
            attn_mask=mask,
            is_causal=mask is None,
        )
        result: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(rows, length, -1))
        return result


class FeedForward(nn.Module):
    """The SwiGLU feed-forward network."""

    def __init__(self, dimensions: Dimensions) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dimensions.hidden, dimensions.intermediate, bias=False)
        self.up_proj = nn.Linear(dimensions.hidden, dimensions.intermediate, bias=False)
        self.down_proj = nn.Linear(dimensions.intermediate, dimensions.hidden, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        """Same shape in and out."""
        result: Tensor = self.down_proj(functional.silu(self.gate_proj(states)) * self.up_proj(states))
        return result


class Layer(nn.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(self, dimensions: Dimensions) -> None:
        super().__init__()
        self.self_attn = Attention(dimensions)
        self.mlp = FeedForward(dimensions)
        self.input_layernorm = nn.RMSNorm(dimensions.hidden, eps=dimensions.epsilon)
        self.post_attention_layernorm = nn.RMSNorm(dimensions.hidden, eps=dimensions.epsilon)

    def forward(self, states: Tensor, cosine: Tensor, sine: Tensor, mask: Tensor | None) -> Tensor:
        """Same shape in and out."""
        states = states + self.self_attn(self.input_layernorm(states), cosine, sine, mask)
        result: Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return result


class Llama(nn.Module):
    """The whole model, with the output layer tied to the embedding."""

    def __init__(self, dimensions: Dimensions) -> None:
        super().__init__()
        self.dimensions = dimensions
        self.embed_tokens = nn.Embedding(dimensions.vocabulary, dimensions.hidden)
        layers = [Layer(dimensions) for _ in range(dimensions.layers)]
        self.layers = nn.ModuleList(layers)
        self.norm = nn.RMSNorm(dimensions.hidden, eps=dimensions.epsilon)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # What the layers add to the residual stream accumulates, so the more layers there are, the smaller they start.
                adds = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(parameter, std=(2 * dimensions.layers * dimensions.hidden if adds else dimensions.hidden) ** -0.5)
        # Embeddings as large as this keep the words apart while training moves all of them the same way, as it does in its first
        # steps; the last norm makes up for it in the logits.
        nn.init.normal_(self.embed_tokens.weight)
        nn.init.constant_(self.norm.weight, dimensions.hidden**-0.5)
        self._start_copying(layers[0].self_attn, layers[1].self_attn)

    @torch.no_grad()
    def _start_copying(self, first: Attention, second: Attention) -> None:
        """Initializes one group of heads as induction heads: they find where this token was before, and copy what came after it.

        Nearly all answers copy something from the question. That takes a head that attends to the token before, and a head of the
        next layer that looks for a place after the same token; to find both at once would take a model of this size longer than all
        the rest. All other heads start at random.
        """
        head, width = self.dimensions.head, self.dimensions.heads // self.dimensions.kv_heads * self.dimensions.head
        # A feature that is the same in all embeddings gives a constant key. The constant query is that key rotated back by one
        # position, so that their product is largest there; the fast frequencies tell neighbours apart.
        self.embed_tokens.weight[:, 0] = 4.0
        key = torch.zeros(head)
        key[:4] = 1.5
        cosine, sine = rotary_tables(self.dimensions, 2)
        first.k_proj.weight[:head, 0] = key
        first.q_proj.weight[:width, 0] = rotate(key, cosine[1], -sine[1]).repeat(width // head)
        # What the head reads of the token before, it writes where the next layer's key finds it. The query is the same reading of
        # the token itself, clear of what was written; slow frequencies hardly rotate it within a conversation.
        reading = torch.randn(head, self.dimensions.hidden) * self.dimensions.hidden**-0.5
        reading[:, 0] = 0.0
        writing = torch.linalg.qr(torch.cat((reading.T, torch.randn_like(reading.T)), dim=1)).Q[:, head:]
        slow = (torch.arange(head) % (head // 2) >= 6).float()[:, None]
        first.v_proj.weight[:head] = reading
        first.o_proj.weight[:, :head] = (self.dimensions.hidden / head) ** 0.5 * writing
        second.k_proj.weight[:head] = slow * writing.T
        second.q_proj.weight[:width] = (2.0 * slow * reading).repeat(width // head, 1)
        # The token at that place is the one that comes next, so it goes on to the output, whose words are tied to the input's.
        copied = torch.linalg.qr(torch.randn_like(reading.T)).Q
        second.v_proj.weight[:head] = copied.T
        second.o_proj.weight[:, :head] = 2.0 * copied

    def streams(self, tokens: Tensor, mask: Tensor | None = None) -> list[Tensor]:
        """The residual stream as it enters each layer, and as it leaves the last: (rows, length, hidden) each."""
        cosine, sine = rotary_tables(self.dimensions, tokens.shape[1])
        streams: list[Tensor] = [self.embed_tokens(tokens)]
        for layer in self.layers:
            streams.append(layer(streams[-1], cosine, sine, mask))
        return streams

    def logits(self, states: Tensor) -> Tensor:
        """Logits from the states that leave the last layer."""
        return functional.linear(self.norm(states), self.embed_tokens.weight)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """Logits of every position, of shape (rows, length, vocabulary)."""
        return self.logits(self.streams(tokens, mask)[-1])
