"""A replacement for SGLang's `NgramCorpus` that drafts from a Refrain mesh."""

import threading
import weakref

import numpy as np

from refrain_client.announced import announces, start
from refrain_client.ending import Ending

# Longest time that an exiting process waits for the draft store.
DRAIN_SECONDS = 5.0
# Pause between two looks for requests that have ended without a further step.
LOOK_EVERY_SECONDS = 0.5


class FollowedRequest:
    """A request in the batch, with the rules of its end and the length of its output that the client knows."""

    def __init__(self, req, known):
        self.req, self.known = req, known
        self.prompt_len = len(req.origin_input_ids_unpadded)
        # None once the output has ended.
        self.ending = Ending.of_sglang(req, known)

    def has_ended(self):
        """Whether SGLang has ended the request."""
        return self.req.finished_reason is not None


def allows_drafts(params):
    """Whether SGLang verifies exactly, which it does not where a token's probability depends on those before it."""
    has_penalty = params.frequency_penalty or params.presence_penalty or params.repetition_penalty != 1.0
    return not has_penalty and not params.min_new_tokens


class RefrainCorpus:
    """The corpus as the `NGRAMWorker` of SGLang 0.5.16 to 0.5.23 calls it, step by step. Its drafts are chains.

    A step has a fixed number of nodes for each request. A shorter draft repeats its last token at the end of the
    chain. SGLang fills its own trees with equal siblings instead, but these would count twice where an output is
    sampled.
    """

    def __init__(self, client, draft_token_num):
        self.client = client
        self.draft_token_num = draft_token_num
        # Held by calls of the client: by SGLang's scheduler, and for one request at a time by the thread that looks
        # for ends.
        self._lock = threading.Lock()
        self._followed = {}
        # Set between `begin_step` and the drafts. Meanwhile no request of the batch may be removed.
        self._is_in_step = False
        self._had_ended = set()
        self._is_closed = threading.Event()
        self._chain = np.tril(np.ones((draft_token_num, draft_token_num), dtype=bool)).reshape(-1)
        # The mask for as many requests as the largest step so far had.
        self._mask = self._chain
        threading.Thread(
            target=settle_periodically, args=(weakref.ref(self), self._is_closed), name="refrain-ends", daemon=True
        ).start()

    def begin_step(self, reqs):
        """Takes the batch of the step that begins. Requests that have ended are not in it."""
        with self._lock:
            self._is_in_step = True
            gone = self._followed.keys() - {req.rid for req in reqs}
            self._settle_all([req_id for req_id in gone if self._followed[req_id].has_ended()])
            for req in reqs:
                followed = self._followed.get(req.rid)
                if followed is not None:
                    if followed.req is req:
                        continue
                    self._settle(req.rid)
                fields = getattr(req.sampling_params, "custom_params", None) or {}
                fields = fields if announces(fields) else {}
                known = start(self.client, req.rid, list(req.origin_input_ids_unpadded), fields)
                self._followed[req.rid] = FollowedRequest(req, known)

    def batch_get(self, req_ids, batch_tokens, total_lens):
        """Returns the nodes of all requests and the mask of their ancestors, as arrays of batch * n and batch * n *
        n."""
        nodes = np.array(self.chains(req_ids, batch_tokens, total_lens), dtype=np.int64)
        size = len(req_ids) * len(self._chain)
        if size > len(self._mask):
            self._mask = np.tile(self._chain, len(req_ids))
        return nodes.reshape(-1), self._mask[:size]

    def chains(self, req_ids, tails, total_lens):
        """Returns for each request the last token of its text and the draft after it."""
        wanted = []
        with self._lock:
            for req_id, tail, total_len in zip(req_ids, tails, total_lens):
                followed = self._followed[req_id]
                self._advance(req_id, followed, tail, total_len)
                may_draft = followed.ending is not None and allows_drafts(followed.req.sampling_params)
                wanted.append((req_id, self.draft_token_num - 1 if may_draft else 0))
            self._is_in_step = False
        chains = []
        # SGLang verifies all nodes in any case.
        for tail, (tokens, *_) in zip(tails, self.client.propose(wanted, padded=True)):
            chain = [tail[-1], *tokens]
            chains.append(chain + chain[-1:] * (self.draft_token_num - len(chain)))
        return chains

    def erase_match_state(self, req_ids):
        """Removes requests that left the batch: they have ended, or SGLang made room with them."""
        with self._lock:
            self._settle_all(req_ids)

    def reset(self):
        """Removes all requests, since SGLang flushed its caches, for which nothing may run.

        SGLang forgets its last batch then, so no other call removes its requests. The drafts stay: they are the
        mesh's.
        """
        with self._lock:
            self._settle_all(list(self._followed))

    def settle_ended(self):
        """Removes requests that have ended while nothing runs: SGLang removes a request with the next step only.

        A request must have ended at the last call as well, because SGLang may be in the midst of ending it at this
        one.
        """
        if not self._lock.acquire(blocking=False):
            return
        try:
            ended = {followed: req_id for req_id, followed in self._followed.items() if followed.has_ended()}
            due = [(req_id, followed) for followed, req_id in ended.items() if followed in self._had_ended]
            self._had_ended = set(ended)
        finally:
            self._lock.release()
        for req_id, followed in due:
            # One request at a time: a step that begins meanwhile waits no longer than that, and removes the others
            # itself.
            if not self._lock.acquire(blocking=False):
                return
            try:
                if not self._is_in_step and self._followed.get(req_id) is followed:
                    self._settle(req_id)
            finally:
                self._lock.release()

    def synchronize(self):
        """Does nothing: the client knows emitted tokens at once."""

    def load_external_corpus_named(self, corpus_id, chunks):
        raise ValueError("drafts come from the draft store: import documents there, with `refrain store import`")

    def commit_external_corpus_load(self, corpus_id, loaded_token_count):
        """Does nothing: no corpus was loaded."""

    def remove_external_corpus(self, corpus_id):
        raise ValueError(f"no corpus is called {corpus_id!r}: drafts come from the draft store")

    def list_external_corpora(self):
        return {}

    def close(self):
        """Passes on the outputs of the last batch, and waits for the draft store: the process is exiting."""
        self._is_closed.set()
        self.reset()
        self.client.drain(DRAIN_SECONDS)

    def _advance(self, req_id, followed, tail, total_len):
        """Follows a text to its new length.

        Where steps overlap, the request does not have the tokens of the last step yet. They are in the tail.
        """
        emitted = list(followed.req.output_ids[followed.known :])
        ahead = total_len - followed.prompt_len - followed.known - len(emitted)
        if ahead > 0:
            emitted += tail[-ahead:]
        if emitted:
            self._extend(req_id, followed, emitted)

    def _extend(self, req_id, followed, emitted):
        followed.known += len(emitted)
        if followed.ending is None:
            return
        tokens, reason = followed.ending.take(emitted)
        self.client.extend(req_id, tokens)
        if reason:
            followed.ending = None
            self.client.finish(req_id, reason)

    def _settle_all(self, req_ids):
        for req_id in req_ids:
            if req_id in self._followed:
                self._settle(req_id)

    def _settle(self, req_id):
        """Removes a request, after its last tokens."""
        followed = self._followed.pop(req_id)
        output = followed.req.output_ids_through_stop
        if len(output) > followed.known:
            self._extend(req_id, followed, list(output[followed.known :]))
        if followed.ending is not None:
            reason = followed.req.finished_reason
            self.client.finish(req_id, reason.to_json()["type"] if reason else None)


def settle_periodically(corpus, is_closed):
    """Calls `settle_ended` until the corpus is closed or gone. The weak reference does not keep it alive."""
    while not is_closed.wait(LOOK_EVERY_SECONDS):
        alive = corpus()
        if alive is None:
            return
        alive.settle_ended()
        del alive
