"""Replays a trace through arctic-inference's SuffixDecodingCache. Prints one JSON object.

    python peer.py TRACE --depth 64 [--warm TRACE] ...

The recorded output takes the place of the model. A draft is accepted as far as it agrees
with the recording. The next recorded token is the bonus token, unless the recording ends
there. `refrain replay` counts in the same way. Calls come one after the other, and their
outputs can be drafted from at once.
"""

import argparse
import ctypes
import json
import os
import time

import numpy as np
from arctic_inference.suffix_decoding import SuffixDecodingCache

clock = time.perf_counter_ns


def calls(path):
    """Yields (prompt, output) of each line."""
    with open(path) as lines:
        for line in lines:
            call = json.loads(line)
            yield tuple(np.array(call.get(key) or [], dtype=np.int32)
                        for key in ("prompt_token_ids", "output_token_ids"))


def resident_bytes():
    """Resident memory, without what the allocator keeps for later."""
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def accepted(draft, recorded):
    """The number of draft tokens that agree with the recording."""
    tokens, parents, node = draft.token_ids, draft.parents, -1
    for depth, token in enumerate(recorded):
        for child in range(node + 1, len(tokens)):
            if parents[child] == node and tokens[child] == token:
                node = child
                break
        else:
            return depth
    return len(recorded)


class Empty:
    """A method of the same shape that does nothing."""

    def speculate(self, req_id, context, max_spec_tokens=None, max_spec_factor=1.0,
                  max_spec_offset=0.0, min_token_prob=0.1, use_tree_spec=False):
        return None


def times_us(ns):
    if not ns:
        return None
    ns = np.array(ns) / 1e3
    return {"mean": float(ns.mean()), "p50": float(np.quantile(ns, 0.5)),
            "p99": float(np.quantile(ns, 0.99))}


def empty_call_us(settings, count=20000):
    """Times calls of a method that does nothing."""
    empty, context, taken = Empty(), np.zeros(8, dtype=np.int32), []
    for _ in range(count):
        start = clock()
        empty.speculate(0, context, **settings)
        taken.append(clock() - start)
    return times_us(taken)


def replay(cache, path, depth, settings, first_id):
    """Replays a trace. Returns its counts, and the nanoseconds of each kind of call."""
    counts = dict.fromkeys(
        ("docs", "prompt_tokens", "output_tokens", "steps", "drafted", "accepted"), 0)
    start_ns, add_ns, speculate_ns = 0, 0, []
    for req_id, (prompt, output) in enumerate(calls(path), first_id):
        text = np.concatenate([prompt, output])
        known, end = len(prompt), len(text)
        begin = clock()
        cache.start_request(req_id, prompt)
        start_ns += clock() - begin
        while known < end:
            # The context is cut here rather than in the cache, as the callers of the cache do.
            context = text[max(0, known - depth):known]
            begin = clock()
            draft = cache.speculate(req_id, context, **settings)
            speculate_ns.append(clock() - begin)
            right = accepted(draft, output[known - len(prompt):].tolist())
            new = text[known:min(known + right + 1, end)]
            begin = clock()
            cache.add_active_response(req_id, new)
            add_ns += clock() - begin
            known += len(new)
            counts["steps"] += 1
            counts["drafted"] += len(draft.token_ids)
            counts["accepted"] += right
        cache.stop_request(req_id)
        counts["docs"] += 1
        counts["prompt_tokens"] += len(prompt)
        counts["output_tokens"] += len(output)
    return counts, start_ns, add_ns, speculate_ns


def warm(cache, path):
    """Adds whole outputs. Returns the numbers of requests and tokens."""
    requests = tokens = 0
    for requests, (_, output) in enumerate(calls(path), 1):
        # The prompt would only go into a tree that is dropped at once.
        cache.start_request(requests - 1, output[:0])
        cache.add_active_response(requests - 1, output)
        cache.stop_request(requests - 1)
        tokens += len(output)
    return requests, tokens


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace")
    parser.add_argument("--warm")
    parser.add_argument("--depth", type=int, default=64)
    parser.add_argument("--alpha", type=float, default=1.0)
    parser.add_argument("--offset", type=float, default=0.0)
    parser.add_argument("--min-token-prob", type=float, default=0.1)
    parser.add_argument("--max-spec-tokens", type=int, default=32)
    parser.add_argument("--tree", action="store_true")
    args = parser.parse_args()
    settings = {
        "max_spec_tokens": args.max_spec_tokens, "max_spec_factor": args.alpha,
        "max_spec_offset": args.offset, "min_token_prob": args.min_token_prob,
        "use_tree_spec": args.tree,
    }
    empty = empty_call_us(settings)
    before = resident_bytes()
    cache = SuffixDecodingCache(max_tree_depth=args.depth)
    warm_docs, warm_tokens = warm(cache, args.warm) if args.warm else (0, 0)
    began = time.perf_counter()
    counts, start_ns, add_ns, speculate_ns = replay(
        cache, args.trace, args.depth, settings, warm_docs)
    wall_s = time.perf_counter() - began
    proposing = times_us(speculate_ns)
    # The list of times belongs to the script, and must not count as memory of the cache.
    del speculate_ns
    steps, outputs = max(counts["steps"], 1), max(counts["output_tokens"], 1)
    kept = max(warm_tokens + counts["output_tokens"], 1)
    print(json.dumps({
        **counts,
        "tokens_per_step": counts["output_tokens"] / steps,
        "drafted_per_step": counts["drafted"] / steps,
        "acceptance_rate": counts["accepted"] / max(counts["drafted"], 1),
        "propose_us": proposing,
        "empty_call_us": empty,
        "start_us_per_token":
            start_ns / 1e3 / counts["prompt_tokens"] if counts["prompt_tokens"] else None,
        "append_us_per_token": add_ns / 1e3 / outputs,
        "update_us_per_token": (start_ns + add_ns) / 1e3 / (counts["prompt_tokens"] + outputs),
        "resident_bytes_per_token": (resident_bytes() - before) / kept,
        "index_bytes_per_token": cache._global_tree.estimate_memory() / kept,
        "wall_s": wall_s,
    }))


if __name__ == "__main__":
    main()
