"""SGLang's plugin: a speculative algorithm whose drafts are from Refrain's memory.

    --speculative-algorithm REFRAIN --speculative-num-draft-tokens 16

SGLang loads it in each of its processes (entry point `sglang.srt.plugins`). It does nothing unless a draft store is
configured (REFRAIN_CLIENT_STORE_URL, or REFRAIN_CLIENT_CONFIG). It was run in SGLang 0.5.16 on an H100; 0.5.23 has the same
seam, by its source. SGLang's own `NGRAMWorker` verifies the drafts; its corpus is replaced.
"""

import atexit
import os

NAME = "REFRAIN"
# As SGLang has both for its own n-grams.
DRAFT_TOKENS = 12
RUNNING_REQUESTS = 48


def register():
    """SGLang calls this once in each process."""
    if not {"REFRAIN_CLIENT_STORE_URL", "REFRAIN_CLIENT_CONFIG"} & os.environ.keys():
        return
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_registry import CustomSpecAlgo

    class RefrainAlgorithm(CustomSpecAlgo):
        """Treated as SGLang's own n-grams, whose worker it has."""

        def __getattr__(self, name):
            """What SGLang asks its own algorithms, and forgot in the class for others: 0.5.16 does not start without."""
            if name.startswith("__"):
                raise AttributeError(name)
            return getattr(SpeculativeAlgorithm.NGRAM, name)

        def is_ngram(self):
            return True

        def has_draft_kv(self):
            return False

        def handle_server_args(self, server_args):
            settle(server_args)

    registered = SpeculativeAlgorithm.register(
        NAME, supports_overlap=True, validate_server_args=check, spec_class=RefrainAlgorithm
    )
    registered(lambda server_args: worker())


def check(server_args):
    why_not = refuse(server_args)
    if why_not:
        raise ValueError(f"{NAME}: {why_not}")


def refuse(server_args):
    """Why drafts must not be made there, or None."""
    for size in ("tp_size", "pp_size", "dp_size"):
        if getattr(server_args, size) > 1:
            return f"{size} is above 1: every rank would draft for itself, and what they draft must be the same"
    if not str(server_args.device).startswith("cuda") or _is_hip():
        return f"on {server_args.device} as it is here SGLang verifies greedily, also where an output is to be sampled"
    for threshold in ("speculative_accept_threshold_single", "speculative_accept_threshold_acc"):
        if getattr(server_args, threshold) != 1.0:
            return f"{threshold} is not 1.0, which is not lossless"
    if server_args.speculative_use_rejection_sampling:
        return "speculative_use_rejection_sampling judges drafts by chances, which these have none of"
    return None


def _is_hip():
    from sglang.srt.utils import is_hip

    return is_hip()


def settle(server_args):
    """What SGLang settles for its own n-grams, for drafts that are chains. It takes note of what is assigned here."""
    if server_args.max_running_requests is None:
        server_args.max_running_requests = RUNNING_REQUESTS
    if server_args.speculative_num_draft_tokens is None:
        server_args.speculative_num_draft_tokens = DRAFT_TOKENS
    # The tail of a text that the corpus is shown has to hold what a step brings.
    server_args.speculative_ngram_max_trie_depth = max(
        server_args.speculative_ngram_max_trie_depth, server_args.speculative_num_draft_tokens
    )
    server_args.enable_mixed_chunk = False
    server_args.speculative_ngram_max_bfs_breadth = 1
    server_args.speculative_eagle_topk = 1
    server_args.speculative_num_steps = server_args.speculative_num_draft_tokens


def worker():
    """The class of SGLang's worker."""
    from sglang.srt.speculative.ngram_worker import NGRAMWorker

    from refrain_client import Client
    from refrain_client.corpus import RefrainCorpus
    from refrain_client.vllm import tokenizer_folder

    class RefrainWorker(NGRAMWorker):
        def __init__(self, server_args, *others, **named):
            super().__init__(server_args, *others, **named)
            folder = tokenizer_folder(server_args.tokenizer_path or server_args.model_path, server_args.revision)
            client = Client(os.environ.get("REFRAIN_CLIENT_CONFIG"), folder)
            self.ngram_corpus = RefrainCorpus(client, self.draft_token_num)
            atexit.register(self.ngram_corpus.close)

        def _prepare_draft_tokens(self, batch):
            self.ngram_corpus.meet(batch.reqs)
            return super()._prepare_draft_tokens(batch)

    return RefrainWorker
