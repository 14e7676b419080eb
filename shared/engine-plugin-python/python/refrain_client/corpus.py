"""A stand-in for SGLang's `NgramCorpus`, with Refrain's memory behind it."""

import threading
import weakref

import numpy as np

from refrain_client.announced import announces, start
from refrain_client.ending import Ending

# How long a process that ends waits for the draft store.
DRAIN_SECONDS = 5.0
# How often somebody looks for requests that have ended with no step after them.
LOOK_EVERY_SECONDS = 0.5


class Met:
    """A request in the batch: it, how it ends (None: it has), and how much of its output is known here."""

    def __init__(self, req, known):
        self.req, self.known = req, known
        self.prompt_len = len(req.origin_input_ids_unpadded)
        self.ending = Ending.of_sglang(req, known)

    def has_ended(self):
        """Whether SGLang says so."""
        return self.req.finished_reason is not None


def is_drafted_for(params):
    """Not where a token's chances depend on those just before it in a way that SGLang's verification only comes close to."""
    has_penalty = params.frequency_penalty or params.presence_penalty or params.repetition_penalty != 1.0
    return not has_penalty and not params.min_new_tokens


class RefrainCorpus:
    """What the `NGRAMWorker` of SGLang 0.5.16 to 0.5.23 calls, step by step. Its drafts are chains.

    A step has a fixed number of nodes for each request. Where a draft has fewer, the chain goes on with its last token: nodes
    beside each other that say the same, with which SGLang fills up its own trees, count twice where an output is sampled.
    """

    def __init__(self, client, draft_token_num):
        self.client = client
        self.draft_token_num = draft_token_num
        # Who calls the client for a request holds it: SGLang's scheduler, and for one request at a time who looks for ends.
        self._lock = threading.Lock()
        self._met = {}
        # Between `meet` and the drafts: who is in the batch must be known then.
        self._is_in_step = False
        self._had_ended = set()
        self._is_closed = threading.Event()
        self._chain = np.tril(np.ones((draft_token_num, draft_token_num), dtype=np.int64)).reshape(-1)
        # Of as many requests as there were in a step.
        self._mask = self._chain
        threading.Thread(
            target=look_now_and_then, args=(weakref.ref(self), self._is_closed), name="refrain-ends", daemon=True
        ).start()

    def meet(self, reqs):
        """The batch of the step that begins. What has ended is not in it."""
        with self._lock:
            self._is_in_step = True
            gone = self._met.keys() - {req.rid for req in reqs}
            self._settle_all([req_id for req_id in gone if self._met[req_id].has_ended()])
            for req in reqs:
                met = self._met.get(req.rid)
                if met is not None:
                    if met.req is req:
                        continue
                    self._settle(req.rid)
                fields = getattr(req.sampling_params, "custom_params", None) or {}
                fields = fields if announces(fields) else {}
                known = start(self.client, req.rid, list(req.origin_input_ids_unpadded), fields)
                self._met[req.rid] = Met(req, known)

    def batch_get(self, req_ids, batch_tokens, total_lens):
        """The nodes of all requests, and which of them stand before which: int64 arrays of batch * n and batch * n * n."""
        nodes = np.array(self.chains(req_ids, batch_tokens, total_lens), dtype=np.int64)
        size = len(req_ids) * len(self._chain)
        if size > len(self._mask):
            self._mask = np.tile(self._chain, len(req_ids))
        return nodes.reshape(-1), self._mask[:size]

    def chains(self, req_ids, tails, total_lens):
        """For each request the last token of its text, which ends with the tail and is so long, and the draft behind it."""
        wanted = []
        with self._lock:
            for req_id, tail, total_len in zip(req_ids, tails, total_lens):
                met = self._met[req_id]
                self._say(req_id, met, tail, total_len)
                is_wanted = met.ending is not None and is_drafted_for(met.req.sampling_params)
                wanted.append((req_id, self.draft_token_num - 1 if is_wanted else 0))
            self._is_in_step = False
        chains = []
        for tail, (tokens, *_) in zip(tails, self.client.propose(wanted)):
            chain = [tail[-1], *tokens]
            chains.append(chain + chain[-1:] * (self.draft_token_num - len(chain)))
        return chains

    def erase_match_state(self, req_ids):
        """These are not in the batch any more: they have ended, or SGLang made room with them."""
        with self._lock:
            self._settle_all(req_ids)

    def reset(self):
        """SGLang's caches were flushed, for which nothing may run. It has forgotten whom its last batch had, so nobody else
        tells of their end. What is remembered here is the mesh's."""
        with self._lock:
            self._settle_all(list(self._met))

    def look(self):
        """For when nothing runs: SGLang tells of an end with the next step only. What had ended at the last look, too, is
        settled; one look alone could find SGLang in the midst of ending it."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            ended = {met: req_id for req_id, met in self._met.items() if met.has_ended()}
            due = [(req_id, met) for met, req_id in ended.items() if met in self._had_ended]
            self._had_ended = set(ended)
        finally:
            self._lock.release()
        for req_id, met in due:
            # One at a time: a step that begins meanwhile waits for no more than that, and settles the others itself.
            if not self._lock.acquire(blocking=False):
                return
            try:
                if not self._is_in_step and self._met.get(req_id) is met:
                    self._settle(req_id)
            finally:
                self._lock.release()

    def synchronize(self):
        """What was said is known at once."""

    def batch_put(self, batch_tokens):
        """Each request's text is followed, so its last tokens are not needed once more."""

    def load_external_corpus_named(self, corpus_id, chunks):
        raise ValueError("drafts come from the draft store: import documents there, with `refrain store import`")

    def commit_external_corpus_load(self, corpus_id, loaded_token_count):
        """Nothing was loaded."""

    def remove_external_corpus(self, corpus_id):
        raise ValueError(f"no corpus is called {corpus_id!r}: drafts come from the draft store")

    def list_external_corpora(self):
        return {}

    def close(self):
        """The process ends: what the last batch said is handed on, too."""
        self._is_closed.set()
        self.reset()
        self.client.drain(DRAIN_SECONDS)

    def _say(self, req_id, met, tail, total_len):
        """Follows a text to this length. Steps that overlap bring tokens before the request has them: those of one step, and
        the tail holds as many."""
        said = list(met.req.output_ids[met.known :])
        ahead = total_len - met.prompt_len - met.known - len(said)
        if ahead > 0:
            said += tail[-ahead:]
        if said:
            self._take(req_id, met, said)

    def _take(self, req_id, met, said):
        met.known += len(said)
        if met.ending is None:
            return
        said, reason = met.ending.take(said)
        self.client.extend(req_id, said)
        if reason:
            met.ending = None
            self.client.finish(req_id, reason)

    def _settle_all(self, req_ids):
        for req_id in req_ids:
            if req_id in self._met:
                self._settle(req_id)

    def _settle(self, req_id):
        met = self._met.pop(req_id)
        output = met.req.output_ids_through_stop
        if len(output) > met.known:
            self._take(req_id, met, list(output[met.known :]))
        if met.ending is not None:
            reason = met.req.finished_reason
            self.client.finish(req_id, reason.to_json()["type"] if reason else None)


def look_now_and_then(corpus, is_closed):
    """On a thread of its own, which keeps no corpus (a weak reference) alive."""
    while not is_closed.wait(LOOK_EVERY_SECONDS):
        here = corpus()
        if here is None:
            return
        here.look()
        del here
