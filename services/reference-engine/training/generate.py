"""Seeded generator of the chat text that the tiny model learns.

Nothing is downloaded. One in fifty documents, picked by a hash of its text, is
held out, so that no held-out document can also occur in the training stream.

    python generate.py --count 3 --seed 7            # show documents
    python generate.py --count 3 --kind sql          # of one kind
"""

import argparse
import hashlib
import random

from gen_code import code
from gen_sql import sql
from gen_text import math, prose, records
from gen_tools import agent, long_agent, tools

END = "<|endoftext|>"

# (kind, maker, share of documents). Long kinds get a small share of documents
# because each of them holds several times as many tokens.
KINDS = [
    ("sql", sql, 0.28),
    ("tools", tools, 0.22),
    ("code", code, 0.16),
    ("agent", agent, 0.08),
    ("long_agent", long_agent, 0.015),
    ("records", records, 0.10),
    ("math", math, 0.08),
    ("prose", prose, 0.10),
]
MAKERS = {name: maker for name, maker, _ in KINDS}


def render(messages, generation_prompt=False):
    """Returns ChatML, byte for byte as the chat template writes it."""
    text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    return text + ("<|im_start|>assistant\n" if generation_prompt else "")


def held_out(text):
    return hashlib.sha1(text.encode()).digest()[0] * 50 < 256


def documents(seed, kind=None, want_held_out=False):
    """Yields (kind, messages, text) without end, from one seed and one side of the split."""
    rng = random.Random(seed)
    names = [name for name, _, _ in KINDS]
    shares = [share for _, _, share in KINDS]
    while True:
        name = kind or rng.choices(names, shares)[0]
        messages = MAKERS[name](rng)
        text = render(messages)
        if held_out(text) == want_held_out:
            yield name, messages, text


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kind", choices=list(MAKERS))
    parser.add_argument("--held-out", action="store_true")
    args = parser.parse_args()
    stream = documents(args.seed, args.kind, args.held_out)
    for _ in range(args.count):
        print(next(stream)[2] + END)


if __name__ == "__main__":
    main()
