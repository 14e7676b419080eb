"""Configurations of vLLM in which a draft may be replaced by another one without a change of the output."""

# Methods whose drafts pass through the scheduler as lists of tokens.
METHODS = {"ngram", "eagle", "eagle3"}
# Acceptance rules that keep the engine's distribution for any draft whose tokens count as certain.
LOSSLESS_RULES = {"standard", "block"}


def refuse(vllm_config):
    """The reason why drafts must not be overridden in this configuration, or None."""
    speculation = vllm_config.speculative_config
    if speculation is None:
        return "the engine verifies no drafts: start it with a speculative configuration, such as n-grams"
    if speculation.method not in METHODS:
        return f"drafts of method {speculation.method} do not pass through the scheduler; {sorted(METHODS)} do"
    if why_not := refuse_rules(speculation):
        return why_not
    if vllm_config.scheduler_config.async_scheduling:
        return "the engine schedules ahead of its drafts: start it with --no-async-scheduling"
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        return "with pipeline parallelism drafts do not pass through the scheduler"
    if getattr(vllm_config, "use_v2_model_runner", False):
        return "drafts of the V2 model runner do not pass through the scheduler: set VLLM_USE_V2_MODEL_RUNNER=0"
    return None


def refuse_rules(speculation):
    """The reason why drafts of others would change the output under the rules of acceptance, or None."""
    if speculation.draft_sample_method != "greedy":
        return (
            f"draft_sample_method is {speculation.draft_sample_method}: the engine would judge another draft by the "
            'probabilities of its own, and the output would change; set it to "greedy"'
        )
    if speculation.rejection_sample_method not in LOSSLESS_RULES:
        return f"rejection_sample_method is {speculation.rejection_sample_method}, which is not lossless"
    return None
