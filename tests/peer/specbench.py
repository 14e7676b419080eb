"""Replays Spec-Bench as SuffixGPU published it, through Refrain and the peer,
arctic-inference's suffix cache. Use tests/peer/run, which sets both up.

    tests/peer/run specbench QUESTIONS.jsonl TOKENIZER.model [--batches 32,128,256,512]

QUESTIONS.jsonl is data/spec_bench/question.jsonl of the repository hemingkx/Spec-Bench, and
TOKENIZER.model is llama3/tokenizer.model of the Python package llama-models. As in
SuffixGPU's RESULTS.md (repository zip95297/SuffixGPU, 0be01a1), the reference answers of
three categories take the place of a model's output. All questions of a category run at
once: first cold, then again with the answers of the first time remembered. Drafts are
chains of at most 16 tokens, the factor is 2, the depth 24, and the least probability 0.1.
A last row is Refrain as it is shipped: with trees, its router, and its own alpha, on a
modelled H100.

The second table has the time of all drafts of a step with so many requests, warm. Both
sides make them one after the other, and nothing else runs meanwhile. The published times
are from another machine.
"""

import argparse
import json
import os
import re
import sys

import tiktoken
from tiktoken.load import load_tiktoken_bpe

from compare import HERE, log, run_json

# As llama-models and the tokenizer's own file have it.
PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
           r"|\s*[\r\n]+|\s+(?!\S)|\s+")
# Tokens a step, cold and warm: arctic-inference 0.1.1 and SuffixGPU.
PUBLISHED = {"translation": ((1.10, 1.09), (6.29, 6.24)),
             "summarization": ((1.57, 1.56), (9.70, 9.98)),
             "math_reasoning": ((1.49, 1.39), (11.06, 11.16))}
# Milliseconds of a step's drafts, warm, by requests: arctic-inference and SuffixGPU's graph.
PUBLISHED_MS = {8: (0.07, 0.40), 32: (0.29, 0.49), 128: (2.09, 0.95), 256: (4.98, 1.85),
                512: (10.68, 5.15)}
# Shorter answers, prompts beyond this: as SuffixGPU's script leaves them out and cuts them.
ANSWER_TOKENS_MIN, PROMPT_TOKENS_MAX = 16, 3072


def traces(questions, tokenizer, folder):
    """Writes the calls of each category. Returns the path and the number of calls of each."""
    encoding = tiktoken.Encoding("llama3", pat_str=PATTERN, special_tokens={},
                                 mergeable_ranks=load_tiktoken_bpe(tokenizer))
    calls = {category: [] for category in PUBLISHED}
    with open(questions) as lines:
        for question in map(json.loads, lines):
            reference = question.get("reference") or [""]
            if question["category"] not in calls or not reference[0]:
                continue
            prompt = encoding.encode(question["turns"][0], disallowed_special=())
            answer = encoding.encode(reference[0], disallowed_special=())
            if len(answer) >= ANSWER_TOKENS_MIN:
                calls[question["category"]].append({
                    "prompt_token_ids": prompt[-PROMPT_TOKENS_MAX:], "output_token_ids": answer})
    return {category: write(of, os.path.join(folder, f"specbench-{category}.jsonl"))
            for category, of in calls.items()} | {
        "all": write(sum(calls.values(), []), os.path.join(folder, "specbench-all.jsonl"))}


def write(calls, path):
    with open(path, "w") as out:
        out.writelines(json.dumps(call) + "\n" for call in calls)
    return path, len(calls)


def peer(trace, warm, concurrency):
    return run_json([
        sys.executable, os.path.join(HERE, "peer.py"), trace, "--depth=24", "--alpha=2",
        "--max-spec-tokens=16", f"--concurrency={concurrency}", *([f"--warm={warm}"] if warm else [])])


def refrain(args, trace, warm, concurrency, options):
    report = run_json([
        args.refrain, "replay", trace, "--json", "--eagle3=off", "--engine-model=h100-8b",
        f"--concurrency={concurrency}", *([f"--warm={warm}"] if warm else []), *options])
    return next(row for row in report["policies"] if row["policy"] != "off")


LIKE_THE_PEER = ["--policies=suffix", "--linear", "--alpha=2", "--max-spec-tokens=16",
                 "--min-token-prob=0.1", "--max-pattern=24"]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", metavar="QUESTIONS.jsonl")
    parser.add_argument("tokenizer", metavar="TOKENIZER.model")
    parser.add_argument("--batches", default="32,128,256,512", help="requests of a step")
    parser.add_argument("--refrain", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--work", required=True, help=argparse.SUPPRESS)
    args = parser.parse_args()
    made = traces(args.questions, args.tokenizer, args.work)
    print("tokens a step         calls  published  SuffixGPU   arctic  refrain  as shipped")
    for category, published in PUBLISHED.items():
        trace, count = made[category]
        for state, warm, (arctic, gpu) in zip(("cold", "warm"), (None, trace), published):
            log(f"{category}, {state}")
            sides = [peer(trace, warm, count), refrain(args, trace, warm, count, LIKE_THE_PEER),
                     refrain(args, trace, warm, count, ["--policies=goodput"])]
            figures = "".join(f"{side['tokens_per_step']:>9.2f}" for side in sides)
            print(f"{category:<15}{state:>5}{count:>7}{arctic:>11.2f}{gpu:>11.2f}{figures}", flush=True)
    trace, count = made["all"]
    print("\nms of a step's drafts, warm   published  SuffixGPU   arctic  refrain  as shipped")
    for batch in map(int, args.batches.split(",")):
        log(f"{batch} at once")
        repeated = os.path.join(args.work, "specbench-batch.jsonl")
        with open(trace) as lines, open(repeated, "w") as out:
            calls = lines.readlines()
            out.writelines((calls * (batch // count + 1))[:max(batch, count)])
        sides = [peer(repeated, trace, batch)["propose_us"]["mean"]]
        sides += [refrain(args, repeated, trace, batch, options)["propose_us_per_step"]
                  for options in (LIKE_THE_PEER, ["--policies=goodput"])]
        figures = "".join(f"{us * batch / 1e3:>9.2f}" for us in sides)
        published = "".join(f"{ms:>11.2f}" for ms in PUBLISHED_MS[batch]) if batch in PUBLISHED_MS else " " * 22
        print(f"{batch:<28}{published}{figures}", flush=True)


if __name__ == "__main__":
    main()
