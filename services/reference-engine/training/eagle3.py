"""The EAGLE-3 head in plain PyTorch, and its unrolled loss (training-time test).

A row of the head at position i reads what the target computed at i (hidden states of
three layers) and the token at i + 1, and guesses the token at i + 2. From its second
guess on it reads its own previous output instead of the target's hidden states. The
loss includes these later guesses (EAGLE-3, arXiv 2503.01840, section 3).
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

from model import MLP, RMSNorm, rope_tables, rotate

# The head reads the outputs of these layers of the target, counted from 0. The usual
# ones (1, n/2 - 1, n - 4) would be 1, 2 and 2 for a target of six layers.
CAPTURED = [1, 3, 4]
DRAFT_VOCAB = 1024
# Width of the head's MLP, a third of the target's. On a CPU the time of a guess is
# proportional to the weights that are read, and a wider MLP cost more than it gained.
INTERMEDIATE = 256


class Attention(nn.Module):
    """Attention whose input is the token's embedding and, after it, the hidden state."""

    def __init__(self, c):
        super().__init__()
        self.c = c
        wide, narrow = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.q_proj = nn.Linear(2 * c.hidden_size, wide, bias=False)
        self.k_proj = nn.Linear(2 * c.hidden_size, narrow, bias=False)
        self.v_proj = nn.Linear(2 * c.hidden_size, narrow, bias=False)
        self.o_proj = nn.Linear(wide, c.hidden_size, bias=False)

    def split_heads(self, projection, x):
        """Projects [batch, rows, size] to [batch, heads, rows, d]. Keys and values are
        repeated for all heads."""
        y = projection(x).unflatten(-1, (-1, self.c.head_dim)).transpose(1, 2)
        return y.repeat_interleave(self.c.num_attention_heads // y.shape[1], 1)


class MidLayer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.self_attn, self.mlp = Attention(c), MLP(c)
        self.hidden_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)

    def join_inputs(self, embedded, hidden):
        return torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden)], -1)


class Eagle3(nn.Module):
    """state_dict() has exactly the tensor names of a published checkpoint, without d2t and t2d."""

    def __init__(self, target, draft_vocab):
        super().__init__()
        config = replace(target, intermediate_size=INTERMEDIATE)
        self.fc = nn.Linear(len(CAPTURED) * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = MidLayer(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, draft_vocab, bias=False)
        self.rope = rope_tables(config, config.max_position_embeddings + 16)
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)

    def start_from(self, net, draft_ids):
        """Copies weights of the target: the strongest neurons of its last MLP, its last norm,
        and the rows of its output layer for the draft vocabulary. At first, fc passes the
        highest captured layer on unchanged."""
        size, last = net.config.hidden_size, net.model.layers[-1]
        with torch.no_grad():
            self.fc.weight.zero_()
            self.fc.weight[:, -size:] = torch.eye(size)
            strength = last.mlp.gate_proj.weight.norm(dim=1) * last.mlp.down_proj.weight.norm(dim=0)
            kept = strength.topk(INTERMEDIATE).indices
            self.midlayer.mlp.gate_proj.weight.copy_(last.mlp.gate_proj.weight[kept])
            self.midlayer.mlp.up_proj.weight.copy_(last.mlp.up_proj.weight[kept])
            self.midlayer.mlp.down_proj.weight.copy_(last.mlp.down_proj.weight[:, kept])
            self.midlayer.post_attention_layernorm.load_state_dict(last.post_attention_layernorm.state_dict())
            self.norm.load_state_dict(net.model.norm.state_dict())
            self.lm_head.weight.copy_(net.model.embed_tokens.weight[draft_ids])

    def unroll(self, net, ids, features, slots, steps):
        """Returns the logits of `steps` successive guesses from each slot: [steps, batch, slots,
        draft vocab].

        A slot is a position of the text from which the head guesses.
        ids: [batch, length]; features: [batch, length, 3 * hidden]; slots: [batch, slots],
        positions at most length - 1 - steps. The first row of a slot sees all rows of the
        text up to it. Later rows also see the slot's own earlier guesses.
        """
        layer, attn, embed = self.midlayer, self.midlayer.self_attn, net.model.embed_tokens
        cos, sin = (t.to(features.dtype) for t in self.rope)
        fused = self.fc(features)
        # Row i of the text reads the hidden state at i and the token at i + 1.
        length = ids.shape[1] - 1
        text = layer.join_inputs(embed(ids[:, 1:]), fused[:, :length])
        keys = rotate(attn.split_heads(attn.k_proj, text), cos[:length], sin[:length])
        values = attn.split_heads(attn.v_proj, text)
        unseen = torch.arange(length)[None, None] > slots[:, :, None]
        mask = torch.zeros(unseen.shape, dtype=features.dtype).masked_fill(unseen, float("-inf"))[:, None]

        at = slots[:, :, None]
        hidden = fused.gather(1, at.expand(-1, -1, fused.shape[2]))
        own_keys, own_values, out = [], [], []
        for step in range(steps):
            x = layer.join_inputs(embed(ids.gather(1, slots + 1 + step)), hidden)
            here = (slots + step)[:, None, :, None].expand(-1, 1, -1, cos.shape[1])
            turn = [t[None, None].expand(x.shape[0], 1, -1, -1).gather(2, here) for t in (cos, sin)]
            query = rotate(attn.split_heads(attn.q_proj, x), *turn) * attn.c.head_dim ** -0.5
            scores = [query @ keys.transpose(2, 3) + mask]
            if step:
                # Keys and values of the first row are among those of the text.
                own_keys.append(rotate(attn.split_heads(attn.k_proj, x), *turn))
                own_values.append(attn.split_heads(attn.v_proj, x))
                scores += [(query * key).sum(-1, keepdim=True) for key in own_keys]
            weights = torch.cat(scores, -1).softmax(-1)
            mixed = weights[..., :length] @ values
            for i, value in enumerate(own_values):
                mixed = mixed + weights[..., length + i:length + i + 1] * value
            hidden = hidden + attn.o_proj(mixed.transpose(1, 2).flatten(2))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            out.append(self.lm_head(self.norm(hidden)))
        return torch.stack(out)


def captured(net, ids):
    """Returns what the head reads of the target, [batch, length, 3 * hidden], and the
    target's hidden states before its last norm."""
    x = net.model.embed_tokens(ids)
    cos, sin = (t[: ids.shape[1]].to(x.dtype) for t in net.rope)
    kept = []
    for i, layer in enumerate(net.model.layers):
        x = layer(x, cos, sin)
        if i in CAPTURED:
            kept.append(x)
    return torch.cat(kept, -1), x


def losses(logits, target):
    """Returns the cross-entropy of each row with the target's distribution over the draft
    vocabulary."""
    return -(target * F.log_softmax(logits.float(), -1)).sum(-1)
