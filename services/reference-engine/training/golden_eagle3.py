"""Writes what the saved EAGLE-3 head guesses, as a fixture for the engine's tests.

    OMP_NUM_THREADS=1 python golden_eagle3.py --model ../model --head ../model/eagle3

It reads the texts from golden.json of the model, and writes golden.json beside the head.
For each text this file has the greedy chain of four guesses, each with its log-probability
over the draft vocabulary and the five likeliest tokens. The code of the training computes
them in float32 from the saved weights.
"""

import argparse
import json
import os

import torch

from eagle3 import captured
from export import load, write_json
from train_eagle3 import load_head

DEPTH = 4
TOP = 5


def case(net, head, draft_ids, name, text):
    """Returns the guesses after `text`, of which the target has computed all tokens but the last."""
    guesses = []
    for depth in range(DEPTH):
        # The rows of the chain read the guesses. The two tokens after them are masked.
        ids = torch.tensor([text + [guess["token"] for guess in guesses] + [0] * 2])
        features, _ = captured(net, ids)
        slots = torch.tensor([[len(text) - 2]])
        logits = head.unroll(net, ids, features, slots, depth + 1)[depth, 0, 0]
        best = logits.log_softmax(-1).topk(TOP)
        top = [[draft_ids[i], round(p, 6)] for p, i in zip(best.values.tolist(), best.indices.tolist())]
        guesses.append({"token": top[0][0], "logprob": top[0][1], "top": top})
    return {"name": name, "ids": text, "guesses": guesses}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="../model")
    parser.add_argument("--head", default="../model/eagle3")
    args = parser.parse_args()
    net, _ = load(args.model)
    head, draft_ids = load_head(args.head, net)
    with open(os.path.join(args.model, "golden.json")) as handle:
        texts = json.load(handle)["cases"]
    cases = []
    with torch.no_grad():
        for text in texts:
            # One case is at the beginning of an answer, and one in the middle.
            for answered in (0, 6):
                ids = text["ids"] + text["next_ids"][:answered + 1]
                cases.append(case(net, head, draft_ids, f"{text['name']} + {answered}", ids))
    write_json(args.head, "golden.json", {"dtype": "float32", "depth": DEPTH, "cases": cases})


if __name__ == "__main__":
    main()
