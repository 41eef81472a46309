"""`python -m harness.docs` writes what is made of the program: docs/servers.md, the tables of docs/doctor.md and of
the README."""

import json
import re
from typing import Any

from harness.engines import engines, template_of
from harness.failures.page import failures_page
from harness.machine.doctor import show
from harness.paths import ROOT
from harness.report import markdown
from harness.rundir.manifest import read_run
from harness.serve.compose.template import BY_THE_HARNESS, GATEWAYS, Variable, limits, templates, variables
from harness.summarize.summarize import read_summary

HEAD = """\
# Servers

<!-- Made by `python -m harness.docs`; edit compose/*.yaml.j2 and harness/engines/*.yaml instead. -->

A server is a Compose template of `compose/` with values for its variables. The template is the one definition: the
harness renders it and starts it through the Docker SDK, and `harness compose SCENARIO` prints the same for
`docker compose up`. A Compose key that the harness does not carry out is refused by name.

```yaml
servers:
  vllm:
    template: vllm-rocm
    variables: {max_model_len: 8192, max_num_seqs: 10}
```

All of them are published on 127.0.0.1, also those of a [Docker Engine on another
machine](doctor.md#a-docker-engine-on-another-machine). What gives a container the machine that it runs on is refused
unless the server consents in the scenario, which `harness check` and the report show:

| `allow: [...]` | lets through |
|---|---|
| `docker-socket` | a volume with the socket of Docker, containerd, Podman or CRI-O, or a folder that holds one |
| `host-files` | a volume of `/proc`, `/sys`, `/dev`, `/boot`, a whole home, credentials in `/etc` |
| | or of the container engine's data; hidden files of a home, but for `.cache`, `.local/share`, `.NAME/models` |
| | a writable one of `/etc`, `/usr`, `/bin`, `/lib`; of the whole `/opt`, `/srv`, `/tmp`, `/mnt`, `/media` |
| | or of what is in `/var` and `/run`, but for `/var/tmp/...` and `/run/media/...`; a folder that holds one of these |
| `host-devices` | a device that is not a GPU's (`/dev/kfd`, `/dev/dri`, `/dev/accel`), such as a disk or `/dev/mem` |
| `host-ipc` | `ipc: host` |
| `open-port` | `publish` with an address that other machines reach, such as `0.0.0.0` or `[::]` |
| `privileges` | `cap_add` or `security_opt` in a template of your own; those that ship need none |

Paths count as they lead through `..` and symbolic links. `/` is always refused, and so are `privileged`, `pid`,
`network_mode` and `userns_mode`, which the harness does not carry out.

A secret such as `HF_TOKEN` comes from your shell: write `${HF_TOKEN}` in `environment` or in an argument; the value
itself is refused, and in logs it is blacked out, as is every other value that came in by `${NAME}`. `model` takes no
`${NAME}`. A type that ends in `?` also takes `null`. `model` is the scenario's own and is
not set here; what else a template sets is refused in `extra_args`.

By engine: {pages},
[a server that already runs](running-server.md); in front of them, [gateways](gateways.md).
"""

LOCUST = "Not a server: what `harness compose` puts in front of one, Locust's web UI."
COLUMNS = "| variable | type | default | meaning |\n|---|---|---|---|\n"


def servers_page() -> str:
    """docs/servers.md."""
    parts = [HEAD.replace("{pages}", ", ".join(engine.page for engine in engines() if engine.page is not None))]
    for name in (*templates(), *GATEWAYS, "locust"):
        known = template_of(name)
        introduction = LOCUST if known is None else known.introduction
        parts.append(f"\n## {name}\n{introduction}\n\n{COLUMNS}")
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
    """README.md with the table of the committed example run, and the servers' names, between their marks."""
    example = ROOT / "docs" / "example"
    shown = ("server", "load", "wall", "rate", "ttft_p50", "speedup", "verdict")
    table = markdown.table(read_summary(example), read_run(example), shown)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    names = ", ".join(f"`{name}`" for engine in engines() if not engine.gateway for name in engine.templates)
    servers = f"{names}, and the gateway `{'`, `'.join(GATEWAYS)}` ([their variables](docs/servers.md));"
    for opening, closing, made in (
        ("<!-- table: .*? -->", "<!-- /table -->", f"\n{table}\n"),
        ("<!-- servers -->", "<!-- /servers -->", servers),
    ):
        text = re.sub(rf"({opening}\n).*?({closing})", rf"\1{made}\n\2", text, flags=re.DOTALL)
    return text


def doctor_page() -> str:
    """docs/doctor.md with its tables."""
    return show.filled((ROOT / "docs" / "doctor.md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    (ROOT / "README.md").write_text(readme(), encoding="utf-8")
    (ROOT / "docs" / "servers.md").write_text(servers_page(), encoding="utf-8")
    (ROOT / "docs" / "failures.md").write_text(failures_page(), encoding="utf-8")
    (ROOT / "docs" / "doctor.md").write_text(doctor_page(), encoding="utf-8")
