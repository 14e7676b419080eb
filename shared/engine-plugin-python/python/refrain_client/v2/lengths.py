"""The lengths of drafts that an engine has."""


def lengths_of(vllm_config):
    """The lengths that a step may have, ascending: those that the user scheduled by batch size, for which vLLM captures
    graphs, else all places or none. Adaptive verification shortens drafts by itself."""
    speculation = vllm_config.speculative_config
    if speculation.enable_adaptive_verification:
        return [speculation.num_speculative_tokens]
    scheduled = speculation.num_speculative_tokens_per_batch_size or ()
    lengths = {0, *(places for _, _, places in scheduled)}
    if not scheduled:
        lengths.add(speculation.num_speculative_tokens)
    return sorted(lengths)
