"""The speculators of vLLM's Model Runner V2 that draft from the device index."""

import os

import torch
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from refrain_client import device_words_max
from refrain_client.v2.drafter import DeviceDrafter


class RefrainSpeculator(BaseSpeculator):
    """Drafts from the device index alone."""

    supports_mm_inputs = False
    # Drafts are certain, so the rejection sampler is exact for any of them.
    draft_logits = None
    enable_adaptive_verification = False

    def __init__(self, vllm_config, device, req_states):
        self.drafter = drafter_of(vllm_config, device, req_states)

    def init_cudagraph_manager(self, cudagraph_mode):
        # Drafts are made outside of graphs, and before the first request their kernels are compiled.
        self.drafter.warm_up()

    def capture(self):
        pass

    @torch.inference_mode()
    def propose(
        self, input_batch, attn_metadata, slot_mappings, last_hidden_states, aux_hidden_states, num_sampled,
        num_rejected, last_sampled, *others, num_speculative_tokens=None, dummy_run=False, **named,
    ):  # fmt: skip
        if dummy_run:
            return self.drafter.nothing(input_batch.num_reqs)
        return self.drafter.propose(input_batch.idx_mapping, num_sampled, last_sampled, num_speculative_tokens)


class RefrainEagleSpeculator(EagleSpeculator):
    """An EAGLE-3 head, whose draft gives way where the device index is expected to bring more.

    The runner asks whether a speculator has a draft model, so this is a subclass and not a wrapper.
    """

    def __init__(self, vllm_config, device, req_states):
        super().__init__(vllm_config, device)
        self.drafter = drafter_of(vllm_config, device, req_states)

    def init_cudagraph_manager(self, cudagraph_mode):
        super().init_cudagraph_manager(cudagraph_mode)
        self.drafter.warm_up()

    def propose(
        self, input_batch, attn_metadata, slot_mappings, last_hidden_states, aux_hidden_states, num_sampled,
        num_rejected, last_sampled, *others, num_speculative_tokens=None, dummy_run=False, **named,
    ):  # fmt: skip
        of_head = super().propose(
            input_batch, attn_metadata, slot_mappings, last_hidden_states, aux_hidden_states, num_sampled,
            num_rejected, last_sampled, *others, num_speculative_tokens=num_speculative_tokens, dummy_run=dummy_run,
            **named,
        )  # fmt: skip
        if dummy_run:
            return of_head
        with torch.inference_mode():
            rows = input_batch.idx_mapping
            drafts = self.drafter.propose(rows, num_sampled, last_sampled, num_speculative_tokens)
            return self.drafter.index.better(drafts, of_head, rows, num_sampled, num_rejected)


def drafter_of(vllm_config, device, req_states):
    places = vllm_config.speculative_config.num_speculative_tokens
    words_max = device_words_max(os.environ.get("REFRAIN_CLIENT_CONFIG"))
    return DeviceDrafter(req_states, places, words_max, device)


