"""Puts Refrain's speculator in the place of vLLM's, in each worker of Model Runner V2."""

import inspect
import sys

from refrain_client.v2.refusals import SCHEDULER, has_head, refuse

# The parameters of `propose` in the versions of vLLM that were tested.
PROPOSE = (
    "self input_batch attn_metadata slot_mappings last_hidden_states aux_hidden_states num_sampled num_rejected "
    "last_sampled next_prefill_tokens temperature seeds dp_sync_state dummy_run skip_attn_for_dummy_run mm_inputs "
    "is_profile num_speculative_tokens"
).split()
RUNNER = "vllm.v1.worker.gpu.model_runner"


def register():
    """Wraps `init_speculator`. Nothing changes unless the user named Refrain's scheduler for V2."""
    try:
        import vllm.v1.worker.gpu.spec_decode as spec_decode
    except ImportError:
        # A version without the runner.
        return
    theirs = spec_decode.init_speculator
    if getattr(theirs, "is_refrains", False):
        return

    def init_speculator(vllm_config, device, req_states):
        if not is_chosen(vllm_config):
            return theirs(vllm_config, device, req_states)
        return speculator(vllm_config, device, req_states)

    init_speculator.is_refrains = True
    spec_decode.init_speculator = init_speculator
    # The runner imports the function by its name.
    if runner := sys.modules.get(RUNNER):
        runner.init_speculator = init_speculator


def is_chosen(vllm_config):
    """Whether the user named Refrain's scheduler for V2."""
    chosen = vllm_config.scheduler_config.scheduler_cls
    name = chosen if isinstance(chosen, str) else getattr(chosen, "__name__", "")
    return name.rsplit(".", 1)[-1] == SCHEDULER


def speculator(vllm_config, device, req_states):
    """Refrain's speculator, beside an EAGLE-3 head if there is one."""
    from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

    from refrain_client.v2 import speculator as speculators

    why_not = refuse(vllm_config)
    if why_not is None and list(inspect.signature(BaseSpeculator.propose).parameters) != PROPOSE:
        why_not = "this version of vLLM calls speculators in another way than the tested ones"
    if why_not:
        raise ValueError(f"{SCHEDULER}: {why_not}")
    if has_head(vllm_config):
        make_dense(req_states)
        kind = speculators.RefrainEagleSpeculator
    else:
        kind = speculators.RefrainSpeculator
    made = kind(vllm_config, device, req_states)
    tell_of_requests(sys.modules[RUNNER].GPUModelRunner)
    if vllm_config.speculative_config.enable_adaptive_verification:
        from vllm.v1.worker.gpu.spec_decode.adaptive_verification import AdaptiveVerificationManager

        tell_of_next_drafts(AdaptiveVerificationManager)
    return made


def make_dense(req_states):
    """Keeps the texts of requests on the device. With a head, vLLM keeps them in host memory, which kernels read over
    the bus."""
    from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor

    shape = (req_states.max_num_reqs, req_states.max_model_len)
    texts = req_states.all_token_ids
    req_states.all_token_ids = StagedWriteTensor(
        shape, dtype=texts.gpu.dtype, device=req_states.device, uva_instead_of_gpu=False
    )


def tell_of_requests(runner):
    """Has the runner tell the speculator of each step's news, and of requests that get or leave their rows. vLLM tells
    a speculator nothing of these. Both methods run at the beginning of a step, on all ranks."""
    if getattr(runner.add_requests, "is_refrains", False):
        return
    add, finish = runner.add_requests, runner.finish_requests

    def finish_requests(self, scheduler_output):
        drafter = getattr(self.speculator, "drafter", None)
        if drafter is not None:
            for req_id in scheduler_output.finished_req_ids | (scheduler_output.preempted_req_ids or set()):
                drafter.end(req_id)
        finish(self, scheduler_output)

    def add_requests(self, scheduler_output):
        add(self, scheduler_output)
        drafter = getattr(self.speculator, "drafter", None)
        if drafter is not None:
            drafter.take_step(scheduler_output.scheduled_new_reqs, getattr(scheduler_output, "refrain", None))

    add_requests.is_refrains = True
    runner.add_requests, runner.finish_requests = add_requests, finish_requests


def tell_of_next_drafts(manager):
    """Has adaptive verification choose the number of tokens by what is expected of the next drafts, and the tokens by
    the drafts themselves. vLLM takes those of the step before for both, which tell little of a single request."""
    if getattr(manager.record_confidences, "is_refrains", False):
        return
    record = manager.record_confidences

    def record_confidences(self, confidences, input_batch):
        expected = getattr(confidences, "refrain_next", None)
        if expected is None:
            return record(self, confidences, input_batch)
        # The host gets a copy of these.
        record(self, expected, input_batch)
        self._confidence_probs[input_batch.idx_mapping] = confidences[: input_batch.num_reqs]

    record_confidences.is_refrains = True
    manager.record_confidences = record_confidences
