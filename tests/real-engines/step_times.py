"""Measures the time of a Llama step on this machine's GPU, by the number of tokens that it verifies.

    python3 step_times.py [--config config.json]

The default is Llama-3.1-8B, which needs torch and a GPU of 24 GB. No engine can be faster: a step is a forward pass
over batch x (1 + draft) tokens in bfloat16, as one CUDA graph, without any work on the host. It reads `--context`
tokens of KV per request, has random weights, and includes logits and argmax. Times are medians of `--repeat` replays.
"""

import argparse
import json
import pathlib
import statistics

import torch
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

LLAMA_8B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 128256,
}  # fmt: skip
BATCHES = (1, 16, 64)
DRAFTS = (0, 4, 8, 16)
# Counts of tokens around the sizes where matrix products get slower in steps, for one request.
TOKENS = (
    1, 8, 16, 32, 64, 65, 96, 128, 129, 160, 192, 193, 224, 256, 257, 320, 321, 384, 385, 448, 512, 513, 640, 768, 1024, 1088,
)  # fmt: skip
HEAD = 128


class Model:
    def __init__(self, config):
        def random(*size):
            return torch.randn(size, device="cuda", dtype=torch.bfloat16) * size[-1] ** -0.5

        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        wide, deep = config["hidden_size"], config["intermediate_size"]
        heads = self.heads + 2 * self.kv_heads
        self.embedding, self.head = random(config["vocab_size"], wide), random(config["vocab_size"], wide)
        self.layers = [
            (random(heads * HEAD, wide), random(wide, self.heads * HEAD), random(2 * deep, wide), random(wide, deep))
            for _ in range(config["num_hidden_layers"])
        ]
        self.cos = torch.randn(HEAD, device="cuda", dtype=torch.bfloat16)

    def step(self, tokens, keys, values):
        """Shapes: `tokens` is batch, each; `keys` and `values` are layers, batch, KV heads, context, head."""
        batch, each = tokens.shape
        x = self.embedding[tokens]
        group = self.heads // self.kv_heads
        for at, (qkv, out, up, down) in enumerate(self.layers):
            heads = linear(rms_norm(x, x.shape[-1:]), qkv).view(batch, each, -1, HEAD)
            heads = torch.addcmul(heads, heads.flip(-1), self.cos)
            query, key, value = heads.split((self.heads, self.kv_heads, self.kv_heads), dim=2)
            keys[at][:, :, -each:] = key.transpose(1, 2)
            values[at][:, :, -each:] = value.transpose(1, 2)
            # Heads that share keys are adjacent, so that the keys are read once. The mask costs hardly anything, and
            # is left out.
            query = query.view(batch, each, self.kv_heads, group, HEAD).permute(0, 2, 3, 1, 4)
            query = query.reshape(batch, self.kv_heads, group * each, HEAD)
            seen = scaled_dot_product_attention(query, keys[at], values[at])
            seen = seen.view(batch, self.kv_heads, group, each, HEAD).permute(0, 3, 1, 2, 4).reshape(batch, each, -1)
            x = x + linear(seen, out)
            gate, other = linear(rms_norm(x, x.shape[-1:]), up).chunk(2, dim=-1)
            x = x + linear(silu(gate) * other, down)
        return linear(rms_norm(x, x.shape[-1:]), self.head).argmax(-1)


@torch.inference_mode()
def step_ms(model, batch, each, context, repeat):
    tokens = torch.randint(0, model.head.shape[0], (batch, each), device="cuda")
    size = (len(model.layers), batch, model.kv_heads, context + each, HEAD)
    keys, values = (torch.randn(size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            model.step(tokens, keys, values)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model.step(tokens, keys, values)
    took = []
    for _ in range(repeat + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        took.append(begin.elapsed_time(end))
    return statistics.median(took[3:])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=pathlib.Path)
    parser.add_argument("--context", type=int, default=500)
    parser.add_argument("--repeat", type=int, default=20)
    options = parser.parse_args()
    config = json.loads(options.config.read_text()) if options.config else LLAMA_8B
    print(torch.cuda.get_device_name(), "torch", torch.__version__, flush=True)
    model = Model(config)
    print("batch draft tokens     ms", flush=True)
    for batch in BATCHES:
        for draft in DRAFTS:
            took = step_ms(model, batch, 1 + draft, options.context, options.repeat)
            print(f"{batch:5} {draft:5} {batch * (1 + draft):6} {took:6.2f}", flush=True)
    for context in (500, 4000, 16000):
        print(f"context {context:6}: 16 requests {step_ms(model, 16, 1, context, options.repeat):.2f} ms", flush=True)
    for count in TOKENS:
        print(f"tokens {count:5} of one request {step_ms(model, 1, count, options.context, options.repeat):.2f} ms", flush=True)


if __name__ == "__main__":
    main()
