# mypy: disable-error-code="import-not-found"
"""A GGUF model with random weights, for llama.cpp. Runs in the llamacpp environment, after make_models."""

from __future__ import annotations

import json

import gguf
import numpy as np

from tests.support.engines import paths

SEED = 20240229
CONTEXT = 4096
LAYERS, WIDTH, HEADS, FEED_FORWARD = 2, 64, 4, 192


def add_tokenizer(writer: gguf.GGUFWriter) -> int:
    """Copy the vocabulary of the safetensors models; returns its size."""
    source = json.loads((paths.QWEN3_4M / "tokenizer.json").read_text())
    config = json.loads((paths.QWEN3_4M / "tokenizer_config.json").read_text())
    template = paths.QWEN3_4M / "chat_template.jinja"
    ids = source["model"]["vocab"] | {token["content"]: token["id"] for token in source["added_tokens"]}
    tokens = sorted(ids, key=ids.__getitem__)
    special = {token["content"] for token in source["added_tokens"]}
    merges = [m if isinstance(m, str) else " ".join(m) for m in source["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if t in special else gguf.TokenType.NORMAL for t in tokens])
    writer.add_token_merges(merges)
    writer.add_eos_token_id(ids[config["eos_token"]])
    writer.add_pad_token_id(ids[config["pad_token"]])
    writer.add_add_bos_token(False)
    writer.add_chat_template(template.read_text() if template.exists() else config["chat_template"])
    return len(tokens)


def add_weights(writer: gguf.GGUFWriter, vocabulary: int) -> None:
    random = np.random.default_rng(SEED)

    def matrix(name: str, rows: int, columns: int) -> None:
        writer.add_tensor(name, random.normal(0, 0.02, (rows, columns)).astype(np.float16))

    def norm(name: str) -> None:
        writer.add_tensor(name, np.ones(WIDTH, dtype=np.float32))

    matrix("token_embd.weight", vocabulary, WIDTH)
    matrix("output.weight", vocabulary, WIDTH)
    norm("output_norm.weight")
    for layer in range(LAYERS):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            matrix(f"blk.{layer}.{name}.weight", WIDTH, WIDTH)
        matrix(f"blk.{layer}.ffn_gate.weight", FEED_FORWARD, WIDTH)
        matrix(f"blk.{layer}.ffn_up.weight", FEED_FORWARD, WIDTH)
        matrix(f"blk.{layer}.ffn_down.weight", WIDTH, FEED_FORWARD)
        norm(f"blk.{layer}.attn_norm.weight")
        norm(f"blk.{layer}.ffn_norm.weight")


def main() -> None:
    writer = gguf.GGUFWriter(paths.TINY_GGUF, "llama")
    vocabulary = add_tokenizer(writer)
    writer.add_name("tiny random llama")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocabulary)
    add_weights(writer, vocabulary)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    print(f"{paths.TINY_GGUF.name}: {paths.TINY_GGUF.stat().st_size / 1e6:.1f} MB, vocabulary {vocabulary}")


if __name__ == "__main__":
    main()
