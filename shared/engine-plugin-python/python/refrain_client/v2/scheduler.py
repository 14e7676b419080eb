"""The scheduler of vLLM's Model Runner V2 with drafts from a mesh."""

import time

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from refrain_client.announced import PREFIX
from refrain_client.followed import FollowedRequests, client_of
from refrain_client.v2.index import DEPTH
from refrain_client.v2.lengths import lengths_of
from refrain_client.v2.news import Place, StepNews
from refrain_client.v2.refusals import SCHEDULER, has_head, refuse

# Steps between two questions for what matches are worth.
ODDS_EVERY_STEPS = 256


class RefrainAsyncScheduler(AsyncScheduler):
    """vLLM's asynchronous scheduler, which follows a mesh's drafts for the devices and chooses how long drafts are."""

    def __init__(self, vllm_config, *others, **named):
        why_not = refuse(vllm_config)
        if why_not:
            raise ValueError(f"{SCHEDULER}: {why_not}")
        super().__init__(vllm_config, *others, **named)
        self.drafts = client_of(vllm_config, devices=True)
        self.followed = FollowedRequests(self.drafts)
        self.groups = Groups()
        self.lengths = lengths_of(vllm_config)
        self.has_head = has_head(vllm_config)
        # By request id: where its drafts are, and the most places that its own rules allow.
        self.places = {}
        # Whether the guard holds back the drafts whose length was chosen last.
        self.withholds = False
        self.steps = 0
        self.last_output_at = 0.0

    def schedule(self, *others, **named):
        if not self.has_head:
            # The drafts of the step in progress have all places. How many of them this step verifies is chosen now.
            decoding = [request for request in self.running if request.spec_token_ids]
            places = self._length(decoding)
            for request in decoding:
                request.spec_token_ids = [-1] * self._within(request, places)
        withheld = self.withholds
        output = super().schedule(*others, **named)
        output.refrain = self._news(output)
        # vLLM hands this output back with what the step brought. Ranks ignore these.
        output.refrain_scheduled = time.perf_counter(), withheld
        return output

    def _update_after_schedule(self, scheduler_output):
        for new in scheduler_output.scheduled_new_reqs:
            if new.req_id not in self.followed:
                self._begin(self.requests[new.req_id])
        if not self.has_head:
            scheduler_output.num_spec_tokens_to_schedule = self.num_spec_tokens
        super()._update_after_schedule(scheduler_output)
        if self.has_head:
            # What the head will bring is not known here, so its drafts are as long as vLLM has them.
            for req_id in scheduler_output.num_scheduled_tokens:
                request = self.requests[req_id]
                request.spec_token_ids = [-1] * self._within(request, len(request.spec_token_ids))

    def update_from_output(self, scheduler_output, model_runner_output):
        before = {}
        for req_id in scheduler_output.num_scheduled_tokens:
            request = self.requests.get(req_id)
            if request is not None and not request.is_finished():
                before[req_id] = request, request.num_tokens
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self._observe(scheduler_output, before)
        for req_id in self.followed.end_gone(self.requests):
            self.places.pop(req_id, None)
            self.groups.leave(req_id)
        if scheduler_output.refrain.has_loads():
            self.drafts.devices_have_loaded()
        return outputs

    def _begin(self, request):
        fields = self.followed.begin(request)
        req_id = request.request_id
        namespace, places_max = self.drafts.place(req_id) or (None, self.num_spec_tokens)
        group, written = fields.get(PREFIX + "group"), fields.get(PREFIX + "written")
        self.places[req_id] = Place(
            namespace=-1 if namespace is None else namespace,
            group=-1 if namespace is None or group is None else self.groups.join(req_id, namespace, str(group)),
            written=written if isinstance(written, int) else 0,
            places_max=places_max,
        )

    def _length(self, decoding):
        """The length of the drafts of a step that decodes for these requests."""
        if not decoding:
            return self.num_spec_tokens
        length, self.withholds = self.drafts.length([request.request_id for request in decoding], self.lengths)
        return length

    def _within(self, request, places):
        """So many places, or those that a request's own rules allow."""
        place = self.places.get(request.request_id)
        return places if place is None else min(places, place.places_max)

    def _news(self, scheduler_output):
        self.steps += 1
        return StepNews(
            commands=self.drafts.device_commands(),
            odds=self.drafts.match_odds(DEPTH) if self.steps % ODDS_EVERY_STEPS == 0 else [],
            began={new.req_id: self.places[new.req_id] for new in scheduler_output.scheduled_new_reqs},
        )

    def _observe(self, scheduler_output, before):
        """Tells the client of the tokens that a step brought, and of the time that it took."""
        scheduled_at, withheld = scheduler_output.refrain_scheduled
        now = time.perf_counter()
        # A step begins when the one before it ends, or when it is scheduled if nothing runs then.
        seconds = now - max(self.last_output_at, scheduled_at)
        self.last_output_at = now
        parts = []
        for req_id, (request, length) in before.items():
            emitted = request.num_tokens - length
            places = len(scheduler_output.scheduled_spec_decode_tokens.get(req_id, ()))
            computed = scheduler_output.num_scheduled_tokens[req_id]
            prompt_tokens = computed if computed - places > 1 or emitted == 0 else 0
            parts.append((req_id, prompt_tokens, places, emitted))
            if req_id in self.followed and emitted:
                self.drafts.extend(req_id, self.followed.take_new_tokens(req_id))
        if parts:
            self.drafts.observe_step(seconds, parts, withheld)


class Groups:
    """Numbers of groups whose requests run."""

    def __init__(self):
        # By namespace and name: the number, and the requests.
        self._groups = {}
        # By request id: its key.
        self._keys = {}
        self._last = 0

    def join(self, req_id, namespace, name):
        """The number of a group, which a request of it joins."""
        key = namespace, name
        if key not in self._groups:
            self._last += 1
            self._groups[key] = self._last, set()
        number, members = self._groups[key]
        members.add(req_id)
        self._keys[req_id] = key
        return number

    def leave(self, req_id):
        key = self._keys.pop(req_id, None)
        if key is not None:
            _, members = self._groups[key]
            members.discard(req_id)
            if not members:
                del self._groups[key]
