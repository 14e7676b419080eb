"""Replays a trace through arctic-inference's SuffixDecodingCache. Prints one JSON object.

    python peer.py TRACE --depth 64 [--warm TRACE] ...

The recorded output takes the place of the model. A draft is accepted as far as it agrees
with the recording. The next recorded token is the bonus token, unless the recording ends
there. `refrain replay` counts in the same way. Emitted tokens can be drafted from in the
next step.

With --concurrency so many calls run at once, in steps of one batch. Calls of one session
run one after the other, as in `refrain replay`. The drafts of a step are made one by one,
as vLLM asks for them. With --engine-model the time of each step is that of a modelled
engine, whose file is a table of `refrain replay --engine-model`.
"""

import argparse
import collections
import ctypes
import json
import math
import os
import time

import numpy as np
from arctic_inference.suffix_decoding import SuffixDecodingCache

clock = time.perf_counter_ns


# Calls that are read ahead of the running ones, to find calls whose session is free.
WAITING_MAX = 1024


def calls(path):
    """Yields the session, the prompt and the output of each line."""
    with open(path) as lines:
        for line in lines:
            call = json.loads(line)
            session = call.get("session")
            yield ((call.get("tenant"), session) if session is not None else None,
                   *(np.array(call.get(key) or [], dtype=np.int32)
                     for key in ("prompt_token_ids", "output_token_ids")))


class Queue:
    """Calls that have not begun. A call begins once no other one of its session runs."""

    def __init__(self, path):
        self.unread, self.waiting, self.busy = calls(path), collections.deque(), set()

    def next(self):
        at = 0
        while True:
            if at == len(self.waiting):
                call = next(self.unread, None) if at < WAITING_MAX else None
                if call is None:
                    return None
                self.waiting.append(call)
            session = self.waiting[at][0]
            if session is None or session not in self.busy:
                call = self.waiting[at]
                del self.waiting[at]
                if session is not None:
                    self.busy.add(session)
                return call
            at += 1


class Engine:
    """The engine model of `refrain replay`, for steps that only decode."""

    def __init__(self, model):
        self.model = {"attention_flop": 0, "bandwidth_efficiency": 0.8, "compute_efficiency": 0.6,
                      "step_us": 1400, "request_us": 45, "token_us": 5, "tile_tokens": 64, **model}

    def step_seconds(self, requests, tokens, kv_tokens):
        of = self.model
        bytes_per_s = of["bandwidth_tb_per_s"] * 1e12 * of["bandwidth_efficiency"]
        flop_per_s = of["compute_tflop_per_s"] * 1e12 * of["compute_efficiency"]
        computed = math.ceil(tokens / of["tile_tokens"]) * of["tile_tokens"]
        reading = of["weights_gb"] * 1e9 / bytes_per_s
        computing = 2 * of["parameters_b"] * 1e9 * computed / flop_per_s
        queries = max(tokens / requests, 1)
        attending = kv_tokens * max(of["kv_bytes_per_token"] / bytes_per_s,
                                    of["attention_flop"] * queries / flop_per_s)
        host_us = of["step_us"] + requests * of["request_us"] + tokens * of["token_us"]
        return host_us / 1e6 + max(reading, computing) + attending


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


class Running:
    """A call under way."""

    def __init__(self, req_id, session, prompt, output):
        self.req_id, self.session, self.output = req_id, session, output
        self.text = np.concatenate([prompt, output])
        self.prompt_tokens, self.known, self.end = len(prompt), len(prompt), len(self.text)


def replay(cache, path, depth, settings, first_id, concurrency, engine):
    """Replays a trace. Returns its counts, and the nanoseconds of each kind of call."""
    counts = dict.fromkeys(
        ("docs", "prompt_tokens", "output_tokens", "steps", "drafted", "accepted"), 0)
    start_ns, add_ns, speculate_ns, engine_s = 0, 0, [], 0.0
    queue, batch, req_id = Queue(path), [], first_id
    while True:
        while len(batch) < concurrency and (call := queue.next()):
            running = Running(req_id, *call)
            req_id += 1
            begin = clock()
            cache.start_request(running.req_id, call[1])
            start_ns += clock() - begin
            batch.append(running)
        if not batch:
            return counts, start_ns, add_ns, speculate_ns, engine_s
        going = [running for running in batch if running.known < running.end]
        drafts = []
        for running in going:
            # The context is cut here rather than in the cache, as the callers of the cache do.
            context = running.text[max(0, running.known - depth):running.known]
            begin = clock()
            drafts.append(cache.speculate(running.req_id, context, **settings))
            speculate_ns.append(clock() - begin)
        if engine and going:
            tokens = len(going) + sum(len(draft.token_ids) for draft in drafts)
            kv_tokens = sum(running.known for running in going)
            engine_s += engine.step_seconds(len(going), tokens, kv_tokens)
        for running, draft in zip(going, drafts):
            output = running.output[running.known - running.prompt_tokens:]
            right = accepted(draft, output.tolist())
            new = running.text[running.known:min(running.known + right + 1, running.end)]
            begin = clock()
            cache.add_active_response(running.req_id, new)
            add_ns += clock() - begin
            running.known += len(new)
            counts["steps"] += 1
            counts["drafted"] += len(draft.token_ids)
            counts["accepted"] += right
        for running in [running for running in batch if running.known == running.end]:
            cache.stop_request(running.req_id)
            queue.busy.discard(running.session)
            batch.remove(running)
            counts["docs"] += 1
            counts["prompt_tokens"] += running.prompt_tokens
            counts["output_tokens"] += len(running.output)


def warm(cache, path):
    """Adds whole outputs. Returns the numbers of requests and tokens."""
    requests = tokens = 0
    for requests, (_, _, output) in enumerate(calls(path), 1):
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
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--engine-model", metavar="FILE.json")
    args = parser.parse_args()
    engine = None
    if args.engine_model:
        with open(args.engine_model) as file:
            engine = Engine(json.load(file))
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
    counts, start_ns, add_ns, speculate_ns, engine_s = replay(
        cache, args.trace, args.depth, settings, warm_docs, args.concurrency, engine)
    propose_s = sum(speculate_ns) / 1e9
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
        "propose_s": propose_s,
        "engine_s": engine_s,
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
