"""A replacement for `arctic_inference.suffix_decoding.SuffixDecodingCache` that drafts from a Refrain mesh."""

import atexit
import os
from collections import OrderedDict
from typing import NamedTuple

from refrain_client import Client
from refrain_client.announced import start
from refrain_client.ending import Ending

# Longest time that an exiting process waits for the draft store.
DRAIN_SECONDS = 5.0
# Most requests that were announced and have not begun.
ANNOUNCED_MAX = 4096
# vLLM's defaults of its arguments `suffix_decoding_...`. They stand for the client's configuration, because vLLM does not
# tell whether a user set them.
TREE_DEPTH, SPEC_FACTOR, TOKEN_PROB = 24, 1.0, 0.1


class SuffixDecodingDraft(NamedTuple):
    """A draft that is a chain. Its score is the expected number of accepted tokens."""

    token_ids: list = []
    score: float = 0.0
    match_len: int = 0

    @property
    def parents(self):
        return list(range(-1, len(self.token_ids) - 1))


class SuffixDecodingCache:
    """The cache as vLLM calls it, step by step.

    REFRAIN_CLIENT_REPLICA__... variables limit its size; `max_cached_requests` is ignored. A request that was stopped
    and begins again is resumed, because an engine stops requests to make room for others. The client's configuration
    decides how long drafts are, but for arguments with other values than vLLM's defaults.
    """

    def __init__(self, max_tree_depth=TREE_DEPTH, max_cached_requests=-1, *, client=None, tokenizer=None):
        if client is None:
            client = Client(os.environ.get("REFRAIN_CLIENT_CONFIG"), tokenizer)
            atexit.register(client.drain, DRAIN_SECONDS)
        self.client = client
        self.max_tree_depth = max_tree_depth
        self.max_cached_requests = max_cached_requests
        # By request id: the rules of its end; None once it has ended.
        self._active = {}
        # By request id: its fields, the rules of its end, and its output so far.
        self._announced = OrderedDict()

    @property
    def active_requests(self):
        return self._active.keys()

    @property
    def cached_requests(self):
        """Always empty: nothing has to be evicted before a request begins again."""
        return ()

    def announce(self, req_id, fields, ending, output=()):
        """Announces a request that is about to begin.

        `fields` are its Refrain fields of `vllm_xargs`, `ending` its `Ending`, and `output` the token ids that it
        emitted before the engine made room.
        """
        self._announced[req_id] = fields, ending, output
        while len(self._announced) > ANNOUNCED_MAX:
            self._announced.popitem(last=False)

    def start_request(self, req_id, prompt_token_ids):
        if req_id in self._active:
            raise ValueError(f"Request '{req_id}' is already active")
        fields, self._active[req_id], output = self._announced.pop(req_id, ({}, Ending(), ()))
        known = start(self.client, req_id, prompt_token_ids, fields)
        if known < len(output):
            # A client that does not resume the request, for example because it was refused, gets the output once
            # more.
            self.client.extend(req_id, output[known:])

    def stop_request(self, req_id):
        """Ends a request that left the batch: it has ended, it was aborted, or the engine made room with it."""
        self._check(req_id)
        if self._active.pop(req_id):
            self.client.finish(req_id)

    def add_active_response(self, req_id, token_ids):
        self._check(req_id)
        ending = self._active[req_id]
        if ending is None:
            return
        tokens, reason = ending.take(token_ids)
        self.client.extend(req_id, tokens)
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
        max_spec_factor=SPEC_FACTOR,
        max_spec_offset=0.0,
        min_token_prob=TOKEN_PROB,
        use_tree_spec=False,
    ):
        """Returns the draft of a step. `context` is ignored: the text is known from `add_active_response`."""
        self._check(req_id)
        if self._active[req_id] is None:
            return SuffixDecodingDraft([])
        tokens_max = self.max_tree_depth if max_spec_tokens is None else max(max_spec_tokens, 0)
        (draft,) = self.client.propose(
            [(req_id, tokens_max)],
            alpha=unless_default(max_spec_factor, SPEC_FACTOR),
            offset=max_spec_offset,
            min_token_prob=unless_default(min_token_prob, TOKEN_PROB),
            depth=unless_default(self.max_tree_depth, TREE_DEPTH),
        )
        return SuffixDecodingDraft(*draft)

    def _check(self, req_id):
        if req_id not in self._active:
            raise ValueError(f"Request '{req_id}' is not active")


def unless_default(value, default):
    """A value that a user set, or None."""
    return None if value == default else value
