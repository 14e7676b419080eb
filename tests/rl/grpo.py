"""Group-relative policy optimization of the shipped model, in plain PyTorch on the CPU."""

import json
import os
import shutil
import sys
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from task import TRAINING

sys.path.insert(0, str(TRAINING))

from export import load, write_weights  # noqa: E402

CLIP = 0.2
MINIBATCH = 32
# bfloat16 weights, products in another order: more than this is another model, not another rounding.
LOGPROB_ERROR_MAX = 2e-3


def load_state(folder):
    return {name: tensor.float() for name, tensor in load_file(f"{folder}/model.safetensors").items()}


def rounded(model):
    """The weights as engines load them: those of the trainer in bfloat16."""
    state = model.state_dict()
    return {name: tensor.to(torch.bfloat16).float() for name, tensor in state.items()}


@dataclass
class Sample:
    """Tokens as the network reads them, the places of those that were sampled, and their log-probabilities."""

    ids: list
    places: list
    logprobs: list


class Policy:
    """The model that is trained, with its optimizer."""

    def __init__(self, folder, rate, seed):
        torch.manual_seed(seed)
        torch.use_deterministic_algorithms(True)
        self.source = folder
        self.model, self.tokenizer = load(folder)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)

    def save(self, folder):
        """Writes the weights as a model folder for engines, and takes them over as those see them."""
        os.makedirs(folder, exist_ok=True)
        for name in os.listdir(self.source):
            path = os.path.join(self.source, name)
            if os.path.isfile(path) and name != "model.safetensors":
                shutil.copy(path, folder)
        write_weights(folder, self.model.state_dict())
        return str(folder)

    def samples(self, rollout):
        """The samples of a rollout: here its one prompt with its output."""
        return [sample_of(rollout.prompt, rollout.tokens, rollout.logprobs)]

    def logprobs(self, rows):
        """Log-probabilities of the outputs of `rows`, which are pairs of prompt and output, one tensor each."""
        return self.sampled_logprobs([sample_of(prompt, output, None) for prompt, output in rows])

    def sampled_logprobs(self, samples):
        """Log-probabilities of the sampled tokens, one tensor for each sample."""
        ids = torch.zeros(len(samples), max(len(one.ids) for one in samples), dtype=torch.long)
        for at, one in enumerate(samples):
            ids[at, : len(one.ids)] = torch.tensor(one.ids)
        logits = self.model(ids[:, :-1])
        taken = F.log_softmax(logits.float(), -1).gather(2, ids[:, 1:, None]).squeeze(2)
        return [taken[at, torch.tensor(one.places, dtype=torch.long) - 1] for at, one in enumerate(samples)]

    def check(self, rollouts):
        """The largest difference between the engines' log-probabilities and those of the weights that they serve."""
        return self.check_samples([sample for one in rollouts for sample in self.samples(one)])

    def check_samples(self, samples):
        exact = self.model.state_dict()
        exact = {name: tensor.clone() for name, tensor in exact.items()}
        self.model.load_state_dict(rounded(self.model))
        worst = 0.0
        with torch.no_grad():
            for batch in batches(samples):
                for one, expected in zip(batch, self.sampled_logprobs(batch)):
                    worst = max(worst, (torch.tensor(one.logprobs) - expected).abs().max().item())
        self.model.load_state_dict(exact)
        return worst

    def improve(self, groups):
        """One pass over the rollouts of an epoch. Returns the mean loss."""
        trained = []
        for group in groups:
            rewards = torch.tensor([one.reward for one in group])
            if rewards.std() < 1e-6:
                continue  # Nothing is learnt where all answers are equally good.
            advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
            for one, advantage in zip(group, advantages.tolist()):
                trained += [(sample, advantage) for sample in self.samples(one)]
        losses = []
        for batch in batches(trained):
            self.optimizer.zero_grad()
            own = self.sampled_logprobs([one for one, _ in batch])
            tokens = sum(len(one.places) for one, _ in batch)
            loss = 0.0
            for new, (one, advantage) in zip(own, batch):
                ratio = (new - torch.tensor(one.logprobs)).exp()
                clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
                loss = loss - torch.minimum(ratio * advantage, clipped * advantage).sum() / tokens
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            losses.append(loss.item())
        return sum(losses) / max(len(losses), 1)


def sample_of(prompt, output, logprobs):
    return Sample(prompt + output, list(range(len(prompt), len(prompt) + len(output))), logprobs)


def batches(items):
    return (items[at : at + MINIBATCH] for at in range(0, len(items), MINIBATCH))


def report(path, value):
    with open(path, "w") as out:
        json.dump(value, out, indent=1)
