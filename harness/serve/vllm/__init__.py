"""What is known of vLLM beside its API: its flags, what they cost a GPU, and its offline engine."""
