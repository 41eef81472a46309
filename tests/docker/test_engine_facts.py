"""What a real Docker Engine says of itself, and what a killed run left in it."""

import os
import uuid

import docker

from harness.machine.doctor import DockerEngine, diagnose
from harness.process import PID
from harness.serve.engine import get_engine_facts, make_labels
from tests.docker.conftest import one_at_a_time


def test_the_engine_of_this_machine(client: docker.DockerClient) -> None:
    facts, info = get_engine_facts(), client.info()
    assert (facts.problem, facts.host) == (None, None)
    assert facts.rootless is any("rootless" in option for option in info["SecurityOptions"])
    assert facts.image_folder is not None
    if os.path.isdir(facts.image_folder):
        assert facts.free_bytes is not None and facts.free_bytes > 0
    assert "docker.reachable" in {one.id for one in diagnose(docker=facts) if one.level == "ok"}


@one_at_a_time("leftovers")
def test_what_a_killed_run_left_is_named_and_what_a_living_one_has_is_not(client: docker.DockerClient) -> None:
    mark = uuid.uuid4().hex[:8]
    mine = make_labels(f"facts-{mark}", "alive")
    gone = {**mine, PID: "999999999"}
    made = [
        client.networks.create(f"amd-llm-load-facts-{mark}-{name}", labels=of)
        for name, of in (("alive", mine), ("gone", gone))
    ]
    try:
        stale = get_engine_facts().stale
        assert f"network amd-llm-load-facts-{mark}-gone" in stale
        assert f"network amd-llm-load-facts-{mark}-alive" not in stale
        (finding,) = [one for one in diagnose(docker=DockerEngine(stale=stale)) if one.id == "docker.stale"]
        assert (finding.level, finding.fix) == ("warning", "harness clean")
    finally:
        for network in made:
            network.remove()
