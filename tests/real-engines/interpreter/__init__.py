"""A backend of Triton under the name `cpu` that compiles nothing: TRITON_INTERPRET=1 runs all kernels. With it vLLM
takes its Model Runner V2 on a CPU.

`allow_async` and `allow_adaptive` are plugins of vLLM. It switches asynchronous scheduling off on a CPU, and refuses
adaptive verification without CUDA graphs, although its runner works with both. Then the engine schedules a step ahead
and trims drafts, as on a GPU.
"""

import os


def allow_async():
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config
    if getattr(check, "allows_async", False):
        return

    def check_and_allow(cls, vllm_config):
        check(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    check_and_allow.allows_async = True
    CpuPlatform.check_and_update_config = classmethod(check_and_allow)


def allow_adaptive():
    """Adaptive verification without graphs. Nothing is profiled: a step costs as much as its tokens and ten more. The
    file that ADMITTED_FILE names gets the tokens that were scheduled and admitted in each step."""
    import numpy as np
    import vllm.v1.worker.gpu.model_runner as model_runner
    from vllm.config import VllmConfig
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.worker.gpu.spec_decode import adaptive_verification as adaptive

    def made(*, enable_adaptive_verification, req_states, query_start_loc, num_bonus_tokens, max_total_logits, **others):
        if not enable_adaptive_verification:
            return None
        manager = adaptive.AdaptiveVerificationManager(
            req_states, query_start_loc, num_bonus_tokens, max_total_logits=max_total_logits
        )
        tokens = np.arange(req_states.max_num_batched_tokens + 1, dtype=np.float64)
        manager.cost_tables = np.zeros(req_states.max_num_reqs + 1), 10 + tokens
        return manager

    reallocate = adaptive.AdaptiveVerificationManager.reallocate_drafts

    def reallocate_drafts(self, *arguments):
        scheduled = sum(self._batch_budget[0].values())
        result = reallocate(self, *arguments)
        if file := os.environ.get("ADMITTED_FILE"):
            with open(file, "a") as out:
                print(scheduled, result[2], file=out)
        return result

    adaptive.AdaptiveVerificationManager.reallocate_drafts = reallocate_drafts
    adaptive._assign_draft_token_budget_compiled = adaptive._assign_draft_token_budget
    model_runner.maybe_create_adaptive_verification_manager = made
    model_runner.resolve_adaptive_cudagraph_mode = lambda mode, **others: mode
    VllmConfig._validate_adaptive_verification = lambda self: None
    CPUAttentionBackend.supports_device_cpu_query_lens_mismatch = classmethod(lambda cls: True)
