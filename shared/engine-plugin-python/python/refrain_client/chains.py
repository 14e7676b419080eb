"""The worker of the plugin for SGLang: SGLang's own for n-grams, with chains from a Refrain mesh."""

import atexit
import os

import torch
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative import ngram_worker

from refrain_client import Client
from refrain_client.corpus import RefrainCorpus
from refrain_client.vllm import NullClient, tokenizer_folder

# SGLang makes a full mask on GPUs: for each node, which tokens of the text and which nodes it sees. It concatenates
# one for each request, which takes longer than all else in its step. That is switched off here, because the masks of
# chains differ only by the lengths of texts.
HAS_FULL_MASK = ngram_worker.USE_FULL_MASK and not ngram_worker._is_cpu
ngram_worker.USE_FULL_MASK = False


class RefrainWorker(ngram_worker.NGRAMWorker):
    """The worker, which SGLang instantiates in each rank of a tensor-parallel group. The first drafts for all."""

    def __init__(self, server_args, *others, **named):
        super().__init__(server_args, *others, **named)
        self.group = get_parallel().tp_group
        is_first = self.group.rank_in_group == 0
        self.ngram_corpus = RefrainCorpus(client_of(server_args) if is_first else NullClient(), self.draft_token_num)
        if is_first:
            atexit.register(self.ngram_corpus.close)

    def _prepare_draft_tokens(self, batch):
        self.ngram_corpus.begin_step(batch.reqs)
        return super()._prepare_draft_tokens(batch)

    def _prepare_for_speculative_decoding(self, batch):
        if not batch.forward_mode.is_decode():
            return
        # It does not depend on the drafts, so the device makes it while the host waits for the last step's tokens.
        mask = full_mask(batch.seq_lens, batch.seq_lens_cpu, self.draft_token_num) if HAS_FULL_MASK else None
        super()._prepare_for_speculative_decoding(batch)
        if mask is not None:
            batch.spec_info.custom_mask = mask
        if self.group.world_size > 1:
            drafts = self.group.broadcast(batch.spec_info.draft_token, src=0)
            if self.grammar_tree_host is not None:
                self.grammar_tree_host = (self.grammar_tree_host[0], drafts.cpu().numpy())

    def _update_ngram_corpus(self, batch):
        """Does nothing: the corpus follows the text of each request, so it needs no tails."""


def client_of(server_args):
    folder = tokenizer_folder(server_args.tokenizer_path or server_args.model_path, server_args.revision)
    return Client(os.environ.get("REFRAIN_CLIENT_CONFIG"), folder)


def full_mask(lens, lens_on_host, nodes):
    """The mask of chains after texts of these lengths: for each request and node, which tokens it sees, one after
    another. A node sees the text, the nodes before it and itself."""
    size = nodes * (int(lens_on_host.sum()) + nodes * len(lens_on_host))
    widths = (lens + nodes).unsqueeze(1)
    ends = (widths * nodes).cumsum(0)
    # A node does not see as many of the last nodes as there are rows after its own.
    rows_after, from_end = torch.tril_indices(nodes - 1, nodes - 1, device=lens.device) + 1
    hidden = ends - widths * rows_after - from_end
    return torch.ones(size, dtype=torch.bool, device=lens.device).index_fill_(0, hidden.flatten(), False)
