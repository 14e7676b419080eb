"""The drafts of a worker: the device index and the table of rows, brought up to date by the news of each step."""

import numpy as np
import torch

from refrain_client.v2.index import DeviceIndex, Limits
from refrain_client.v2.news import Place
from refrain_client.v2.rows import Rows

# Requests without a namespace, or of which the scheduler said nothing: those of vLLM's own warm-up.
NOWHERE = Place()


class DeviceDrafter:
    """Drafts for the rows of a runner.

    `req_states` is vLLM's `RequestState`: `all_token_ids.gpu` int32 [rows, text], `total_len.gpu` int32 [rows], and
    `req_id_to_index`. Its texts must be dense on the device.
    """

    def __init__(self, req_states, places, words_max, device, **limits):
        self.limits = Limits(words_max, **limits)
        self.req_states = req_states
        rows = req_states.max_num_reqs
        self.rows = Rows(self.limits, rows)
        self.index = DeviceIndex(self.limits, rows, req_states.max_model_len, places, device)
        # By request id: its row.
        self._rows = {}
        # By number of a segment: its slot in the table of segments, its place, and its length.
        self._loaded = {}
        self._free_slots = list(range(self.limits.segments_max))

    def take_news(self, news):
        """Carries out the message of a step, before its requests get their rows."""
        for command, *values in news.commands:
            if command == "drop":
                self._drop(values[0])
            else:
                self._load(*values)
        for namespace, odds in news.odds:
            self.index.set_odds(namespace, odds)

    def take_step(self, new_requests, news):
        """Takes the news of a step and the requests that got their rows with it. vLLM's own warm-up has no news."""
        if news is not None:
            self.take_news(news)
        began = {} if news is None else news.began
        for new in new_requests:
            place = began.get(new.req_id, NOWHERE)
            # A request that gets more of its prompt gets another row without leaving the old one.
            self.end(new.req_id)
            row = self._rows[new.req_id] = self.req_states.req_id_to_index[new.req_id]
            self.rows.begin(row, place.namespace, place.group, max(new.prompt_len - place.written, 0))
        table = self.rows.take()
        if table is not None:
            self.index.set_rows(table)

    def end(self, req_id):
        row = self._rows.pop(req_id, None)
        if row is not None:
            self.rows.end(row)

    def warm_up(self):
        """Compiles the kernels, before the first request waits for them. The row that it drafts for has no text."""
        device = self.index.device
        one = torch.zeros(1, dtype=torch.int64, device=device)
        self.propose(one, torch.zeros(1, dtype=torch.int32, device=device), self.req_states.last_sampled_tokens)

    def nothing(self, batch):
        """Drafts of a run that is none: the shape alone counts."""
        return self.index.drafts[:batch]

    def propose(self, rows, num_sampled, last_sampled, wanted=None):
        """Drafts for the rows of a step, int64 [batch, places]."""
        states = self.req_states
        wanted = self.index.places if wanted is None else wanted
        last = last_sampled.view(-1)
        return self.index.propose(states.all_token_ids.gpu, states.total_len.gpu, rows, num_sampled, last, wanted)

    def _load(self, number, namespace, at, text_words, file):
        slot = self._free_slots.pop()
        words = np.fromfile(file, dtype="<i4")
        self._loaded[number] = slot, at, len(words)
        self.index.load(slot, namespace, at, words, text_words)
        self.rows.mount(namespace, slot)

    def _drop(self, number):
        slot, at, words = self._loaded.pop(number)
        self.rows.unmount(slot)
        self.index.drop(slot, at, words)
        self._free_slots.append(slot)
