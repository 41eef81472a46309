"""`python -m harness.docs` writes what is made of the program: docs/servers.md, the tables of docs/doctor.md and of
the README."""

import json
import re
from typing import Any

from harness.failures.page import failures_page
from harness.machine.doctor import page
from harness.paths import ROOT
from harness.report import markdown
from harness.rundir.manifest import read_run
from harness.serve.compose.template import BY_THE_HARNESS, GATEWAYS, Variable, limits, templates, variables
from harness.summarize.summarize import read_summary

HEAD = """\
# Servers

<!-- Made by `python -m harness.docs`; edit compose/*.yaml.j2 instead. -->

A server is a Compose template of `compose/` with values for its variables. The template is the one definition: the
harness renders it and starts it through the Docker SDK, and `harness compose SCENARIO` prints the same for
`docker compose up`. A Compose key that the harness does not carry out is refused by name.

```yaml
servers:
  vllm:
    template: vllm-rocm
    variables: {max_model_len: 8192, max_num_seqs: 10}
```

All of them are published on 127.0.0.1 unless `publish` says otherwise. A secret such as `HF_TOKEN` comes from your
shell: write `${HF_TOKEN}` in `environment` or in an argument; the value itself is refused, and in logs it is blacked
out, as is every other value that came in by `${NAME}`. `DOCKER_HOST` is respected. A type that ends in `?` also takes
`null`. `model` is the scenario's own and is not set here; what else a template sets is refused in `extra_args`.

By engine: [vLLM](vllm.md), [Lemonade](lemonade.md), [llama.cpp](llamacpp.md), [Ollama and LocalAI](ollama-localai.md),
[a server that already runs](running-server.md); in front of them, [gateways](gateways.md).
"""

INTRODUCTIONS = {
    "simulated": """\
The [embedded engine](simulated.md): a model of continuous batching, for machines without a GPU. With `container: false`
it runs as a process, without Docker.""",
    "vllm-rocm": """\
vLLM on an AMD GPU, with `/dev/kfd`, `/dev/dri`, the groups that own them, shared memory and caches in place.""",
    "vllm-offline": """\
Not a server: vLLM's offline engine (`LLM.chat`) given a whole cell's requests at once, as the bound that serving can
come near; see [vLLM](vllm.md#the-offline-bound).""",
    "vllm-cpu": "vLLM on the processor: slow, real, and good for trying a scenario.",
    "llamacpp": "llama-server of [llama.cpp](llamacpp.md).",
    "lemonade": """\
[Lemonade Server](lemonade.md), which runs vLLM or llama.cpp behind itself. Backend and model are installed, downloaded
and loaded before the first request.""",
    "ollama": """\
[Ollama](ollama-localai.md#ollama) with its ROCm build of llama.cpp. Its model is pulled through its own API at the
first start, loaded before the
first request, and kept loaded. It does not know `ignore_eos`: take `output: natural` in loads that compare it.""",
    "localai": """\
[LocalAI](ollama-localai.md#localai), which installs a backend (llama.cpp for ROCm) and the model from its gallery at
the first start.""",
    "litellm": """\
Not a server: a LiteLLM proxy in front of one, as its `gateway`. It takes the load; metrics stay those of the server.
See [gateways](gateways.md).""",
    "locust": "Not a server: what `harness compose` puts in front of one, Locust's web UI.",
}
COLUMNS = "| variable | type | default | meaning |\n|---|---|---|---|\n"


def servers_page() -> str:
    """docs/servers.md."""
    parts = [HEAD]
    for name in (*templates(), *GATEWAYS, "locust"):
        parts.append(f"\n## {name}\n{INTRODUCTIONS[name]}\n\n{COLUMNS}")
        parts += [_row(key, value) for key, value in variables(name).items() if key not in BY_THE_HARNESS]
    return "".join(parts)


def _row(name: str, variable: Variable) -> str:
    default = "required" if variable.required else f"`{_shown(variable.default)}`"
    allowed = f": {', '.join(variable.choices)}" if variable.choices else f" {limits(variable)}".rstrip()
    allowed += ", or `auto`" if variable.auto else ""
    cells = (f"`{name}`", variable.type + allowed, default, variable.doc)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def readme() -> str:
    """README.md with the table of the committed example run between its marks."""
    example = ROOT / "docs" / "example"
    shown = ("server", "load", "wall", "rate", "ttft_p50", "speedup", "verdict")
    table = markdown.table(read_summary(example), read_run(example), shown)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.sub(r"(<!-- table: .*? -->\n).*?(<!-- /table -->)", rf"\1\n{table}\n\n\2", text, flags=re.DOTALL)


def doctor_page() -> str:
    """docs/doctor.md with its tables."""
    return page.filled((ROOT / "docs" / "doctor.md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    (ROOT / "README.md").write_text(readme(), encoding="utf-8")
    (ROOT / "docs" / "servers.md").write_text(servers_page(), encoding="utf-8")
    (ROOT / "docs" / "failures.md").write_text(failures_page(), encoding="utf-8")
    (ROOT / "docs" / "doctor.md").write_text(doctor_page(), encoding="utf-8")
