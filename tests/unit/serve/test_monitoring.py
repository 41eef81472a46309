"""Prometheus and Grafana in the Compose file: their configuration and the dashboard."""

import json
import re

import yaml

from harness.scenario import Load, Scenario, Server
from harness.serve.document import list_panels, make_dashboard, make_monitoring
from tests.support.load_runs import composed


def test_a_compose_file_with_grafana_has_all_that_its_services_need() -> None:
    plain = Scenario(
        version=1, question="q", model="m", servers={"s": Server(template="simulated")}, loads={"l": Load(user="chat")},
    )  # fmt: skip
    before, after = (yaml.safe_load(composed(plain, workers=2, grafana=with_it)) for with_it in (False, True))
    services, configs = after["services"], after["configs"]
    assert set(services) - set(before["services"]) == {"prometheus", "grafana"}
    command = services["locust"]["command"]
    assert command[command.index("--metrics-port") :] == ["--metrics-port", "9646", "--metrics-host", "0.0.0.0"]
    mounted = [one["source"] for name in ("prometheus", "grafana") for one in services[name]["configs"]]
    assert sorted(mounted) == sorted(configs)
    jobs = json.loads(configs["prometheus"]["content"])["scrape_configs"]
    targets = [(job["job_name"], job["static_configs"][0]["targets"]) for job in jobs]
    assert targets == [("load", ["locust:9646"]), ("server", ["server:8000"])]
    shown = json.loads(configs["grafana-dashboard"]["content"].replace("$$", "$"))
    assert [panel["title"] for panel in shown["panels"]] == [title for title, _, _ in list_panels()]
    assert services["grafana"]["ports"] == ["127.0.0.1:3000:3000"] and "ports" not in services["prometheus"]
    images = [services[name]["image"] for name in ("prometheus", "grafana")]
    assert all(re.search(r":v?\d+\.\d+\.\d+$", image) for image in images)


def test_the_dashboard_has_the_structure_that_grafana_reads() -> None:
    """Grafana is in no package index that this project may use; what its documentation requires is checked here."""
    dashboard = make_dashboard()
    assert dashboard["uid"] and dashboard["title"] and dashboard["schemaVersion"] >= 36
    places: set[tuple[int, int]] = set()
    for number, panel in enumerate(dashboard["panels"], start=1):
        assert (panel["id"], panel["type"], panel["datasource"]["uid"]) == (number, "timeseries", "prometheus")
        box = panel["gridPos"]
        cells = {(box["x"] + x, box["y"] + y) for x in range(box["w"]) for y in range(box["h"])}
        assert not cells & places and max(x for x, _ in cells) < 24, "panels do not overlap, and a line has 24 columns"
        places |= cells
        assert panel["fieldConfig"]["defaults"]["unit"] in ("s", "reqps", "short", "percentunit")
        assert all(target["expr"] and target["legendFormat"] for target in panel["targets"])
    source = make_monitoring(None)["configs"]["grafana-source"]["content"].replace("$$", "$")
    assert [(one["uid"], one["type"]) for one in json.loads(source)["datasources"]] == [("prometheus", "prometheus")]
