"""Trains the EAGLE-3 head of a finished model for a fixed time on one CPU core.

    python train_eagle3.py --minutes 60 --model ../model --out ../model/eagle3

The target is not changed. Its hidden states and distributions are computed from the
generated text during training. Like the target, the head is kept in float32 and used in
bfloat16, and Muon trains its matrices.
"""

import argparse
import collections
import json
import os
import time

import torch
from safetensors.torch import load_file, save_file

from eagle3 import CAPTURED, DRAFT_VOCAB, INTERMEDIATE, Eagle3, captured, losses
from export import load, write_json
from train import Optimizer, Rows, schedule

STEPS = 6
# Weight of each guess relative to the one before. A later guess is of use only if all
# earlier ones are right, so it counts less.
STEP_WEIGHT = 0.85


def draft_vocabulary(rows, size, count=1500):
    """Returns the ids of the most frequent tokens of answers, in ascending order. Special
    tokens are always among them."""
    seen = collections.Counter({0: 1 << 40, 1: 1 << 40, 2: 1 << 40})
    for _ in range(count):
        ids, weights = rows.row(512)
        for token, weight in zip(ids, weights):
            seen[token] += 20 if weight == 1.0 else 1
    return sorted(token for token, _ in seen.most_common(size))


def choose_slots(weights, count, steps):
    """Draws `count` positions per row. The odds of a position are the weight of the token
    that is guessed first from it."""
    odds = weights[:, 1:weights.shape[1] - steps + 1].clamp(min=1e-4)
    return torch.multinomial(odds, count)


class Batches:
    """Rows of text, with the distributions that the target gives for them."""

    def __init__(self, net, tokenizer, seed, draft_ids, held_out=False):
        self.net, self.rows = net, Rows(tokenizer, seed, held_out)
        self.draft_ids = torch.tensor(draft_ids)
        self.in_draft = torch.zeros(net.config.vocab_size, dtype=torch.bool)
        self.in_draft[self.draft_ids] = True

    @torch.no_grad()
    def next(self, rows, length, slots, steps):
        ids, weights = self.rows.batch(rows, length)
        features, last = captured(self.net, ids)
        slots = choose_slots(weights, slots, steps)
        # Guess s of slot i is the token at i + 2 + s, which the target predicts at i + 1 + s.
        predicted_at = torch.stack([slots + 1 + s for s in range(steps)])
        flat = (torch.arange(rows)[None, :, None] * ids.shape[1] + predicted_at).flatten()
        used, place = flat.unique(return_inverse=True)
        logits = self.net.head(last.flatten(0, 1)[used]).float()
        best = self.in_draft[logits.argmax(-1)]
        target = logits[:, self.draft_ids].softmax(-1)
        shape = predicted_at.shape
        return (ids, features, slots, target[place].unflatten(0, shape), best[place].unflatten(0, shape))


def loss_of(net, head, batch, steps):
    """Returns the loss, and for each step the share of slots whose guesses are all right up to
    this one. A guess counts only if the target's token is in the draft vocabulary."""
    ids, features, slots, target, in_draft = batch
    logits = head.unroll(net, ids, features, slots, steps)
    each = losses(logits, target) * in_draft
    scale = torch.tensor([STEP_WEIGHT ** s for s in range(steps)])[:, None, None]
    loss = (each * scale).sum() / (in_draft * scale).sum()
    right = (logits.argmax(-1) == target.argmax(-1)) & in_draft
    return loss, right.int().cumprod(0).float().mean((1, 2))


def summary(loss, right):
    """Returns a line of text. Its `chain` is the mean number of tokens of a step that verifies
    all guesses, the target's own token included."""
    shares = " ".join(f"{share:.3f}" for share in right.tolist())
    return f"{loss:.4f} chain {1 + right.sum().item():.3f} right [{shares}]"


def config_of(net):
    c = net.config
    return {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "torch_dtype": "bfloat16",
        "hidden_size": c.hidden_size, "target_hidden_size": c.hidden_size,
        "intermediate_size": INTERMEDIATE, "num_hidden_layers": 1,
        "num_attention_heads": c.num_attention_heads, "num_key_value_heads": c.num_key_value_heads,
        "head_dim": c.head_dim, "max_position_embeddings": c.max_position_embeddings,
        "rms_norm_eps": c.rms_norm_eps, "rope_theta": c.rope_theta, "hidden_act": "silu",
        "vocab_size": c.vocab_size, "draft_vocab_size": DRAFT_VOCAB, "tie_word_embeddings": False,
        "bos_token_id": 0, "eos_token_id": 2,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": CAPTURED, "use_aux_hidden_state": True},
    }


def save(folder, net, draft_ids, state):
    """Writes config.json and model.safetensors in the layout of published heads."""
    os.makedirs(folder, exist_ok=True)
    write_json(folder, "config.json", config_of(net))
    tensors = {k: v.detach().to(torch.bfloat16).contiguous().clone() for k, v in state.items()}
    ids = torch.tensor(draft_ids)
    tensors["d2t"] = ids - torch.arange(len(draft_ids))
    tensors["t2d"] = torch.zeros(net.config.vocab_size, dtype=torch.bool)
    tensors["t2d"][ids] = True
    path = os.path.join(folder, "model.safetensors")
    save_file(tensors, path + ".part", metadata={"format": "pt"})
    os.chmod(path + ".part", 0o644)
    os.replace(path + ".part", path)


def load_head(folder, net):
    """Returns the head and the ids of its draft vocabulary, as `save` wrote them."""
    tensors = load_file(os.path.join(folder, "model.safetensors"))
    draft_ids = (tensors.pop("d2t") + torch.arange(DRAFT_VOCAB)).tolist()
    tensors.pop("t2d")
    head = Eagle3(net.config, len(draft_ids))
    head.load_state_dict({k: v.float() for k, v in tensors.items()})
    return head, draft_ids


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--model", default="../model")
    parser.add_argument("--out", default="../model/eagle3")
    parser.add_argument("--seed", type=int, default=3024)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--slots", type=int, default=160, help="per row")
    parser.add_argument("--rate", type=float, default=1e-3, help="AdamW peak")
    parser.add_argument("--muon-rate", type=float, default=0.02)
    parser.add_argument("--resume", action="store_true", help="go on from the head in --out")
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    net, tokenizer = load(args.model)
    net = net.to(torch.bfloat16).requires_grad_(False)
    if args.resume:
        head, draft_ids = load_head(args.out, net)
    else:
        draft_ids = draft_vocabulary(Rows(tokenizer, args.seed), DRAFT_VOCAB)
        head = Eagle3(net.config, DRAFT_VOCAB)
        head.start_from(net, torch.tensor(draft_ids))
    head = head.to(torch.bfloat16)
    optimizer = Optimizer(head, args.rate, args.muon_rate, tables=("lm_head",))
    batches = Batches(net, tokenizer, args.seed + 1, draft_ids)
    check = Batches(net, tokenizer, 5, draft_ids, held_out=True).next(24, 512, 192, STEPS)
    print(f"parameters {sum(p.numel() for p in head.parameters())} "
          f"in draft vocabulary {check[4].float().mean().item():.4f}", flush=True)

    start = saved = time.time()
    budget, step, mean, rates = args.minutes * 60, 0, None, None
    while (done := (time.time() - start) / budget) < 1:
        batch = batches.next(args.rows, args.length, args.slots, STEPS)
        loss, right = loss_of(net, head, batch, STEPS)
        loss.backward()
        norm = optimizer.step(schedule(done))
        step += 1
        mean = loss.item() if mean is None else 0.95 * mean + 0.05 * loss.item()
        rates = right if rates is None else 0.95 * rates + 0.05 * right
        if step % 25 == 0:
            spent = time.time() - start
            print(f"step {step} {summary(mean, rates)} norm {norm:.2f} minutes {spent / 60:.1f} "
                  f"tokens/s {step * args.rows * args.length / spent:.0f}", flush=True)
        if time.time() - saved > 240 or done + 25 / budget > 1 and time.time() - saved > 60:
            saved = time.time()
            names = [name for name, _ in head.named_parameters()]
            save(args.out, net, draft_ids, dict(zip(names, optimizer.master)))
            with torch.no_grad():
                loss, right = loss_of(net, head, check, STEPS)
            print(f"held-out {summary(loss.item(), right)}", flush=True)
    names = [name for name, _ in head.named_parameters()]
    save(args.out, net, draft_ids, dict(zip(names, optimizer.master)))
    with torch.no_grad():
        loss, right = loss_of(net, head, check, STEPS)
    print(f"done: steps {step} tokens {step * args.rows * args.length} held-out {summary(loss.item(), right)}")


if __name__ == "__main__":
    main()
