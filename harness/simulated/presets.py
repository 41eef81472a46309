"""Named sets of parameters."""

from harness.simulated.engine import EngineConfig

DEFAULT_PRESET = "strix-halo-qwen3.5-0.8b"

PRESETS: dict[str, EngineConfig] = {
    "instant": EngineConfig(
        step_base_s=0.002,
        step_per_sequence_s=0.0,
        prefill_per_token_s=0.0,
        num_gpu_blocks=65536,
        max_model_len=131072,
        max_num_batched_tokens=131072,
    ),
    "strix-halo-qwen3.5-0.8b": EngineConfig(
        step_base_s=0.0073,
        step_per_sequence_s=0.00303,
        prefill_per_token_s=0.00005,
        num_gpu_blocks=175,
        max_model_len=2048,
        max_num_batched_tokens=256,
        enable_prefix_caching=False,
    ),
}
