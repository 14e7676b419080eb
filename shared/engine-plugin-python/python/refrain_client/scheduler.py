"""A scheduler for vLLM that overrides the engine's own drafts where Refrain's are expected to bring more.

    --scheduler-cls refrain_client.scheduler.RefrainScheduler --no-async-scheduling

The engine drafts as configured, with n-grams or an EAGLE-3 head. Once per step, the drafts of all requests pass
through here on their way to the next step, and some are replaced. That is lossless only where the engine treats draft
tokens as certain: `lossless.py` refuses the other configurations. vLLM does not promise to keep this interface;
docs/vllm.md lists the versions that it was tested with.
"""

from vllm.v1.core.sched.scheduler import Scheduler

from refrain_client.followed import FollowedRequests, client_of
from refrain_client.lossless import refuse


class RefrainScheduler(Scheduler):
    """vLLM's scheduler, with a replica of the mesh's drafts."""

    def __init__(self, vllm_config, *others, **named):
        why_not = refuse(vllm_config)
        if why_not:
            raise ValueError(f"RefrainScheduler: {why_not}")
        super().__init__(vllm_config, *others, **named)
        self.drafts = client_of(vllm_config)
        self.followed = FollowedRequests(self.drafts)

    def update_draft_token_ids(self, draft_token_ids):
        positions, steps = [], []
        for position, req_id in enumerate(draft_token_ids.req_ids):
            request = self.requests.get(req_id)
            if request is None or request.is_finished() or request.is_prefill_chunk:
                continue
            if req_id not in self.followed:
                self.followed.begin(request)
            room = min(self.num_spec_tokens, self.max_model_len - request.num_tokens - 1)
            positions.append(position)
            engine_draft = list(draft_token_ids.draft_token_ids[position])
            steps.append((req_id, self.followed.take_new_tokens(req_id), max(room, 0), engine_draft))
        drafts = list(draft_token_ids.draft_token_ids)
        for position, better in zip(positions, self.drafts.step(steps)):
            if better is not None:
                drafts[position] = better
        self.followed.end_gone(self.requests)
        super().update_draft_token_ids(type(draft_token_ids)(draft_token_ids.req_ids, drafts))
