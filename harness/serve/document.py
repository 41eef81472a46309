"""The Compose file for `docker compose up`: a server and its load generator, with Prometheus and Grafana on request.

Also `docker run` for a service of it.
"""

import json
import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any
from urllib.parse import urlsplit

from harness.base.command_line import quote
from harness.base.errors import HarnessError
from harness.base.files import COMPOSE, own_yaml, read_text
from harness.base.measured import PERCENTILES
from harness.base.redact import printable
from harness.engines import engines
from harness.scenario import Scenario
from harness.serve.compose_file import SERVER, Service, make_url, parse_compose, parse_port
from harness.serve.docker_engine import get_local_digests
from harness.serve.template import (
    PreparedServer,
    add_services,
    find_server,
    get_container_port,
    prepare_server,
    render_server,
)

_NO_GROUPS_NOTE = [
    "group_add is empty: there is no /dev/kfd and no /dev/dri here, or only root owns them. Put in what",
    "`stat -c %g /dev/kfd /dev/dri/render*` prints on the GPU's machine, or set the server's variable `groups`.",
]


def server_document(scenario: Scenario, server_name: str) -> str:
    """Return the Compose file of a server alone, for people: the host's port is that of the container."""
    server = find_server(scenario, server_name)
    return render_server(server, scenario.model, port=get_container_port(server))


def prepare_upstream(scenario: Scenario, server_name: str) -> PreparedServer:
    """Return a server that a load generator of its Compose file can load. Raises HarnessError for an offline job."""
    prepared = prepare_server(scenario, server_name)
    if prepared.file.serving.offline:
        raise HarnessError(
            f"the server '{server_name}' is an offline job, which `harness run` gives its requests",
            next_step="Choose another of the scenario's servers with --server.",
        )
    return prepared


def compose_document(
    scenario: Scenario, server_name: str, locust: dict[str, Any], head: list[str], *, grafana: bool = False
) -> str:
    """Return the Compose file for `docker compose up`, with a load generator in front of the server.

    `locust`: values for the variables of the template `locust`. `head`: comment lines for the top of the file; the
    addresses of the server and the digests of the images follow. `grafana`: with Prometheus and Grafana.
    """
    server = find_server(scenario, server_name)
    text = render_server(server, scenario.model, port=get_container_port(server), locust=locust)
    compose = parse_compose(server_document(scenario, server_name))
    if grafana:
        path = compose.serving.metrics
        url = None if path is None else f"http://{SERVER}:{get_container_port(server)}{path}"
        text = add_services(text, make_monitoring(url))
    ports = {name: parse_port(service.ports[0]) for name, service in compose.services.items() if service.ports}
    head = head + [f"{name}: {make_url(port.address, port.host)}" for name, port in sorted(ports.items())]
    images = [locust["image"], *(service.image for service in compose.services.values())]
    head += [f"image {name} is here: {digest}" for name, digest in get_local_digests(images).items()]
    if compose.server.devices and not compose.server.group_add:
        head += _NO_GROUPS_NOTE
    lines = (printable(line).replace("\n", " ") for line in head)  # a comment ends with its line
    return "".join(f"# {line}\n" for line in lines) + text


METRICS_PORT = 9646  # of the load generator, in the network of the Compose file only
GRAFANA_PORT = 3000


@cache
def _read_monitoring() -> dict[str, Any]:
    monitoring: dict[str, Any] = own_yaml(read_text(COMPOSE / "monitoring.yaml"))
    return monitoring


def list_panels() -> list[tuple[str, str, dict[str, str]]]:
    """Return title, Grafana's unit and queries by legend of each panel, two panels a line."""
    return [(panel["title"], panel["unit"], dict(_make_queries(panel))) for panel in _read_monitoring()["panels"]]


def _make_queries(panel: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if buckets := panel.get("quantiles"):
        for legend in ("p50", "p95", "p99"):
            yield legend, f"histogram_quantile({PERCENTILES[legend].share}, sum by (le) (rate({buckets}[1m])))"
    yield from panel.get("queries", {}).items()
    for legend, name in panel.get("server", {}).items():
        yield legend, f"sum({_match_metric(name)})"
    for legend, name in panel.get("server_rate", {}).items():
        yield legend, f"sum(rate({_match_metric(name)}[1m]))"


def _match_metric(name: str) -> str:
    """Return the selector of a server's metric, under all names that the known servers give it."""
    names = sorted({alias for engine in engines() for alias in engine.metrics.get(name, [])})
    return f'{{__name__=~"{"|".join(names)}",job="server"}}'


def make_dashboard() -> dict[str, Any]:
    """Return the dashboard in Grafana's file format."""
    panels = [
        {
            "id": number + 1,
            "type": "timeseries",
            "title": title,
            "datasource": {"type": "prometheus", "uid": "prometheus"},
            "gridPos": {"h": 8, "w": 12, "x": 12 * (number % 2), "y": 8 * (number // 2)},
            "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
            "targets": [
                {"refId": chr(ord("A") + place), "expr": query, "legendFormat": legend}
                for place, (legend, query) in enumerate(queries.items())
            ],
        }
        for number, (title, unit, queries) in enumerate(list_panels())
    ]
    return {**_read_monitoring()["files"]["grafana-dashboard"], "panels": panels}


def make_prometheus_config(load_url: str, server_url: str | None) -> dict[str, Any]:
    """Return the configuration of Prometheus, with the addresses of the metrics of load generator and server."""
    urls = {"load": urlsplit(load_url)} | ({} if server_url is None else {"server": urlsplit(server_url)})
    jobs = [
        {"job_name": name, "metrics_path": url.path, "static_configs": [{"targets": [url.netloc]}]}
        for name, url in urls.items()
    ]
    return {"global": {"scrape_interval": "2s", "scrape_timeout": "2s"}, "scrape_configs": jobs}


def make_monitoring(server_url: str | None) -> dict[str, Any]:
    """Return the services and configs to add to a Compose file. `server_url`: of the server's metrics."""
    files = _read_monitoring()["files"] | {
        "prometheus": make_prometheus_config(f"http://locust:{METRICS_PORT}/metrics", server_url),
        "grafana-dashboard": make_dashboard(),
    }
    # JSON is YAML as well. Compose replaces $NAME in contents; `$$` is a literal `$`.
    contents = {name: json.dumps(value, indent=1).replace("$", "$$") + "\n" for name, value in files.items()}
    return {
        "services": _read_monitoring()["services"],
        "configs": {name: {"content": content} for name, content in contents.items()},
    }


_REFERENCE = re.compile(r"(\$\$|\$\{[A-Za-z_][A-Za-z0-9_]*\})")  # a literal $, or a variable


def docker_run(service: Service) -> str:
    """Return the `docker run` command of a service. Secrets stay `${NAME}`."""
    words = ["docker", "run", "--rm", *(["--init"] if service.init else [])]
    for flag, values in (
        ("--device", service.devices), ("--group-add", service.group_add), ("--volume", service.volumes),
        ("--publish", service.ports), ("--security-opt", service.security_opt), ("--cap-add", service.cap_add),
        ("--ulimit", [f"{name}={limit.soft}:{limit.hard}" for name, limit in service.ulimits.items()]),
        ("--env", [f"{name}={value}" for name, value in service.environment.items()]),
    ):  # fmt: skip
        words += [word for value in values for word in (flag, value)]
    for flag, value in (
        ("--ipc", service.ipc), ("--shm-size", service.shm_size), ("--memory", service.mem_limit),
        ("--memory-swap", service.memswap_limit), ("--cpus", service.cpus), ("--cpuset-cpus", service.cpuset),
        ("--user", service.user), ("--workdir", service.working_dir),
    ):  # fmt: skip
        words += [] if value is None else [flag, str(value)]
    entrypoint, *first = service.entrypoint or [""]
    words += ["--entrypoint", entrypoint] if entrypoint else []
    words += [service.image, *first, *(service.command or [])]
    return shell_text(words)


def shell_text(words: Sequence[str]) -> str:
    """Return words of a Compose file as a command for a shell, which fills in `${NAME}` and nothing else."""
    return " ".join(map(_quote, words))


def _quote(word: str) -> str:
    """A word for a shell; Compose writes a literal $ as $$."""
    quoted, literal = "", ""
    for part in _REFERENCE.split(word):
        if part.startswith("${") and _REFERENCE.fullmatch(part):
            quoted += f'{quote(literal) if literal else ""}"{part}"'
            literal = ""
        else:
            literal += "$" if part == "$$" else part
    return quoted + quote(literal) if literal or not quoted else quoted
