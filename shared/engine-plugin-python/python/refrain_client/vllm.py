"""The plugin for vLLM: `method: suffix` drafts from a Refrain mesh.

vLLM loads it in each of its processes (entry point `vllm.general_plugins`). It does nothing unless a draft store is
configured (REFRAIN_CLIENT_STORE_URL or REFRAIN_CLIENT_STORE_URLS, or REFRAIN_CLIENT_CONFIG). No file of vLLM or of
arctic-inference is changed: only in this process, the module from which vLLM imports the suffix cache is replaced by
Refrain's.
"""

import importlib.util
import os
import sys
import types
import weakref
from importlib.machinery import ModuleSpec
from pathlib import Path

from refrain_client.announced import announces
from refrain_client.ending import Ending
from refrain_client.v2 import plugin

PACKAGE = "arctic_inference"
MODULE = "arctic_inference.suffix_decoding"


def register():
    """The entry point, which vLLM calls once or more."""
    if not any(f"REFRAIN_CLIENT_{name}" in os.environ for name in ("STORE_URL", "STORE_URLS", "CONFIG")):
        return
    if importlib.util.find_spec(PACKAGE) is None:
        package = types.ModuleType(PACKAGE, "Replaces a package that is not installed.")
        package.__path__ = []
        package.__spec__ = ModuleSpec(PACKAGE, loader=None, is_package=True)
        sys.modules[PACKAGE] = package
    module = types.ModuleType(MODULE, "Refrain's suffix cache under the name that vLLM imports.")
    module.__spec__ = ModuleSpec(MODULE, loader=None)
    module.SuffixDecodingCache = SuffixDecodingCache
    sys.modules[MODULE] = module
    plugin.register()


def SuffixDecodingCache(*sizes, **named):
    """Returns the cache of this process: Refrain's where drafts are made, or else an empty one."""
    from vllm.config import get_current_vllm_config
    from vllm.distributed import parallel_state

    from refrain_client.suffix import SuffixDecodingCache

    # The scheduler takes the drafts of the first rank of a tensor-parallel group only. The other ranks would keep the
    # same outputs again.
    if parallel_state.model_parallel_is_initialized():
        if parallel_state.get_tensor_model_parallel_rank() != 0:
            return SuffixDecodingCache(*sizes, **named, client=NullClient())
    model = get_current_vllm_config().model_config
    folder = tokenizer_folder(model.tokenizer, model.tokenizer_revision)
    cache = SuffixDecodingCache(*sizes, **named, tokenizer=folder)
    announce_to(cache)
    return cache


class NullClient:
    """A client that keeps nothing and drafts nothing."""

    def start(self, *_, **__):
        return 0

    def refuse(self):
        pass

    def extend(self, *_):
        pass

    def finish(self, *_):
        pass

    def propose(self, requests, **_):
        return [([], 0.0, 0)] * len(requests)


def tokenizer_folder(name, revision):
    """The folder of tokenizer.json: `name` itself, or the downloaded files of the model of that name."""
    if (Path(name) / "tokenizer.json").exists():
        return name
    from huggingface_hub import hf_hub_download

    return str(Path(hf_hub_download(name, "tokenizer.json", revision=revision, local_files_only=True)).parent)


# The caches of this process to which requests are announced.
_caches = weakref.WeakSet()


def announce_to(cache):
    """Patches vLLM's batch to announce each request to the cache: its fields, its output so far, and the rules of its
    end. vLLM's proposer is not given these."""
    from vllm.v1.worker.gpu_input_batch import InputBatch

    _caches.add(cache)
    add_request = InputBatch.add_request
    if getattr(add_request, "announces", False):
        return

    def add_and_announce(self, request):
        params = request.sampling_params
        fields = params.extra_args if params else None
        fields = fields if announces(fields) else {}
        for cache in _caches:
            if request.req_id not in cache.active_requests:
                # A copy, because the engine changes its own.
                output = list(request.output_token_ids)
                cache.announce(request.req_id, fields, Ending.of_vllm(params, len(output)), output)
        return add_request(self, request)

    add_and_announce.announces = True
    InputBatch.add_request = add_and_announce
