"""A backend of Triton under the name `cpu` that compiles nothing: TRITON_INTERPRET=1 runs all kernels. With it vLLM
takes its Model Runner V2 on a CPU.

`allow_async` is a plugin of vLLM, which switches asynchronous scheduling off on a CPU although its runner works with
it. Then the engine schedules a step ahead, as on a GPU.
"""


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
