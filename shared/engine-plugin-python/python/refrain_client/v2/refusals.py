"""What the drafts inside Model Runner V2 were not tested with, and refuse by name."""

from refrain_client.lossless import refuse_rules

SCHEDULER = "RefrainAsyncScheduler"
# Versions of vLLM that were tested.
VERSIONS = ("0.33.",)
HEADS = ("eagle3",)
METHODS = ("ngram", *HEADS)


def has_head(vllm_config):
    """Whether the engine has a head, beside which the device index drafts."""
    return vllm_config.speculative_config.method in HEADS


def refuse(vllm_config):
    """The reason why a configuration is refused, or None."""
    import vllm

    speculation, parallel = vllm_config.speculative_config, vllm_config.parallel_config
    if not vllm.__version__.startswith(VERSIONS):
        return f"vLLM {vllm.__version__} was not tested; {', '.join(version + 'x' for version in VERSIONS)} was"
    if speculation is None or speculation.method not in METHODS:
        found = "none" if speculation is None else speculation.method
        return f'the speculative method is {found}: start the engine with "ngram", or with "eagle3" and a head'
    if not vllm_config.use_v2_model_runner:
        return (
            "the engine runs the V1 model runner: leave out what makes vLLM fall back to it, or use "
            '--speculative-config \'{"method": "suffix"}\' without this scheduler, as docs/vllm.md tells'
        )
    if not vllm_config.scheduler_config.async_scheduling:
        return "asynchronous scheduling is off: leave out --no-async-scheduling"
    if why_not := refuse_rules(speculation):
        return why_not
    if getattr(speculation, "watermark_config", None) is not None or getattr(vllm_config, "watermark_config", None):
        return "watermarks are drawn with drafts: leave them out"
    if parallel.pipeline_parallel_size > 1:
        return "pipeline parallelism was not tested"
    if parallel.data_parallel_size > 1:
        return "data parallelism inside one engine was not tested: start one engine for each replica"
    if getattr(vllm_config, "lora_config", None) is not None:
        return "LoRA adapters were not tested: vLLM's own verification of drafts fails with them on a CPU"
    if getattr(parallel, "nnodes", 1) > 1:
        return "the devices are on several machines, and texts reach them through a folder of one"
    return None
