"""Engines as a trainer starts them, and other weights for them."""

import array
import json
import os
import shutil
import struct

from engines import SERVED, Vllm, call
from mesh import NEAR_TIE

# The tensor that other weights differ in. It is in the first layer, so all keys and values behind it differ as well.
CHANGED = "model.layers.0.mlp.down_proj.weight"


class TrainerVllm(Vllm):
    """A vLLM with its interface for trainers."""

    # Largest difference of log-probabilities that the order of sums makes, in float32.
    logprob_tolerance = 1e-3
    near_tie = NEAR_TIE
    # How the other weights differ, and how much further log-probabilities are from theirs than from the right ones.
    weights_factor, contrast = 1.25, 10
    # A second or two.
    long_tokens = 320
    # How long tokens may arrive after a pause.
    settle_seconds = 0.3
    served = SERVED
    is_sglang = False
    # What vime tells each engine, so that all rollouts end.
    abort_words = (("/pause?mode=abort", {}), ("/resume", {}))

    def __init__(self, work, port, model, number):
        cores = sorted(os.sched_getaffinity(0))
        core = cores[number % len(cores)]
        # Otherwise both engines take the same core.
        super().__init__(work, port, model, variables={"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_OMP_THREADS_BIND": str(core)})
        self.kind = f"trainer-vllm-{number}"

    def reference(self, prompt, tokens_max, endless=False):
        """The greedy output of the engine itself: its tokens and their log-probabilities."""
        fields = {**self.body(prompt, tokens_max), "logprobs": 0, "ignore_eos": endless}
        choice = call(self.url + self.generate_path, fields, timeout=120)[1]["choices"][0]
        return choice["token_ids"], choice["logprobs"]["token_logprobs"]

    def scores(self, prompt, output):
        """The log-probabilities of an output, read as a prompt."""
        fields = {**self.body(prompt + output, 1), "prompt_logprobs": 0}
        rows = call(self.url + self.generate_path, fields, timeout=120)[1]["choices"][0]["prompt_logprobs"]
        return [rows[len(prompt) + at][str(token)]["logprob"] for at, token in enumerate(output)]

    def stopped(self, prompt, tokens_max, stop):
        """The greedy output up to a text that ends it."""
        fields = {**self.body(prompt, tokens_max), "stop": [stop], "include_stop_str_in_output": True}
        return call(self.url + self.generate_path, fields, timeout=120)[1]["choices"][0]["token_ids"]

    def running(self):
        return self.metric(self.running_series)


def other_weights(model, folder, factor):
    """Makes a folder with a model whose weights differ from those of `model`, and returns it."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("eagle3", "*.md"))
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    (header_len,) = struct.unpack_from("<Q", data)
    tensor = json.loads(data[8 : 8 + header_len])[CHANGED]
    assert tensor["dtype"] == "BF16", tensor
    start, end = (8 + header_len + offset for offset in tensor["data_offsets"])
    # A bfloat16 is the upper half of a float32.
    halves = array.array("H", bytes(data[start:end]))
    wide = array.array("f", array.array("I", [half << 16 for half in halves]).tobytes())
    wide = array.array("f", [value * factor for value in wide])
    data[start:end] = array.array("H", [bits >> 16 for bits in array.array("I", wide.tobytes())]).tobytes()
    path.write_bytes(data)
    return folder
