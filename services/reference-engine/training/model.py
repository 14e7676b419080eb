"""The Llama architecture in plain PyTorch, with the usual weight names.

It has only what the tiny model needs: grouped-query attention, rotary positions in the
"rotate half" layout, RMSNorm, SwiGLU, tied embeddings, no biases.
"""

from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class Config:
    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 704
    num_hidden_layers: int = 6
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0

    def as_dict(self):
        return asdict(self)


class RMSNorm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x):
        # The mean is taken in float32: squares of bfloat16 values lose too much.
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * y.to(x.dtype)


def rope_tables(config, length):
    """Returns cos and sin, each [length, head_dim]. Both halves of a row are equal."""
    half = torch.arange(0, config.head_dim, 2).float() / config.head_dim
    angles = torch.outer(torch.arange(length).float(), config.rope_theta ** -half)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def attend(q, k, v):
    """Computes causal attention. For short rows it computes all scores at once, which is
    faster on a CPU than the fused kernel. For long rows that would need too much memory."""
    length = q.shape[2]
    if length > 512:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    future = torch.full((length, length), float("-inf"), dtype=q.dtype).triu(1)
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(2, 3) + future
    return scores.softmax(-1) @ v


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c = c
        wide, narrow = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.q_proj = nn.Linear(c.hidden_size, wide, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, narrow, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, narrow, bias=False)
        self.o_proj = nn.Linear(wide, c.hidden_size, bias=False)

    def forward(self, x, cos, sin):
        batch, length, _ = x.shape
        q, k, v = (p(x).view(batch, length, -1, self.c.head_dim).transpose(1, 2)
                   for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        groups = self.c.num_attention_heads // self.c.num_key_value_heads
        # Query head h reads key/value head h // groups.
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        y = attend(q, k, v)
        return self.o_proj(y.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.self_attn, self.mlp = Attention(c), MLP(c)
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)

    def forward(self, x, cos, sin):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)


class Llama(nn.Module):
    """state_dict() has exactly the names of a tied LlamaForCausalLM checkpoint."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.model = Body(config)
        self.rope = rope_tables(config, config.max_position_embeddings)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                # Outputs of a block start small so that depth adds no noise at first.
                deep = name.endswith(("o_proj.weight", "down_proj.weight"))
                std = 0.02 / (2 * config.num_hidden_layers) ** 0.5 if deep else 0.02
                nn.init.normal_(p, std=std)

    def hidden(self, ids):
        """Returns the hidden states before the last norm, for every position."""
        x = self.model.embed_tokens(ids)
        cos, sin = (t[: ids.shape[1]].to(x.dtype) for t in self.rope)
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return x

    def head(self, x):
        return F.linear(self.model.norm(x), self.model.embed_tokens.weight)

    def forward(self, ids):
        return self.head(self.hidden(ids))
