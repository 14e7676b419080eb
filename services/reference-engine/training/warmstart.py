"""Starting weights that can already copy from the prompt, roughly.

Copying from the prompt takes two steps: one head marks each position with the
token before it, a later head finds the position whose mark is the current token
and reads the token there. Neither head is of use without the other, so
random weights need millions of tokens before they have both. Here a rough
version of both is written into the first two layers, and training refines it.
"""

import torch


def orthonormal(rows, columns, skip):
    """Returns random orthonormal rows that are zero in the first `skip` columns."""
    square = torch.linalg.qr(torch.randn(columns - skip, columns - skip))[0]
    return torch.cat([torch.zeros(rows, skip), square[:rows]], dim=1)


@torch.no_grad()
def install(net, scale=0.05):
    c = net.config
    half, dim = c.head_dim // 2, c.head_dim
    theta = c.rope_theta ** -(torch.arange(half).float() / half)

    # Column 0 of the embedding is the same for all tokens: a constant from
    # which a head can make queries and keys that depend on position only.
    table = net.model.embed_tokens.weight
    table.normal_(std=scale)
    table[:, 0] = 4 * scale

    # Heads 0 and 1 of layer 0 look one and two positions back. They use only the fast
    # rotary pairs, because slow ones cannot tell neighbours apart.
    first = net.model.layers[0].self_attn
    fast, gain = 8, 1.7
    first.k_proj.weight[:dim] *= 0.1
    first.k_proj.weight[:fast, 0] = gain
    for head in (0, 1):
        back, q = head + 1, first.q_proj.weight[head * dim:(head + 1) * dim]
        q *= 0.1
        q[:fast, 0] = gain * torch.cos(back * theta[:fast])
        q[half:half + fast, 0] = -gain * torch.sin(back * theta[:fast])
    read = orthonormal(dim, c.hidden_size, 1)
    mark = orthonormal(dim, c.hidden_size, 1)
    first.v_proj.weight[:dim] = read
    first.o_proj.weight[:, :dim] = scale * mark.T

    # Heads 0 and 2 of layer 1 (one per key/value head) find the mark that equals the
    # current token, and copy the token found there. They use only the slow rotary pairs,
    # because with fast ones the match would depend on the distance.
    second = net.model.layers[1].self_attn
    groups = c.num_attention_heads // c.num_key_value_heads
    slow, gain = 12, 2.0
    dims = torch.cat([torch.arange(half - slow, half), torch.arange(dim - slow, dim)])
    for kv in range(c.num_key_value_heads):
        head = kv * groups
        part = slice(kv * 2 * slow, (kv + 1) * 2 * slow)
        second.k_proj.weight[kv * dim:(kv + 1) * dim] *= 0.1
        second.k_proj.weight[kv * dim + dims] = gain * mark[part]
        second.q_proj.weight[head * dim:(head + 1) * dim] *= 0.1
        second.q_proj.weight[head * dim + dims] = gain * read[part]
        copy = orthonormal(dim, c.hidden_size, 1)
        second.v_proj.weight[kv * dim:(kv + 1) * dim] = copy
        second.o_proj.weight[:, head * dim:(head + 1) * dim] = 2 * scale * copy.T
