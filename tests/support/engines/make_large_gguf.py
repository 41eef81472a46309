# mypy: disable-error-code="import-not-found"
"""A large GGUF model with random weights: `make_large_gguf FILE MILLIONS`. Runs in the llamacpp environment.

One block of random numbers is repeated, so that writing it takes seconds. What it answers is noise.
"""

from __future__ import annotations

import sys

import gguf
import numpy as np

from tests.support.engines.make_gguf import add_tokenizer

SHAPES = {500: (18, 1536, 4096), 1500: (22, 2048, 8192)}  # millions of parameters: layers, width, feed forward
HEADS, KEY_HEADS = 16, 8


def main(path: str, millions: int) -> None:
    layers, width, inner = SHAPES[millions]
    block = np.random.default_rng(1).normal(0, 0.02, 1 << 20).astype(np.float16)
    writer = gguf.GGUFWriter(path, "llama")
    vocabulary = add_tokenizer(writer)
    writer.add_name(f"random {millions}M")
    writer.add_context_length(2048)
    writer.add_embedding_length(width)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_HEADS)
    writer.add_rope_dimension_count(width // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocabulary)

    def matrix(name: str, rows: int, columns: int) -> None:
        writer.add_tensor(name, np.resize(block, (rows, columns)))

    matrix("token_embd.weight", vocabulary, width)
    matrix("output.weight", vocabulary, width)
    writer.add_tensor("output_norm.weight", np.ones(width, dtype=np.float32))
    for layer in range(layers):
        matrix(f"blk.{layer}.attn_q.weight", width, width)
        matrix(f"blk.{layer}.attn_k.weight", width * KEY_HEADS // HEADS, width)
        matrix(f"blk.{layer}.attn_v.weight", width * KEY_HEADS // HEADS, width)
        matrix(f"blk.{layer}.attn_output.weight", width, width)
        matrix(f"blk.{layer}.ffn_gate.weight", inner, width)
        matrix(f"blk.{layer}.ffn_up.weight", inner, width)
        matrix(f"blk.{layer}.ffn_down.weight", width, inner)
        writer.add_tensor(f"blk.{layer}.attn_norm.weight", np.ones(width, dtype=np.float32))
        writer.add_tensor(f"blk.{layer}.ffn_norm.weight", np.ones(width, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


main(sys.argv[1], int(sys.argv[2]))
