"""Stands in for modules that a trainer imports only for training or for a GPU. The code of rollouts stays as it is."""

import dataclasses
import sys
import types
from pathlib import Path


def is_missing(name):
    """Whether no file has this module. Nothing is imported to find out."""
    path = name.replace(".", "/")
    return not any(Path(root, path).is_dir() or Path(root, f"{path}.py").exists() for root in sys.path)


def stub(name, **attributes):
    """Puts a module in the place of `name`, and empty packages in the place of missing parents."""
    parent = name.rpartition(".")[0]
    if parent and parent not in sys.modules and is_missing(parent):
        stub(parent)
    module = types.ModuleType(name)
    module.__path__ = []
    vars(module).update(attributes)
    sys.modules[name] = module


def unused(*_, **__):
    raise NotImplementedError("this part of the trainer is a stub here")


class Nothing:
    """A base class without a use."""


@dataclasses.dataclass
class ServerArgs:
    """A few settings of SGLang, of those that slime compares with the ones of an engine that it did not start."""

    model_path: str = ""
    host: str = ""
    port: int = 0
    nnodes: int = 1
    node_rank: int = 0
    tp_size: int = 1
    enable_memory_saver: bool = False
    enable_metrics: bool = False


# Modules that slime imports for training. The rewards are here for a folder with only a part of slime.
SLIME = {
    "sglang.srt.server_args": {"ServerArgs": ServerArgs},
    "sglang.srt.utils": {"kill_process_tree": unused},
    "slime.ray.ray_actor": {"RayActor": Nothing},
    "slime.rollout.rm_hub.deepscaler": {"get_deepscaler_rule_based_reward": unused},
    "slime.rollout.rm_hub.f1": {"f1_score": unused},
    "slime.rollout.rm_hub.gpqa": {"compute_gpqa_reward": unused},
    "slime.rollout.rm_hub.math_dapo_utils": {"compute_score": unused},
    "slime.rollout.rm_hub.math_utils": {"extract_answer": unused, "grade_answer_verl": unused},
}


def for_slime():
    """Adds the stubs that slime needs here, and returns their names."""
    made = []
    for name, attributes in SLIME.items():
        if is_missing(name):
            stub(name, **attributes)
            made.append(name)
    # It numbers the devices of this machine, and there are none.
    stub("slime.utils.accelerator", resolve_visible_device_id=int)
    return [*made, "slime.utils.accelerator"]


def for_prime_rl():
    """Adds the stubs that the clients of prime-rl's orchestrator need here, and returns their names."""
    import logging

    import pydantic

    class ClientConfig(pydantic.BaseModel):
        base_url: str
        admin_base_url: list[str] | None = None
        api_key_var: str = "EMPTY_KEY"
        headers: dict[str, str] = {}
        headers_from_env: dict[str, str] = {}
        skip_model_check: bool = False
        wait_for_ready_timeout: int = 60
        dynamo: None = None

    class GenerateResponse(pydantic.BaseModel):
        """The field of vLLM's answer that the scorer reads."""

        prompt_logprobs: list[dict | None] | None = None

    # Its configuration imports the trainer, its logger the packages of the whole project, and vLLM needs a GPU.
    stub("prime_rl.configs.shared", ClientConfig=ClientConfig)
    stub("prime_rl.utils.logger", get_logger=lambda: logging.getLogger("prime_rl"))
    made = ["prime_rl.configs.shared", "prime_rl.utils.logger"]
    name = "vllm.entrypoints.scale_out.token_in_token_out.protocol"
    if is_missing(name):
        stub(name, GenerateResponse=GenerateResponse)
        made.append(name)
    return made
