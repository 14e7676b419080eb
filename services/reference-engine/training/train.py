"""Trains the tiny model on the generated text for a fixed time on one CPU core.

    python train.py --minutes 60 --out ../model

Weights are kept in float32 and used in bfloat16. Muon trains the matrices inside
the layers; AdamW trains the embedding and the norms. With about ten million tokens
this reaches a lower loss than AdamW alone.
"""

import argparse
import os
import random
import time

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from export import load, train_tokenizer, write_static, write_weights
from generate import END, documents
from model import Config, Llama
from warmstart import install

IM_START, IM_END = 1, 2
# Prompts are mostly random names, which no model can predict. So their tokens
# count less than those of answers.
PROMPT_WEIGHT = 0.2


def weights_of(ids, header):
    """Returns one weight per token: 1 inside assistant turns, PROMPT_WEIGHT elsewhere."""
    out, i = [PROMPT_WEIGHT] * len(ids), 0
    while i < len(ids):
        after = i + 1 + len(header)
        if ids[i] == IM_START and ids[i + 1:after] == header:
            i = ids.index(IM_END, after)
            out[after:i + 1] = [1.0] * (i + 1 - after)
        i += 1
    return out


class Rows:
    """Packs whole documents into rows; every row begins with a document."""

    def __init__(self, tokenizer, seed, held_out=False):
        self.tokenizer = tokenizer
        self.stream = documents(seed, want_held_out=held_out)
        self.header = tokenizer.encode("assistant\n").ids
        self.end = tokenizer.token_to_id(END)
        self.rng = random.Random(seed)

    def drill(self, length):
        """Returns random tokens that are repeated. Only the repetitions count in the loss.
        All tasks here need copying from the prompt, and a model learns to copy
        sooner from such rows than from chats."""
        ids, weights = [], []
        while len(ids) <= length:
            part = [self.rng.randrange(3, Config.vocab_size) for _ in range(self.rng.randint(4, 64))]
            times = self.rng.randint(2, 4)
            ids += part * times + [self.end]
            weights += [0.0] * len(part) + [1.0] * (len(part) * (times - 1) + 1)
        return ids[:length + 1], weights[:length + 1]

    def row(self, length):
        ids, weights = [], []
        while len(ids) <= length:
            _, _, text = next(self.stream)
            more = self.tokenizer.encode(text).ids + [self.end]
            ids += more
            weights += weights_of(more, self.header)
        return ids[:length + 1], weights[:length + 1]

    def batch(self, rows, length, drills=0):
        pairs = [self.drill(length) if i < drills else self.row(length) for i in range(rows)]
        return (torch.tensor([p[0] for p in pairs]),
                torch.tensor([p[1][1:] for p in pairs]))


def loss_of(net, ids, weights):
    """Returns the mean loss over tokens drawn with their weight as probability. The
    output layer is not computed for tokens that are not drawn, which are most of the prompt."""
    kept = (torch.rand(weights.numel()) < weights.flatten()).nonzero()[:, 0]
    hidden = net.hidden(ids[:, :-1]).flatten(0, 1)[kept]
    return F.cross_entropy(net.head(hidden).float(), ids[:, 1:].flatten()[kept])


class Optimizer:
    """Updates float32 weights, and copies them to a bfloat16 model."""

    def __init__(self, net, rate, muon_rate, tables=("embed",)):
        """AdamW trains the norms and the matrices whose names contain one of `tables`. Muon
        trains the other matrices, unless `muon_rate` is 0."""
        self.net = list(net.parameters())
        self.master = [p.detach().float().clone().requires_grad_() for p in self.net]
        names = [name for name, _ in net.named_parameters()]
        is_table = [any(part in name for part in tables) for name in names]
        inner = [m for table, m in zip(is_table, self.master) if m.dim() == 2 and not table]
        table = [m for table, m in zip(is_table, self.master) if table]
        norms = [m for m in self.master if m.dim() == 1]
        self.parts = [
            torch.optim.AdamW([{"params": table, "weight_decay": 0.01}, {"params": norms}],
                              lr=rate, betas=(0.9, 0.98), weight_decay=0.0, eps=1e-6),
        ]
        if muon_rate:
            self.parts.append(torch.optim.Muon(inner, lr=muon_rate, weight_decay=0.1,
                                               momentum=0.95, nesterov=True))
        else:
            self.parts[0].add_param_group({"params": inner, "weight_decay": 0.1})
        self.base = [[g["lr"] for g in part.param_groups] for part in self.parts]

    def step(self, factor):
        for m, p in zip(self.master, self.net):
            m.grad, p.grad = p.grad.float(), None
        norm = torch.nn.utils.clip_grad_norm_(self.master, 1.0)
        for part, base in zip(self.parts, self.base):
            for group, rate in zip(part.param_groups, base):
                group["lr"] = rate * factor
            part.step()
        with torch.no_grad():
            for m, p in zip(self.master, self.net):
                p.copy_(m)
        return float(norm)


def schedule(done, warm=0.01, decay=0.45, floor=0.02):
    """Returns the factor of the learning rates: it rises, stays, and falls linearly.
    `done` is the share of time used."""
    if done < warm:
        return max(done, 0.0005) / warm
    return 1.0 if done < 1 - decay else max(floor, (1 - done) / decay)


def shape(rng, done, tokens):
    """Returns the number of rows of the next step, their length, and the number of copy
    drills among them. Early steps are small, with short rows. Some later rows are long."""
    if done < 0.4:
        rows = tokens // 1024
        return rows, 512, 1 if done < 0.15 else 0
    length = 512
    if done > 0.55:
        length = rng.choice([512] * 4 + [1024] * 3 + [2048] * 2 + [4096])
    return max(1, tokens // length), length, 0


def save(folder, net, optimizer):
    names = [name for name, _ in net.named_parameters()]
    write_weights(folder, dict(zip(names, optimizer.master)))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--out", default="../model")
    parser.add_argument("--seed", type=int, default=2024)
    parser.add_argument("--tokens", type=int, default=4096, help="tokens per step, half of it early on")
    parser.add_argument("--rate", type=float, default=2e-3, help="AdamW peak")
    parser.add_argument("--muon-rate", type=float, default=0.02, help="0: AdamW for all")
    parser.add_argument("--save-every", type=float, default=5, help="minutes")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--resume", action="store_true",
                        help="go on from the weights in --out: the second half of the schedule, on other text")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    os.makedirs(args.out, exist_ok=True)
    vocabulary = os.path.join(args.out, "tokenizer.json")
    # An existing tokenizer is kept, because other files depend on its ids.
    tokenizer = Tokenizer.from_file(vocabulary) if os.path.exists(vocabulary) else train_tokenizer()
    write_static(args.out, tokenizer)

    if args.resume:
        args.seed += 1
        net = load(args.out)[0].train()
    else:
        net = Llama(Config())
        install(net)
    net = net.to(torch.bfloat16)
    optimizer = Optimizer(net, args.rate, args.muon_rate)
    rows, rng = Rows(tokenizer, args.seed), random.Random(args.seed)
    check = Rows(tokenizer, 1, held_out=True).batch(12, 1024)

    start = saved = time.time()
    budget, tokens, step, mean = args.minutes * 60, 0, 0, None
    first = 0.5 if args.resume else 0.0
    while (done := first + (1 - first) * (time.time() - start) / budget) < 1:
        ids, weights = rows.batch(*shape(rng, done, args.tokens))
        loss = loss_of(net, ids, weights)
        loss.backward()
        # After a restart the optimizer has no momentum, so it needs a warm-up of its own.
        warm = min(1.0, 0.05 + (done - first) / 0.01) if args.resume else 1.0
        norm = optimizer.step(schedule(done) * warm)
        step, tokens = step + 1, tokens + ids[:, 1:].numel()
        mean = loss.item() if mean is None else 0.95 * mean + 0.05 * loss.item()
        if step % 20 == 0:
            spent = time.time() - start
            print(f"step {step} tokens {tokens} loss {mean:.4f} norm {norm:.2f} "
                  f"minutes {spent / 60:.1f} tokens/s {tokens / spent:.0f}", flush=True)
        if time.time() - saved > args.save_every * 60:
            saved = time.time()
            save(args.out, net, optimizer)
            with torch.no_grad():
                print(f"held-out {loss_of(net, *check).item():.4f}", flush=True)
    save(args.out, net, optimizer)
    with torch.no_grad():
        print(f"done: tokens {tokens} held-out {loss_of(net, *check).item():.4f}", flush=True)


if __name__ == "__main__":
    main()
