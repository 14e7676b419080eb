"""Generates a trace like that of an agent, from a seed: sessions of several turns,
groups of samples, and answers made of recurring phrases.

    python make_trace.py FILE [--seed 1] [--tasks 60]
"""

import argparse
import json
import random

VOCABULARY = 20000
SAMPLES = 4


class Stock:
    """Phrases of which a few are frequent and most are rare."""

    def __init__(self, rng):
        self.rng = rng
        self.phrases = [self.fresh() for _ in range(800)]

    def fresh(self):
        # The product of two uniform draws is skewed about as much as the frequency of tokens.
        return [int(VOCABULARY * self.rng.random() * self.rng.random())
                for _ in range(self.rng.randint(4, 24))]

    def phrase(self):
        if self.rng.random() < 0.25:
            return self.fresh()
        return self.phrases[int(len(self.phrases) * self.rng.random() ** 2)]

    def varied(self, phrases):
        """Another sample of the same answer."""
        return [self.phrase() if self.rng.random() < 0.2 else phrase for phrase in phrases]


def flat(phrases):
    return [token for phrase in phrases for token in phrase]


def trace(seed, tasks):
    """Yields one dictionary per call."""
    rng = random.Random(seed)
    stock = Stock(rng)
    system = flat(stock.phrase() for _ in range(40))
    for task in range(tasks):
        question = flat(stock.phrase() for _ in range(6))
        turns = [[stock.phrase() for _ in range(rng.randint(2, 10))]
                 for _ in range(rng.randint(2, 6))]
        for sample in range(SAMPLES):
            prompt = system + question
            for turn, answer in enumerate(turns):
                output = flat(stock.varied(answer))
                yield {
                    "workload": "generated", "session": f"task{task}/{sample}", "turn": turn,
                    "group": f"task{task}" if turn == 0 else None, "model": "none",
                    "prompt_token_ids": prompt, "output_token_ids": output,
                }
                prompt = prompt + output + flat([stock.phrase()])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tasks", type=int, default=60)
    args = parser.parse_args()
    with open(args.file, "w") as out:
        for call in trace(args.seed, args.tasks):
            out.write(json.dumps(call, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
