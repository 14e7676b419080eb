"""Writes the tokenizer, the configuration and the weights in the common format."""

import json
import os
import re

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from generate import END, documents
from model import Config, Llama

SPECIAL = [END, "<|im_start|>", "<|im_end|>"]
# The template renders tools and calls as gen_tools.py writes them. It is kept with the shipped model.
TEMPLATE_FILE = os.path.join(os.path.dirname(__file__), "..", "model", "chat_template.jinja")
with open(TEMPLATE_FILE) as handle:
    TEMPLATE = handle.read()


def train_tokenizer(seed=11, count=12000):
    """Trains a byte-level BPE with GPT-2's pre-tokenizer and a vocabulary of exactly 4096."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=Config.vocab_size, special_tokens=SPECIAL, show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    # Runs of digits are cut to one digit here, so that no merge ever joins two
    # digits: a small model copies and adds numbers better digit by digit.
    parts = []
    stream = documents(seed)
    for _ in range(count):
        text = next(stream)[2]
        for special in SPECIAL:
            text = text.replace(special, " ")
        parts.append(re.sub(r"\d+", lambda m: m.group()[0], text))
    tokenizer.train_from_iterator(parts, trainer)
    assert tokenizer.get_vocab_size() == Config.vocab_size
    return tokenizer


def write_json(folder, name, value):
    with open(os.path.join(folder, name), "w") as handle:
        json.dump(value, handle, indent=2)
        handle.write("\n")


def write_static(folder, tokenizer):
    """Writes all files but the weights."""
    os.makedirs(folder, exist_ok=True)
    tokenizer.save(os.path.join(folder, "tokenizer.json"))
    ids = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 0}
    write_json(folder, "config.json", {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama",
        "torch_dtype": "bfloat16", **Config().as_dict(), **ids,
        "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
        "attention_dropout": 0.0, "initializer_range": 0.02, "pretraining_tp": 1,
        "rope_scaling": None, "tie_word_embeddings": True, "use_cache": True,
    })
    # Greedy by default: the model is made for tests that compare texts.
    write_json(folder, "generation_config.json", {**ids, "do_sample": False})
    added = {str(i): {"content": text, "lstrip": False, "normalized": False, "rstrip": False,
                      "single_word": False, "special": True} for i, text in enumerate(SPECIAL)}
    names = {"bos_token": None, "eos_token": SPECIAL[2], "pad_token": SPECIAL[0]}
    write_json(folder, "tokenizer_config.json", {
        "add_bos_token": False, "add_prefix_space": False, "added_tokens_decoder": added,
        "additional_special_tokens": SPECIAL[1:2], **names, "unk_token": None,
        "chat_template": TEMPLATE, "clean_up_tokenization_spaces": False,
        "model_max_length": Config.max_position_embeddings,
        "tokenizer_class": "PreTrainedTokenizerFast",
    })
    write_json(folder, "special_tokens_map.json", {
        "eos_token": SPECIAL[2], "pad_token": SPECIAL[0],
        "additional_special_tokens": SPECIAL[1:2],
    })
    with open(os.path.join(folder, "chat_template.jinja"), "w") as handle:
        handle.write(TEMPLATE)


def write_weights(folder, state):
    """Writes bfloat16 weights. One rename replaces the file, so a reader never sees half of it."""
    path = os.path.join(folder, "model.safetensors")
    tensors = {k: v.detach().to(torch.bfloat16).contiguous().clone() for k, v in state.items()}
    save_file(tensors, path + ".part", metadata={"format": "pt"})
    os.chmod(path + ".part", 0o644)
    os.replace(path + ".part", path)


def load(folder, dtype=torch.float32):
    """Returns the model and the tokenizer of a folder that this module wrote."""
    with open(os.path.join(folder, "config.json")) as handle:
        raw = json.load(handle)
    model = Llama(Config(**{k: raw[k] for k in Config().as_dict()}))
    model.load_state_dict(load_file(os.path.join(folder, "model.safetensors")))
    return model.to(dtype).eval(), Tokenizer.from_file(os.path.join(folder, "tokenizer.json"))
