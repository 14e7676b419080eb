"""How long the host takes in SGLang to prepare a step of chains, with SGLang's worker for n-grams and with Refrain's.

    sglang_step.py [TEXT_TOKENS]

It runs in SGLang's environment, with the Python client, and needs no model. Both workers get the same drafts from a
corpus that costs nothing, and must hand on the same batch. Without a GPU, tensors are on the CPU, the kernels of SGLang
are left out of the times, and PYTHONPATH names `no_kernels`.
"""

import os
import random
import statistics
import sys
import time
from array import array
from types import SimpleNamespace as Namespace

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["SGLANG_USE_CPU_ENGINE"] = "1"

import numpy as np
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative import ngram_worker

# The steps of a GPU are prepared, on whatever device.
ngram_worker._is_cpu = False
ngram_worker.prepare_mamba_track_for_verify = lambda batch: None

from refrain_client import chains

NODES, DEPTH, STEPS = 9, 18, 300
AT_ONCE = (1, 16, 64)
WORKERS = {"sglang": ngram_worker.NGRAMWorker, "refrain": chains.RefrainWorker}
FIELDS = ("draft_token", "custom_mask", "positions", "retrieve_index", "retrieve_next_token", "retrieve_next_sibling")


class Corpus:
    """Drafts that cost nothing."""

    def __init__(self, count, kind):
        self.drafts = np.arange(count * NODES), np.tile(np.tril(np.ones((NODES, NODES), dtype=kind)).reshape(-1), count)

    def begin_step(self, reqs):
        pass

    def synchronize(self):
        pass

    def batch_put(self, tails):
        pass

    def batch_get(self, *_):
        return self.drafts


def worker_of(name, count):
    worker = object.__new__(WORKERS[name])
    worker.draft_token_num, worker.max_trie_depth, worker.max_batch_size, worker.device = NODES, DEPTH, count, DEVICE
    worker.enable_overlap, worker.group = True, Namespace(world_size=1)
    worker.ngram_corpus = Corpus(count, bool if name == "refrain" else np.int64)
    worker._init_preallocated_tensors()
    return worker


def batch_of(count, tokens):
    dice = random.Random(7)
    lens = torch.tensor([dice.randrange(tokens // 2, tokens) for _ in range(count)])
    reqs = [
        Namespace(rid=str(at), origin_input_ids_unpadded=array("q", range(length - 50)), output_ids=array("q", range(50)))
        for at, length in enumerate(lens.tolist())
    ]
    return Namespace(
        forward_mode=ForwardMode.DECODE, reqs=reqs, seq_lens=lens.to(DEVICE), seq_lens_cpu=lens, has_grammar=False,
        grammar_needs_sync=lambda: False, req_pool_indices=torch.arange(count, device=DEVICE),
        req_to_token_pool=Namespace(req_to_token=torch.zeros(count, tokens + NODES, dtype=torch.int32, device=DEVICE)),
        spec_info=Namespace(
            accept_tokens=torch.arange(count * NODES, device=DEVICE), accept_lens=torch.full((count,), 4, device=DEVICE)
        ),
    )  # fmt: skip


def prepared(name, worker, batch):
    """Prepares a step. Returns the seconds that it took, and the batch as it is handed on."""
    ngram_worker.USE_FULL_MASK = name == "sglang"
    batch = Namespace(**vars(batch))
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    worker._prepare_for_speculative_decoding(batch)
    worker._update_ngram_corpus(batch)
    return time.perf_counter() - started, batch.spec_info


def main():
    tokens = int(sys.argv[1]) if len(sys.argv) > 1 else 500
    torch.set_num_threads(1)
    cases = {count: ({name: worker_of(name, count) for name in WORKERS}, batch_of(count, tokens)) for count in AT_ONCE}
    for workers, batch in cases.values():
        theirs, ours = (prepared(name, worker, batch)[1] for name, worker in workers.items())
        for field in FIELDS:
            assert torch.equal(getattr(theirs, field), getattr(ours, field)), field
    if DEVICE == "cpu":
        ngram_worker.reconstruct_indices_from_tree_mask_func = lambda *_: None
        ngram_worker.assign_extend_cache_locs_func = lambda **_: None
    for count, (workers, batch) in cases.items():
        took = {name: [] for name in workers}
        for _ in range(STEPS):
            for name, worker in workers.items():
                took[name].append(prepared(name, worker, batch)[0])
        theirs, ours = (1e6 * statistics.median(times) for times in took.values())
        print(f"{count} requests: sglang {theirs:.0f} us, refrain {ours:.0f} us, {ours / theirs:.2f} of it")


if __name__ == "__main__":
    main()
