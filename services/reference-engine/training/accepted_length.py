"""Measures the accepted length of the EAGLE-3 head on held-out prompts, on a running mesh.

    cargo run --release -- up &
    python accepted_length.py

Every request sets `speculation: eagle3`. The accepted length is the mean number of tokens
that a step emits, the target's own included. The mesh has the settings of the draft
(depth, top_k and so on).
"""

import argparse
import json
import urllib.request

from generate import KINDS, documents
from sample import COMPARED_ANSWERS


def prompts(kind, count):
    """Yields the messages of held-out documents, up to the answer that `sample.py eval` compares."""
    for _, messages, _ in documents(77, kind, want_held_out=True):
        turn = max(i for i, m in enumerate(messages) if m["role"] == "assistant"
                   and m["content"].startswith(COMPARED_ANSWERS.get(kind, "")))
        yield messages[:turn]
        count -= 1
        if not count:
            return


def ask(args, messages, temperature, seed):
    body = {"model": args.model, "messages": messages, "temperature": temperature, "seed": seed,
            "max_tokens": 200, "speculation": "eagle3"}
    request = urllib.request.Request(
        args.url + "/v1/chat/completions", json.dumps(body).encode(),
        {"authorization": f"Bearer {args.key}", "content-type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        spec = json.load(answer)["metrics"]["speculative_decoding"]
    return spec["by_source"].get("eagle3", {"steps": 0, "drafted": 0, "accepted": 0, "emitted": 0})


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--key", default="refrain-dev")
    parser.add_argument("--model", default="refrain-tiny")
    parser.add_argument("--count", type=int, default=25, help="prompts per kind")
    args = parser.parse_args()
    print("| kind | accepted length, T=0 | T=1 | acceptance rate, T=0 | T=1 |")
    print("|---|---|---|---|---|")
    totals = {0: [0, 0, 0, 0], 1: [0, 0, 0, 0]}

    def row(kind, sums):
        length = [f"{emitted / max(steps, 1):.2f}" for steps, _, _, emitted in sums]
        rate = [f"{accepted / max(drafted, 1):.2f}" for _, drafted, accepted, _ in sums]
        print(f"| {kind} | {length[0]} | {length[1]} | {rate[0]} | {rate[1]} |", flush=True)

    for kind, _, _ in KINDS:
        sums = []
        for temperature in (0, 1):
            counts = [ask(args, messages, temperature, seed)
                      for seed, messages in enumerate(prompts(kind, args.count))]
            sums.append([sum(c[k] for c in counts) for k in ("steps", "drafted", "accepted", "emitted")])
            totals[temperature] = [a + b for a, b in zip(totals[temperature], sums[-1])]
        row(kind, sums)
    row("all", [totals[0], totals[1]])


if __name__ == "__main__":
    main()
