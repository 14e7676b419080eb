"""Compares log-probabilities of a trainer's samples with the forward passes of the weights that sampled them."""

import torch
from grpo import batches, load_state, rounded

# The mesh has the other processors.
torch.set_num_threads(1)


class Weights:
    """The folders of all versions so far, by the name that the engines give them."""

    def __init__(self, policy, first):
        self.policy = policy
        self.folders = {"default": first}

    def save(self, folder, version):
        self.folders[str(version)] = self.policy.save(folder)
        return self.folders[str(version)]

    def difference(self, samples):
        """The largest difference and the number of tokens compared.

        A sample is a prompt, an output, its log-probabilities, and spans: start, end and version.
        """
        worst, count = 0.0, 0
        kept = {name: tensor.clone() for name, tensor in self.policy.model.state_dict().items()}
        for version, folder in self.folders.items():
            with_it = [one for one in samples if any(span[2] == version and span[1] > span[0] for span in one[3])]
            if not with_it:
                continue
            self.policy.model.load_state_dict(load_state(folder))
            self.policy.model.load_state_dict(rounded(self.policy.model))
            with torch.no_grad():
                for batch in batches(with_it):
                    own = self.policy.logprobs([(prompt, output) for prompt, output, _, _ in batch])
                    for (_, _, given, spans), expected in zip(batch, own):
                        for start, end, of in spans:
                            if of == version and end > start:
                                gap = (torch.tensor(given[start:end]) - expected[start:end]).abs().max().item()
                                worst, count = max(worst, gap), count + end - start
        self.policy.model.load_state_dict(kept)
        return worst, count
