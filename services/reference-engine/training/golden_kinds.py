"""Writes what transformers computes for small random networks of each kind, as a fixture for the engine's tests.

    OMP_NUM_THREADS=1 python golden_kinds.py ../src/tests/golden_kinds.json

The weights are those of the tests: `random_tensors` in ../src/tests/support.rs, in the order of `shapes`. So the
fixture holds logits only. It needs torch and transformers.
"""

import json
import sys

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

SEED = 21
TOKENS = 40
SHAPE = {
    "vocab_size": 61, "hidden_size": 48, "intermediate_size": 52, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 36, "max_position_embeddings": 200, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}  # fmt: skip
SCALED = {
    "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 20,
}  # fmt: skip
KINDS = {
    "llama": {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    "llama, scaled": {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "rope_scaling": SCALED},
    "llama, linear": {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"],
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    },
    "qwen2": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
    "qwen3": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
    "qwen3, tied": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True},
}  # fmt: skip


class Random:
    """The generator of the tests."""

    def __init__(self, state):
        self.state = state

    def next(self):
        self.state = (self.state * 6364136223846793005 + 1442695040888963407) % 2**64
        return self.state >> 33

    def float(self):
        return np.float32(np.float32(self.next()) / np.float32(1 << 30)) - np.float32(1)


def shapes(config):
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    query, key = (config[f"num_{kind}_heads"] * config["head_dim"] for kind in ("attention", "key_value"))
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}."
        yield name + "input_layernorm.weight", (hidden,)
        yield name + "post_attention_layernorm.weight", (hidden,)
        yield name + "self_attn.q_proj.weight", (query, hidden)
        yield name + "self_attn.k_proj.weight", (key, hidden)
        yield name + "self_attn.v_proj.weight", (key, hidden)
        yield name + "self_attn.o_proj.weight", (hidden, query)
        yield name + "mlp.gate_proj.weight", (inner, hidden)
        yield name + "mlp.up_proj.weight", (inner, hidden)
        yield name + "mlp.down_proj.weight", (hidden, inner)
        if config["model_type"] == "qwen2":
            yield name + "self_attn.q_proj.bias", (query,)
            yield name + "self_attn.k_proj.bias", (key,)
            yield name + "self_attn.v_proj.bias", (key,)
        if config["model_type"] == "qwen3":
            yield name + "self_attn.q_norm.weight", (config["head_dim"],)
            yield name + "self_attn.k_norm.weight", (config["head_dim"],)


def weights(config):
    random = Random(SEED)
    for name, shape in shapes(config):
        scale = np.float32(1) if len(shape) == 1 else np.float32(2) / np.sqrt(np.float32(shape[1]))
        values = [random.float() * scale for _ in range(int(np.prod(shape)))]
        yield name, torch.tensor(np.array(values, dtype=np.float32).reshape(shape))


def case(name, changes):
    config = {**SHAPE, **changes}
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**config), attn_implementation="eager", dtype=torch.float32
    )
    found = dict(weights(config))
    missing, unexpected = model.load_state_dict(found, strict=False)
    tied = ["lm_head.weight"] if config["tie_word_embeddings"] else []
    assert list(missing) == tied and not unexpected, (missing, unexpected)
    model.tie_weights()
    ids = [at * 7 % 61 for at in range(TOKENS)]
    with torch.no_grad():
        logits = model.eval()(torch.tensor([ids])).logits[0, -1]
    return {"name": name, "config": config, "ids": ids, "logits": [round(float(x), 5) for x in logits]}


with open(sys.argv[1], "w") as file:
    json.dump({"seed": SEED, "cases": [case(name, changes) for name, changes in KINDS.items()]}, file)
