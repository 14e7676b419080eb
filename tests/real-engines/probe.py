"""A plugin of vLLM and SGLang for the tests: it times the proposal of each step, whether Refrain makes it or not.

It appends a record of four numbers per step to the file REFRAIN_PROBE: nanoseconds, requests that emitted tokens,
tokens that they emitted, and drafted tokens. For SGLang, where each step has the same number of nodes, the last two
are 0.
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
    # Unbuffered, so that nothing is lost when the process is killed. Records are written after the clock has stopped.
    out = open(path, "ab", buffering=0)

    def timed(self, num_speculative_tokens, input_batch, sampled_token_ids, *others, **named):
        started = time.perf_counter_ns()
        drafts = propose(self, num_speculative_tokens, input_batch, sampled_token_ids, *others, **named)
        took = time.perf_counter_ns() - started
        emitted = [len(tokens) for tokens in sampled_token_ids if tokens]
        if emitted:
            out.write(RECORD.pack(took, len(emitted), sum(emitted), sum(map(len, drafts))))
        return drafts

    SuffixDecodingProposer.propose = timed


def register_sglang():
    """Times all calls of a step to SGLang's corpus, or to Refrain's in its place."""
    path = os.environ.get("REFRAIN_PROBE")
    if path is None:
        return
    if "SGLANG_USE_CPU_ENGINE" in os.environ:
        verify_on_cpu()
    from sglang.srt.speculative.cpp_ngram.ngram_corpus import NgramCorpus

    from refrain_client.corpus import RefrainCorpus

    out = open(path, "ab", buffering=0)
    # The last call of a step is another one for each.
    for corpus, last in ((NgramCorpus, "batch_put"), (RefrainCorpus, "batch_get")):
        spent = [0]
        for name in ("begin_step", "synchronize", "batch_get", "batch_put", "erase_match_state"):
            if hasattr(corpus, name):
                setattr(corpus, name, _timed(getattr(corpus, name), name == last, spent, out))


def verify_on_cpu():
    """Has SGLang verify chains on any CPU. Its attention in PyTorch reads the lengths of prompts, which a step of
    drafts does not have. The plugin refuses a CPU, where sampled drafts would be judged as greedy ones."""
    import torch
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    import refrain_client.sglang

    init = TorchNativeAttnBackend.init_forward_metadata

    def init_with_lengths(self, batch):
        init(self, batch)
        if batch.forward_mode.is_target_verify():
            nodes = batch.spec_info.draft_token_num
            batch.extend_prefix_lens, batch.extend_seq_lens = batch.seq_lens, torch.full_like(batch.seq_lens, nodes)
            batch.seq_lens = batch.seq_lens + nodes

    TorchNativeAttnBackend.init_forward_metadata = init_with_lengths
    refrain_client.sglang.refuse = lambda server_args: None


def _timed(call, is_last, spent, out):
    def timed(self, first=(), *others):
        started = time.perf_counter_ns()
        answer = call(self, *(() if call.__name__ == "synchronize" else (first,)), *others)
        spent[0] += time.perf_counter_ns() - started
        if is_last:
            out.write(RECORD.pack(spent[0], len(first), 0, 0))
            spent[0] = 0
        return answer

    return timed


def records(path):
    """The records that a file has now."""
    with open(path, "rb") as file:
        return list(RECORD.iter_unpack(file.read()))
