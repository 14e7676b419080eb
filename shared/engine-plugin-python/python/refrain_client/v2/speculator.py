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

    def __init__(self, vllm_config, device, req_states):
        self.drafter = drafter_of(vllm_config, device, req_states)
        self.enable_adaptive_verification = vllm_config.speculative_config.enable_adaptive_verification
        # Float32 [rows, places], in the order of the batch.
        self.draft_token_confidence_probs = self.drafter.index.confidences

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
        drafts = self.drafter.propose(input_batch.idx_mapping, num_sampled, last_sampled, num_speculative_tokens)
        look_ahead(self, num_sampled)
        return drafts


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
            rows, index = input_batch.idx_mapping, self.drafter.index
            drafts = self.drafter.propose(rows, num_sampled, last_sampled, num_speculative_tokens)
            is_better = index.is_better(rows, num_sampled, num_rejected)[:, None]
            batch = len(rows)
            confidences = self.draft_token_confidence_probs[:batch]
            confidences.copy_(torch.where(is_better, index.confidences[:batch], confidences))
            look_ahead(self, num_sampled)
            return torch.where(is_better, drafts, of_head)

    def observe_verification(self, idx_mapping, num_sampled, num_rejected):
        # What came of another's draft says nothing of the head's.
        of_head = self.drafter.index.has_other[idx_mapping]
        nothing = torch.zeros_like(num_sampled)
        super().observe_verification(
            idx_mapping, torch.where(of_head, num_sampled, nothing), torch.where(of_head, num_rejected, nothing)
        )


def look_ahead(speculator, sampled):
    """Tells adaptive verification what to expect of the next drafts: it chooses the number of tokens to verify before
    they exist. `plugin.tell_of_next_drafts` passes it on."""
    if speculator.enable_adaptive_verification:
        confidences = speculator.draft_token_confidence_probs
        index = speculator.drafter.index
        confidences.refrain_next = index.next_confidences(confidences[: len(sampled)], sampled)


def drafter_of(vllm_config, device, req_states):
    places = vllm_config.speculative_config.num_speculative_tokens
    words_max = device_words_max(os.environ.get("REFRAIN_CLIENT_CONFIG"))
    return DeviceDrafter(req_states, places, words_max, device)


