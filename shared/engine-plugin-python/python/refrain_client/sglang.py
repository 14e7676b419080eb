"""The plugin for SGLang: a speculative algorithm that drafts from a Refrain mesh.

    --speculative-algorithm REFRAIN --speculative-num-draft-tokens 16

SGLang loads it in each of its processes (entry point `sglang.srt.plugins`). It does nothing unless a draft store is
configured (REFRAIN_CLIENT_STORE_URL or REFRAIN_CLIENT_STORE_URLS, or REFRAIN_CLIENT_CONFIG). It is written for SGLang
0.5.23, whose own `NGRAMWorker` verifies the drafts. Its arguments are sealed: writes are recorded, and applied later.
"""

import os

NAME = "REFRAIN"
# SGLang's defaults for its own n-grams.
DRAFT_TOKENS = 12
RUNNING_REQUESTS = 48


def register():
    """The entry point, which SGLang calls once in each process."""
    if not any(f"REFRAIN_CLIENT_{name}" in os.environ for name in ("STORE_URL", "STORE_URLS", "CONFIG")):
        return
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_registry import CustomSpecAlgo

    class RefrainAlgorithm(CustomSpecAlgo):
        """An algorithm that SGLang treats as its own n-grams, whose worker it uses."""

        def __getattr__(self, name):
            """Answers as SGLang's n-grams where the base class has no answer, such as for `create_future_map`."""
            if name.startswith("__"):
                raise AttributeError(name)
            return getattr(SpeculativeAlgorithm.NGRAM, name)

        def is_ngram(self):
            return True

        def has_draft_kv(self):
            return False

        def handle_server_args(self, server_args):
            set_defaults(server_args)

    registered = SpeculativeAlgorithm.register(
        NAME, supports_overlap=True, validate_server_args=check, spec_class=RefrainAlgorithm
    )
    registered(worker)


def check(server_args):
    why_not = refuse(server_args)
    if why_not:
        raise ValueError(f"{NAME}: {why_not}")


def refuse(server_args):
    """The reason why drafts must not be made with these arguments, or None."""
    # SGLang 0.5.16 has no `attn_dp_size`, and counts those groups by `dp_size`.
    for size in ("pp_size", "dp_size", "attn_dp_size"):
        if getattr(server_args, size, 1) > 1:
            return f"{size} is above 1: only the ranks of one tensor-parallel group are sent the same drafts"
    if not str(server_args.device).startswith("cuda") or _is_hip():
        return f"on this device ({server_args.device}) SGLang verifies greedily even where an output is to be sampled"
    for threshold in ("speculative_accept_threshold_single", "speculative_accept_threshold_acc"):
        if getattr(server_args, threshold) != 1.0:
            return f"{threshold} is not 1.0, which is not lossless"
    if server_args.speculative_use_rejection_sampling:
        return "speculative_use_rejection_sampling needs draft probabilities, which these drafts have not"
    return None


def _is_hip():
    from sglang.srt.utils import is_hip

    return is_hip()


def set_defaults(server_args):
    """Sets the arguments that SGLang sets for its own n-grams, but for drafts that are chains. SGLang reads them
    afterwards."""
    if server_args.max_running_requests is None:
        server_args.max_running_requests = RUNNING_REQUESTS
    if server_args.speculative_num_draft_tokens is None:
        server_args.speculative_num_draft_tokens = DRAFT_TOKENS
    # The corpus is given the tail of each text, which must hold the tokens of a whole step.
    server_args.speculative_ngram_max_trie_depth = max(
        server_args.speculative_ngram_max_trie_depth, server_args.speculative_num_draft_tokens
    )
    server_args.enable_mixed_chunk = False
    server_args.speculative_ngram_max_bfs_breadth = 1
    server_args.speculative_eagle_topk = 1
    server_args.speculative_num_steps = server_args.speculative_num_draft_tokens


def worker(server_args):
    """Returns the class of the worker, which SGLang instantiates."""
    from refrain_client.chains import RefrainWorker

    return RefrainWorker
