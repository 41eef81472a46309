"""Named sets of parameters, each with its source.

**strix-halo-qwen3.5-0.8b** is fitted to end-to-end numbers that Cody Sandahl published (codysandahl.com, "Stop Crashing
and Start Cooking with vLLM on AMD and Lemonade Server"): Strix Halo AI Max+ 395 with 128 GB, Lemonade 10.8 with its
vLLM back-end, Qwen3.5-0.8B-FP16. The mechanism is our model, not a measurement of that machine.

- *25 short prompts, 50 tokens each*: 13.07 s one after another (95.6 tok/s), 4.18 s at once (299.3 tok/s, 3.13x).
  Two equations for the step time of 1 and of 25 sequences, solved for `step_base_s` and `step_per_sequence_s`
  with 30 prompt tokens assumed per request. Not fitted and not met: his later 317 tok/s at `--max-num-seqs 10`
  (the model says 254 there).
- `prefill_per_token_s`: 25,000 tokens/s of prefill, about 40 TFLOP/s at 1.6 GFLOP a token; an assumption.
- `step_per_kv_token_s`: 12 KiB of KV cache a token (6 full-attention layers, 2 KV heads of 256, 16 bit) read at
  about 210 GB/s; an estimate.
- *Classification of long, varied prompts*: 1.9x at 5 at a time, 0.4x at 10 at a time, and well again once
  `--max-num-seqs` was set. The author names no cause; a KV cache that is too small for ten is ours. The pool
  (`num_gpu_blocks`), the context and the chunk (`long_prefill_token_threshold`) are about a sixteenth of a real
  set-up's, so that prompts of 365 tokens show in seconds what prompts of thousands show in minutes: five such requests
  fit, of ten the younger ones are admitted chunk by chunk, run out of blocks, are preempted and begin again.
- `preemption_s`: recompute alone does not explain 0.4x (in this model it leaves 1.7x), so a lump of 0.25 s per
  preemption is fitted to it. vLLM documents no such cost; kernels compiled and tuned for each new prefill shape
  would look like it.
- Prefix caching is off: the model's recurrent layers keep no state per block that a recompute could start from. Switch
  it on and a preempted request finds most of its blocks again.

**instant** is a test double: about 2 ms to the first token and 2 ms per token whatever the load, a large cache.
"""

from harness.simulated.engine import EngineConfig

DEFAULT_PRESET = "strix-halo-qwen3.5-0.8b"

PRESETS: dict[str, EngineConfig] = {
    "strix-halo-qwen3.5-0.8b": EngineConfig(
        step_base_s=0.007408,
        step_per_sequence_s=0.003021,
        step_per_kv_token_s=6e-8,
        prefill_per_token_s=40e-6,
        preemption_s=0.25,
        jitter=0.01,
        max_num_batched_tokens=2048,
        long_prefill_token_threshold=128,
        max_model_len=2048,
        num_gpu_blocks=136,
        enable_prefix_caching=False,
    ),
    "instant": EngineConfig(
        step_base_s=0.002,
        step_per_sequence_s=0.0,
        prefill_per_token_s=0.0,
        max_num_batched_tokens=131072,
        max_model_len=131072,
        num_gpu_blocks=65536,
    ),
}
