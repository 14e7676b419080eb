"""Converts a directory of a Llama model (config.json, model.safetensors, tokenizer.json) to a GGUF file.

    to_gguf.py MODEL_DIR OUT.gguf
    to_gguf.py MODEL_DIR OUT.gguf --windows

With --windows it writes the shape of Gemma 3, most of whose layers see a sliding window, with random weights and the
directory's tokenizer.

llama.cpp's own converter needs torch and transformers, and refuses tokenizers with an unknown pre-tokenizer. This one
handles a single shape: byte-level BPE with GPT-2's splitting, tied or untied output, and 32-bit floats.
"""

import json
import struct
import sys
from pathlib import Path

import gguf
import numpy as np


def tensors(path):
    """The tensors of a safetensors file by name, as float32 arrays."""
    raw = np.memmap(path, dtype=np.uint8, mode="r")
    (header_len,) = struct.unpack("<Q", raw[:8].tobytes())
    header = json.loads(raw[8 : 8 + header_len].tobytes())
    data = raw[8 + header_len :]
    found = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        start, end = entry["data_offsets"]
        piece = data[start:end].tobytes()
        if entry["dtype"] == "F32":
            values = np.frombuffer(piece, dtype=np.float32)
        elif entry["dtype"] == "F16":
            values = np.frombuffer(piece, dtype=np.float16).astype(np.float32)
        elif entry["dtype"] == "BF16":
            halves = np.frombuffer(piece, dtype=np.uint16).astype(np.uint32)
            values = (halves << 16).view(np.float32)
        else:
            sys.exit(f"{path}: {name} has dtype {entry['dtype']}, which this converter cannot read")
        found[name] = values.reshape(entry["shape"])
    return found


def interleaved(weight, heads):
    """Reorders the rows of a query or key projection from rotary halves to rotary pairs, as llama.cpp has them."""
    rows, columns = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name):
    fixed = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in fixed:
        return fixed[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{NAMES[rest.removesuffix('.weight')]}.weight"


def add_tokenizer(writer, model, config):
    tokenizer, size = json.loads((model / "tokenizer.json").read_text()), config["vocab_size"]
    spelled = {id: text for text, id in tokenizer["model"]["vocab"].items()}
    special = {token["id"] for token in tokenizer["added_tokens"]}
    for token in tokenizer["added_tokens"]:
        spelled[token["id"]] = token["content"]
    missing = [id for id in range(size) if id not in spelled]
    if missing:
        sys.exit(f"tokenizer.json has no token for {len(missing)} ids of the vocabulary")
    merges = tokenizer["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([spelled[id] for id in range(size)])
    kinds = gguf.TokenType
    writer.add_token_types([kinds.CONTROL if id in special else kinds.NORMAL for id in range(size)])
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)
    template = model / "chat_template.jinja"
    if template.exists():
        writer.add_chat_template(template.read_text())


def add_shape(writer, config, head_dim):
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)


def write(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def with_windows(model, config, out):
    """Six layers, of which the first five see 32 tokens."""
    shape = {"num_hidden_layers": 6, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4,
             "num_key_value_heads": 2, "max_position_embeddings": 4096, "rope_theta": 10_000.0}  # fmt: skip
    config, head_dim, random = config | shape, 32, np.random.default_rng(7)
    writer = gguf.GGUFWriter(out, "gemma3")
    writer.add_name("windows")
    add_shape(writer, config, head_dim)
    writer.add_sliding_window(32)
    add_tokenizer(writer, model, config)
    width, inner, queries, keys = 128, 256, 4 * head_dim, 2 * head_dim
    weights = {"attn_q": (queries, width), "attn_k": (keys, width), "attn_v": (keys, width), "attn_output": (width, queries),
               "ffn_gate": (inner, width), "ffn_up": (inner, width), "ffn_down": (width, inner)}  # fmt: skip
    norms = {"attn_norm": width, "post_attention_norm": width, "attn_q_norm": head_dim, "attn_k_norm": head_dim,
             "ffn_norm": width, "post_ffw_norm": width}  # fmt: skip
    writer.add_tensor("token_embd.weight", random.normal(0, 0.1, (config["vocab_size"], width)).astype(np.float32))
    writer.add_tensor("output_norm.weight", np.ones(width, np.float32))
    for layer in range(6):
        for name, size in weights.items():
            writer.add_tensor(f"blk.{layer}.{name}.weight", random.normal(0, 0.1, size).astype(np.float32))
        for name, size in norms.items():
            # Queries and keys that are this long make attention choose.
            norm = np.full(size, 1.5 if size == head_dim else 1, np.float32)
            writer.add_tensor(f"blk.{layer}.{name}.weight", norm)
    write(writer)


def main():
    model, out = Path(sys.argv[1]), sys.argv[2]
    config = json.loads((model / "config.json").read_text())
    if "--windows" in sys.argv:
        return with_windows(model, config, out)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim", config["hidden_size"] // heads)

    writer = gguf.GGUFWriter(out, "llama")
    writer.add_name(model.resolve().name)
    add_shape(writer, config, head_dim)
    writer.add_rope_dimension_count(head_dim)
    add_tokenizer(writer, model, config)
    for name, values in tensors(model / "model.safetensors").items():
        if name.endswith("q_proj.weight"):
            values = interleaved(values, heads)
        elif name.endswith("k_proj.weight"):
            values = interleaved(values, kv_heads)
        writer.add_tensor(gguf_name(name), np.ascontiguousarray(values))
    write(writer)


if __name__ == "__main__":
    main()
