"""A plugin of vLLM for the tests: times each step's proposal, whoever makes it.

A record of four numbers per step goes to the file REFRAIN_PROBE: nanoseconds, requests that said something, tokens that
they said, tokens drafted.
"""

import os
import struct
import time

RECORD = struct.Struct("<4q")


def register():
    path = os.environ.get("REFRAIN_PROBE")
    if path is None:
        return
    from vllm.v1.spec_decode.suffix_decoding import SuffixDecodingProposer

    propose = SuffixDecodingProposer.propose
    # Unbuffered, so that nothing is lost with the process; written after the clock has stopped.
    out = open(path, "ab", buffering=0)

    def timed(self, num_speculative_tokens, input_batch, sampled_token_ids, *others, **named):
        started = time.perf_counter_ns()
        drafts = propose(self, num_speculative_tokens, input_batch, sampled_token_ids, *others, **named)
        took = time.perf_counter_ns() - started
        said = [len(tokens) for tokens in sampled_token_ids if tokens]
        if said:
            out.write(RECORD.pack(took, len(said), sum(said), sum(map(len, drafts))))
        return drafts

    SuffixDecodingProposer.propose = timed


def records(path):
    """What a file has by now."""
    with open(path, "rb") as file:
        return list(RECORD.iter_unpack(file.read()))
