"""Where a draft of vLLM's may be replaced by another, and its output stays what it was."""

# Ways of drafting whose drafts are lists of tokens on their way through the scheduler.
METHODS = {"ngram", "eagle", "eagle3"}
# Rules under which any draft of certain tokens leaves the engine's distribution as it is.
LOSSLESS_RULES = {"standard", "block"}


def refuse(vllm_config):
    """Why drafts must not be overridden there, or None."""
    speculation = vllm_config.speculative_config
    if speculation is None:
        return "the engine verifies no drafts: start it with a speculative configuration, such as n-grams"
    if speculation.method not in METHODS:
        return f"drafts of method {speculation.method} do not pass through the scheduler; {sorted(METHODS)} do"
    if speculation.draft_sample_method != "greedy":
        return (
            f"draft_sample_method is {speculation.draft_sample_method}: the engine would judge another draft by the "
            'chances of its own, and its output would change; set it to "greedy"'
        )
    if speculation.rejection_sample_method not in LOSSLESS_RULES:
        return f"rejection_sample_method is {speculation.rejection_sample_method}, which is not lossless"
    if vllm_config.scheduler_config.async_scheduling:
        return "the engine schedules ahead of its drafts: start it with --no-async-scheduling"
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        return "with pipeline parallelism drafts do not pass through the scheduler"
    if getattr(vllm_config, "use_v2_model_runner", False):
        return "the V2 runner keeps its drafts to itself: set VLLM_USE_V2_MODEL_RUNNER=0"
    return None
