"""The memory question, answered before anything starts: the safe share of a GPU, and the KV cache that it leaves."""
