"""What vLLM, or the image that is to bring it, refuses at its start: known from the command line alone."""

import re

from harness.serve.compose.compose import Service
from harness.serve.vllm.gpu_fit import value_of

# Images that start a shell, by the program that the template expects of them; see docs/vllm.md.
_SHELLS = re.compile(r"(?:docker\.io/)?(?:rocm/vllm(?:-dev)?|kyuz0/[\w.-]+)(?:[:@]|$)")
PROGRAMS = {"vllm-rocm": "[vllm, serve]", "vllm-cpu": "[vllm, serve]", "llamacpp": "[llama-server]"}


def vllm_refuses(words: list[str]) -> list[str]:
    """What vLLM would say no to, each with advice; `words` are its command line."""
    seqs = value_of(words, "--max-num-seqs") or ""
    tokens = value_of(words, "--max-num-batched-tokens") or ""
    if seqs.isdigit() and tokens.isdigit() and int(tokens) < int(seqs):
        return [
            f"max_num_batched_tokens is {tokens}, and max_num_seqs {seqs}: vLLM refuses fewer tokens in a step than "
            "requests; raise the one or lower the other"
        ]
    return []


def starts_a_shell(template: str, service: Service) -> list[str]:
    """The entrypoint that an image needs and was not given."""
    program = PROGRAMS.get(template)
    if program is None or service.entrypoint is not None or _SHELLS.match(service.image) is None:
        return []
    return [f"{service.image} starts a shell, not the server; add to the variables: entrypoint: {program}"]
