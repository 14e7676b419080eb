"""A stand-in for `arctic_inference.suffix_decoding.SuffixDecodingCache`, with Refrain's memory behind it."""

import atexit
import os
from collections import OrderedDict
from typing import NamedTuple

from refrain_client import Client
from refrain_client.announced import start
from refrain_client.ending import Ending

# How long a process that ends waits for the draft store.
DRAIN_SECONDS = 5.0
# Requests that were announced and have not begun.
ANNOUNCED_MAX = 4096


class SuffixDecodingDraft(NamedTuple):
    """A chain of tokens: its score counts the tokens that the step is expected to bring, less the target's own."""

    token_ids: list = []
    score: float = 0.0
    match_len: int = 0

    @property
    def parents(self):
        return list(range(-1, len(self.token_ids) - 1))


class SuffixDecodingCache:
    """What vLLM calls, step by step. How much is remembered, and for how long, is said by REFRAIN_CLIENT_MEMORY__...

    A request that was stopped and begins again goes on where it was, since engines stop those that they make room
    with. `max_cached_requests` is not heeded.
    """

    def __init__(self, max_tree_depth=64, max_cached_requests=-1, *, client=None, tokenizer=None):
        if client is None:
            client = Client(os.environ.get("REFRAIN_CLIENT_CONFIG"), tokenizer)
            atexit.register(client.drain, DRAIN_SECONDS)
        self.client = client
        self.max_tree_depth = max_tree_depth
        self.max_cached_requests = max_cached_requests
        # Of each request how it ends, and None once it has.
        self._active = {}
        # Of each request what it brought, how it ends, and what it had said.
        self._announced = OrderedDict()

    @property
    def active_requests(self):
        return self._active.keys()

    @property
    def cached_requests(self):
        """None: nothing has to be evicted before a request begins again."""
        return ()

    def announce(self, req_id, fields, ending, said=()):
        """What a request brought along: fields of `vllm_xargs` that only Refrain's gateway and workers set; its `Ending`; and what
        it said before the engine made room, token ids."""
        self._announced[req_id] = fields, ending, said
        while len(self._announced) > ANNOUNCED_MAX:
            self._announced.popitem(last=False)

    def start_request(self, req_id, prompt_token_ids):
        if req_id in self._active:
            raise ValueError(f"Request '{req_id}' is already active")
        fields, self._active[req_id], said = self._announced.pop(req_id, ({}, Ending(), ()))
        known = start(self.client, req_id, prompt_token_ids, fields)
        if known < len(said):
            # What the client does not go on with, such as of a request that was refused, it is told once more.
            self.client.extend(req_id, said[known:])

    def stop_request(self, req_id):
        """It is not in the batch any more: the engine made room, or somebody stopped it, if it had not ended."""
        self._check(req_id)
        if self._active.pop(req_id):
            self.client.finish(req_id)

    def add_active_response(self, req_id, token_ids):
        self._check(req_id)
        ending = self._active[req_id]
        if ending is None:
            return
        said, reason = ending.take(token_ids)
        self.client.extend(req_id, said)
        if reason:
            self._active[req_id] = None
            self.client.finish(req_id, reason)

    def evict_cached_response(self, req_id):
        raise ValueError(f"Request '{req_id}' is not cached")

    def speculate(
        self,
        req_id,
        context,
        max_spec_tokens=None,
        max_spec_factor=1.0,
        max_spec_offset=0.0,
        min_token_prob=0.1,
        use_tree_spec=False,
    ):
        """The draft of a step. The context is the request's text, which is known from `add_active_response`."""
        self._check(req_id)
        if self._active[req_id] is None:
            return SuffixDecodingDraft([])
        room = self.max_tree_depth if max_spec_tokens is None else max(max_spec_tokens, 0)
        wanted = [(req_id, room)]
        (draft,) = self.client.propose(wanted, max_spec_factor, max_spec_offset, min_token_prob)
        return SuffixDecodingDraft(*draft)

    def _check(self, req_id):
        if req_id not in self._active:
            raise ValueError(f"Request '{req_id}' is not active")
