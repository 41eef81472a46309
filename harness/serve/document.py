"""The Compose file for `docker compose up`: a server with a load generator in front, and Prometheus and Grafana."""

import json
from typing import Any, NamedTuple

from harness.engines import engines
from harness.errors import HarnessError
from harness.scenario import Scenario
from harness.serve.compose_file import (
    GATEWAY,
    SERVER,
    parse,
    parse_port,
    url_of,
)
from harness.serve.engine import digests_here
from harness.serve.lemonade import served_name
from harness.serve.template import port_inside, prepared, rendered, server_of, with_services

_NO_GROUPS = [
    "group_add is empty: there is no /dev/kfd and no /dev/dri here, or only root owns them. Put in what",
    "`stat -c %g /dev/kfd /dev/dri/render*` prints on the GPU's machine, or set the server's variable `groups`.",
]


def server_document(scenario: Scenario, server_name: str) -> str:
    """The Compose file of a server alone, to be read by people: the host's port is that of the container."""
    server = server_of(scenario, server_name)
    return rendered(server, scenario.model, port=port_inside(server))


class Upstream(NamedTuple):
    """What a load generator in the server's network needs to know."""

    service: str  # takes the load: the gateway where there is one
    url: str
    model: str  # to ask for
    simulated: bool
    prepared: bool  # other services end before the server starts


def upstream_of(scenario: Scenario, server_name: str) -> Upstream:
    """Where the load of a server goes, in the network of its Compose file. Raises HarnessError for an offline job."""
    server, compose = server_of(scenario, server_name), prepared(scenario, server_name).file
    serving = compose.serving
    if serving.offline:
        raise HarnessError(
            f"the server '{server_name}' is an offline job, which `harness run` gives its requests",
            next_step="Choose another of the scenario's servers with --server.",
        )
    service, port = (SERVER, port_inside(server)) if server.gateway is None else (GATEWAY, port_inside(server.gateway))
    model = scenario.model if serving.lemonade is None else served_name(serving.lemonade.model)
    return Upstream(service, f"http://{service}:{port}", model, serving.simulated, bool(compose.preparations))


def compose_document(
    scenario: Scenario, server_name: str, locust: dict[str, Any], head: list[str], *, grafana: bool = False
) -> str:
    """The Compose file for `docker compose up`, with a load generator in front of the server.

    `locust`: values for the variables of the template `locust`. `head`: lines for the top of the file; those with the
    addresses of the server and the digests of the images follow. `grafana`: with Prometheus and Grafana.
    """
    server = server_of(scenario, server_name)
    text = rendered(server, scenario.model, port=port_inside(server), locust=locust)
    compose = parse(server_document(scenario, server_name))
    if grafana:
        path = compose.serving.metrics
        target = None if path is None else MonitoringTarget(f"{SERVER}:{port_inside(server)}", path)
        text = with_services(text, monitoring(target))
    ports = {name: parse_port(one.ports[0]) for name, one in compose.services.items() if one.ports}
    head = head + [f"{name}: {url_of(port.address, port.host)}" for name, port in sorted(ports.items())]
    images = [locust["image"], *(service.image for service in compose.services.values())]
    head += [f"image {name} is here: {digest}" for name, digest in digests_here(images).items()]
    if compose.server.devices and not compose.server.group_add:
        head += _NO_GROUPS
    return "".join(f"# {line}\n" for line in head) + text


PROMETHEUS_IMAGE = "prom/prometheus:v3.5.0"
GRAFANA_IMAGE = "grafana/grafana:12.1.1"
METRICS_PORT = 9646  # of the load generator, in the network of the Compose file only
GRAFANA_PORT = 3000
_LIVE = "amd_llm_load_live"
_TTFT = "gen_ai_client_operation_time_to_first_chunk_seconds_bucket"
_TPOT = f"{_LIVE}_time_per_output_token_seconds_bucket"
_E2E = "gen_ai_client_operation_duration_seconds_bucket"
_TOKENS = "gen_ai_client_token_usage_sum"


class MonitoringTarget(NamedTuple):
    """A server whose metrics Prometheus reads."""

    address: str  # HOST:PORT in the network of the Compose file
    path: str


def _quantiles(buckets: str) -> dict[str, str]:
    return {
        at: f"histogram_quantile({share}, sum by (le) (rate({buckets}[1m])))"
        for at, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))
    }


def _of_server(name: str, *, rate: bool = False) -> str:
    """A metric under the names that the known servers give it."""
    names = sorted({one for engine in engines() for one in engine.metrics.get(name, [])})
    found = f'{{__name__=~"{"|".join(names)}",job="server"}}'
    return f"sum(rate({found}[1m]))" if rate else f"sum({found})"


def panels() -> list[tuple[str, str, dict[str, str]]]:
    """Title, Grafana's unit, and the queries by legend, two panels a line."""
    return [
        ("TTFT (client)", "s", _quantiles(_TTFT)),
        ("TPOT (client)", "s", _quantiles(_TPOT)),
        ("E2E latency (client)", "s", _quantiles(_E2E)),
        (
            "Requests/s and goodput",
            "reqps",
            {
                "ended": f"sum(rate({_LIVE}_requests_total[1m]))",
                "met every SLO": f"sum(rate({_LIVE}_slo_met_requests_total[1m]))",
            },
        ),
        (
            "Requests: client and server",
            "short",
            {
                "users": f"sum({_LIVE}_users)",
                "in flight (client)": f"sum({_LIVE}_requests_in_flight)",
                "running (server)": _of_server("running"),
                "waiting (server)": _of_server("waiting"),
            },
        ),
        (
            "Tokens/s: client and server",
            "short",
            {
                "output (client, at the end of requests)": f'sum(rate({_TOKENS}{{gen_ai_token_type="output"}}[1m]))',
                "prompt (client)": f'sum(rate({_TOKENS}{{gen_ai_token_type="input"}}[1m]))',
                "output (server)": _of_server("generated_tokens", rate=True),
            },
        ),
        ("KV cache in use (server)", "percentunit", {"KV cache": _of_server("kv_usage")}),
        (
            "Errors/s by kind, and client limits",
            "short",
            {
                "{{error_type}}": f"sum by (error_type) (rate({_LIVE}_errors_total[1m]))",
                "load generator is the limit (1)": f"max({_LIVE}_client_limited)",
            },
        ),
    ]


def dashboard() -> dict[str, Any]:
    """The dashboard, as Grafana reads it from a file."""
    found = [
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
        for number, (title, unit, queries) in enumerate(panels())
    ]
    return {
        "uid": "amd-llm-load",
        "title": "LLM load",
        "schemaVersion": 39,
        "refresh": "5s",
        "time": {"from": "now-15m", "to": "now"},
        "panels": found,
    }


def prometheus_config(generator: str, server: MonitoringTarget | None) -> dict[str, Any]:
    """The configuration of Prometheus. `generator`: HOST:PORT of the load generator's metrics."""
    jobs = [{"job_name": "load", "static_configs": [{"targets": [generator]}]}]
    if server is not None:
        jobs.append(
            {"job_name": "server", "metrics_path": server.path, "static_configs": [{"targets": [server.address]}]}
        )
    return {"global": {"scrape_interval": "2s", "scrape_timeout": "2s"}, "scrape_configs": jobs}


def monitoring(server: MonitoringTarget | None) -> dict[str, Any]:
    """Services and configs to add to a Compose file. Everything is in the file; nothing is kept after `down`."""
    source = {"name": "Prometheus", "uid": "prometheus", "type": "prometheus", "url": "http://prometheus:9090"}
    provider = {"name": "files", "type": "file", "options": {"path": "/etc/grafana/dashboards"}}
    files = {
        "prometheus": prometheus_config(f"locust:{METRICS_PORT}", server),
        "grafana-source": {"apiVersion": 1, "datasources": [{**source, "access": "proxy", "isDefault": True}]},
        "grafana-provider": {"apiVersion": 1, "providers": [provider]},
        "grafana-dashboard": dashboard(),
    }
    locked = {"cap_drop": ["ALL"], "security_opt": ["no-new-privileges:true"], "init": True}
    return {
        "services": {
            "prometheus": {
                "image": PROMETHEUS_IMAGE,
                "command": ["--config.file=/etc/prometheus/prometheus.yml", "--storage.tsdb.path=/prometheus"],
                "configs": [{"source": "prometheus", "target": "/etc/prometheus/prometheus.yml"}],
                "tmpfs": ["/prometheus"],
                **locked,
            },
            "grafana": {
                "image": GRAFANA_IMAGE,
                # On loopback only, to look at: there is no login, so no default password.
                "ports": [f"127.0.0.1:{GRAFANA_PORT}:3000"],
                "environment": {
                    "GF_AUTH_ANONYMOUS_ENABLED": "true",
                    "GF_AUTH_ANONYMOUS_ORG_ROLE": "Viewer",
                    "GF_AUTH_BASIC_ENABLED": "false",
                    "GF_AUTH_DISABLE_LOGIN_FORM": "true",
                    "GF_ANALYTICS_REPORTING_ENABLED": "false",
                    "GF_ANALYTICS_CHECK_FOR_UPDATES": "false",
                    "GF_ANALYTICS_CHECK_FOR_PLUGIN_UPDATES": "false",
                    "GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH": "/etc/grafana/dashboards/load.json",
                },
                "configs": [
                    {"source": "grafana-source", "target": "/etc/grafana/provisioning/datasources/prometheus.yaml"},
                    {"source": "grafana-provider", "target": "/etc/grafana/provisioning/dashboards/files.yaml"},
                    {"source": "grafana-dashboard", "target": "/etc/grafana/dashboards/load.json"},
                ],
                "depends_on": ["prometheus"],
                "tmpfs": ["/var/lib/grafana"],
                **locked,
            },
        },
        # JSON is YAML as well. Compose replaces $NAME in contents; `$$` stands for `$`.
        "configs": {
            name: {"content": json.dumps(value, indent=1).replace("$", "$$") + "\n"} for name, value in files.items()
        },
    }
