"""Greedy decoding, held-out scores by kind, and the fixture for engine tests.

    python sample.py demo --model ../model
    python sample.py eval --model ../model
    python sample.py golden --model ../model

Everything is computed in float32 from the saved 16-bit weights.
"""

import argparse
import json
import os

import torch
import torch.nn.functional as F

from export import load
from generate import END, KINDS, documents, render
from model import rotate
from train import PROMPT_WEIGHT, weights_of

IM_END = 2
# How the answers begin that exact() compares. It takes the last such answer of a chat.
# The last call of an agent is always the same and easy, so its last edit is compared.
COMPARED_ANSWERS = {"tools": "{", "agent": '{"name": "edit_file"', "long_agent": '{"name": "edit_file"'}

SHOP = """CREATE TABLE customers (
  id INTEGER PRIMARY KEY,
  name TEXT,
  country TEXT,
  age INTEGER
);
CREATE TABLE orders (
  id INTEGER PRIMARY KEY,
  customer_id INTEGER REFERENCES customers(id),
  status TEXT,
  amount INTEGER,
  created_at DATE
);"""
TOOLS = """You can call these tools:
{"name": "get_weather", "parameters": {"city": "string", "days": "integer"}}
{"name": "set_light", "parameters": {"room": "string", "level": "integer"}}
To call a tool, answer with one JSON object: {"name": ..., "arguments": {...}}"""
FILE = """src/prices.py
```python
def load_prices(source):
    total = 0
    for item in source:
        total += item * 12
    return total
```

"""
DEMOS = {
    "sql": [("system", "You write SQL. Answer with one statement."),
            ("user", SHOP + "\n\nShow the status and amount of the 5 orders with the highest amount.")],
    "sql_join": [("system", "You write SQL. Answer with one statement."),
                 ("user", SHOP + "\n\nShow the amount of each order with the name of its customer.")],
    "tool": [("system", TOOLS), ("user", "What is the weather in Lisbon for 3 days?")],
    "tool_result": [("system", TOOLS), ("user", "What is the weather in Lisbon for 3 days?"),
                    ("assistant", '{"name": "get_weather", "arguments": {"city": "Lisbon", "days": 3}}'),
                    ("tool", '{"city": "Lisbon", "temperature": 21, "sky": "sun"}')],
    "edit": [("system", "You edit code. Answer with SEARCH/REPLACE blocks."),
             ("user", FILE + "Rename the variable total to price_sum in load_prices.")],
    "table": [("user", "Convert this to JSON:\ncity,population,rating\nOslo,700,8\nLima,1000,7\nCairo,2000,9")],
    "sum": [("user", "What is 347 + 286?")],
    "about": [("user", "What is Refrain?")],
}


def messages_of(pairs):
    return [{"role": role, "content": content} for role, content in pairs]


class Decoder:
    """A sequence with a key/value cache. feed() returns the logits of the new tokens."""

    def __init__(self, net):
        self.net, self.keys, self.values, self.at = net, {}, {}, 0

    @torch.no_grad()
    def feed(self, ids):
        c, n = self.net.config, len(ids)
        x = self.net.model.embed_tokens(torch.tensor(ids))
        cos, sin = (t[self.at:self.at + n] for t in self.net.rope)
        seen = torch.arange(self.at + n)[None] <= torch.arange(self.at, self.at + n)[:, None]
        for i, layer in enumerate(self.net.model.layers):
            a, y = layer.self_attn, layer.input_layernorm(x)
            q, k, v = (p(y).view(n, -1, c.head_dim).transpose(0, 1)
                       for p in (a.q_proj, a.k_proj, a.v_proj))
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
            if self.at:
                k = torch.cat([self.keys[i], k], 1)
                v = torch.cat([self.values[i], v], 1)
            self.keys[i], self.values[i] = k, v
            groups = c.num_attention_heads // c.num_key_value_heads
            k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
            scores = (q @ k.transpose(1, 2)) * c.head_dim ** -0.5
            y = scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v
            x = x + a.o_proj(y.transpose(0, 1).reshape(n, -1))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        self.at += n
        return self.net.head(x)


def greedy(net, ids, limit=256, stop=True):
    """Returns the most likely next tokens up to <|im_end|>, and the logits after the prompt."""
    decoder = Decoder(net)
    first = logits = decoder.feed(ids)[-1]
    out = []
    while len(out) < limit and decoder.at < net.config.max_position_embeddings:
        token = int(logits.argmax())
        if stop and token == IM_END:
            break
        out.append(token)
        logits = decoder.feed([token])[-1]
    return out, first


def demo(net, tokenizer):
    for name, pairs in DEMOS.items():
        prompt = render(messages_of(pairs), generation_prompt=True)
        out, _ = greedy(net, tokenizer.encode(prompt).ids)
        print(f"--- {name}\n{pairs[-1][1]}\n>>>\n{tokenizer.decode(out)}\n")


@torch.no_grad()
def score(net, tokenizer, kind, want_tokens):
    """Returns the summed losses and the counts of held-out tokens, each for all tokens and
    for those of answers."""
    header = tokenizer.encode("assistant\n").ids
    totals, counts = [0.0, 0.0], [0, 0]
    for _, _, text in documents(99, kind, want_held_out=True):
        ids = tokenizer.encode(text + END).ids
        weights = torch.tensor(weights_of(ids, header)[1:])
        ids = ids[:net.config.max_position_embeddings]
        each = F.cross_entropy(net(torch.tensor([ids[:-1]]))[0], torch.tensor(ids[1:]),
                               reduction="none")
        answer = weights[:len(each)] > PROMPT_WEIGHT
        for i, part in enumerate((each, each[answer])):
            totals[i] += part.sum().item()
            counts[i] += part.numel()
        if counts[0] >= want_tokens:
            return totals, counts


def exact(net, tokenizer, kind, want):
    """Returns the share of held-out answers that greedy decoding writes exactly, and the
    share of JSON answers that parse, which is None for a kind without JSON."""
    right = asked = parsed = json_asked = 0
    for _, messages, _ in documents(77, kind, want_held_out=True):
        turn = max(i for i, m in enumerate(messages) if m["role"] == "assistant"
                   and m["content"].startswith(COMPARED_ANSWERS.get(kind, "")))
        prompt = tokenizer.encode(render(messages[:turn], generation_prompt=True)).ids
        out, _ = greedy(net, prompt, limit=400)
        text, expected = tokenizer.decode(out), messages[turn]["content"]
        asked += 1
        right += text == expected
        if expected[0] in "{[":
            json_asked += 1
            try:
                json.loads(text)
                parsed += 1
            except ValueError:
                pass
        if asked == want:
            return right / asked, parsed / json_asked if json_asked else None


def evaluate(net, tokenizer, want_tokens, want_answers):
    totals, counts = [0.0, 0.0], [0, 0]
    print("| kind | loss, all | loss, answers | perplexity, answers | exact answers | JSON parses |")
    print("|---|---|---|---|---|---|")
    for kind, _, _ in KINDS:
        t, n = score(net, tokenizer, kind, want_tokens)
        right, parsed = exact(net, tokenizer, kind, want_answers)
        totals = [a + b for a, b in zip(totals, t)]
        counts = [a + b for a, b in zip(counts, n)]
        loss = [a / b for a, b in zip(t, n)]
        parses = "-" if parsed is None else f"{parsed:.0%}"
        print(f"| {kind} | {loss[0]:.3f} | {loss[1]:.4f} | {2.718281828 ** loss[1]:.3f} "
              f"| {right:.0%} | {parses} |", flush=True)
    loss = [a / b for a, b in zip(totals, counts)]
    print(f"| all | {loss[0]:.3f} | {loss[1]:.4f} | {2.718281828 ** loss[1]:.3f} | | |")


def golden(net, tokenizer, folder):
    cases = []
    for name in ("sql", "tool", "sum"):
        text = render(messages_of(DEMOS[name]), generation_prompt=True)
        ids = tokenizer.encode(text).ids
        out, logits = greedy(net, ids, limit=16, stop=False)
        # The cache must not change the result, so it is compared with a pass without one.
        with torch.no_grad():
            plain = net(torch.tensor([ids]))[0, -1]
        assert torch.allclose(plain, logits, atol=1e-3) and int(plain.argmax()) == out[0]
        cases.append({
            "name": name, "text": text, "ids": ids,
            "first_logits": [round(x, 5) for x in plain[:5].tolist()],
            "argmax": int(plain.argmax()), "next_ids": out, "next_text": tokenizer.decode(out),
        })
    with open(os.path.join(folder, "golden.json"), "w") as handle:
        json.dump({"dtype": "float32", "weights": "model.safetensors", "cases": cases}, handle, indent=1)
        handle.write("\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["demo", "eval", "golden"])
    parser.add_argument("--model", default="../model")
    parser.add_argument("--tokens", type=int, default=20000, help="held-out tokens per kind")
    parser.add_argument("--answers", type=int, default=25, help="held-out answers per kind")
    args = parser.parse_args()
    torch.set_num_threads(1)
    net, tokenizer = load(args.model)
    if args.what == "demo":
        demo(net, tokenizer)
    elif args.what == "eval":
        evaluate(net, tokenizer, args.tokens, args.answers)
    else:
        golden(net, tokenizer, args.model)


if __name__ == "__main__":
    main()
