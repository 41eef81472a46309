"""The list of `harness bisect`, its builds and its file."""

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from harness.base.errors import HarnessError
from harness.base.files import is_stream
from harness.base.reason import because
from harness.questions.bisect.entry_build import LAST_LINES, BuildCut, build, build_words
from harness.questions.bisect.entry_list import (
    MAX_BYTES,
    MAX_SHORT,
    entry_setting,
    order_entries,
    read_images,
    read_values,
    server_names,
    short_names,
)
from harness.questions.bisect.record import (
    BISECT_FILE,
    BisectQuestion,
    bisect_command,
    read_bisect,
    write_bisect,
)
from harness.questions.bisect.search import default_metric, refuse_metric, refuse_other_image, with_entries
from harness.records.manifest import ServedBy
from harness.run.experiment import Experiment
from harness.scenario import Arrivals, Load, Scenario, Server
from harness.serve.compose_file import fill_variables
from harness.serve.template import prepare_server
from tests.support.bisections import ASKED, IMAGES, made_bisection
from tests.support.wording import Wording


def test_images_are_read_one_a_line(tmp_path: Path) -> None:
    file = tmp_path / "images.txt"
    file.write_text("# oldest first\n\n  a:1  \nb:2 # the release\na@sha256:12\r\n")
    assert read_images(file) == ["a:1", "b:2", "a@sha256:12"]


@pytest.mark.parametrize(
    "content",
    [
        b"a b\n",
        b"--privileged\n",
        b"a\x1b[31m\n",
        b"\xff\xfe\n",
        b"a" * 600,
        b"x" * (MAX_BYTES + 1),
        b"a:1\n$(touch$IFS/x);x\n",
        b"${HOME}:1\n",
    ],
    ids=[
        "two words",
        "an option",
        "a control character",
        "no UTF-8",
        "too long",
        "too large",
        "a command",
        "a variable",
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path: Path, content: bytes, wording: Wording) -> None:
    file = tmp_path / "images.txt"
    file.write_bytes(content)
    with pytest.raises(HarnessError) as error:
        read_images(file)
    assert error.value.what.startswith("--images: ")
    wording(error.value, FILE=file)


def test_images_may_come_through_a_pipe_that_is_open(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.write(writer, b"a:1\nb:2\n")
    os.close(writer)
    pipe = Path(f"/dev/fd/{reader}")
    assert is_stream(pipe) and read_images(pipe) == ["a:1", "b:2"]
    os.close(reader)
    with pytest.raises(HarnessError, match="--images"):
        read_images(Path("/dev/zero"))
    named = tmp_path / "named"
    os.mkfifo(named)
    with pytest.raises(HarnessError, match="--images"):
        read_images(named)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(HarnessError, match="--images"):
        read_images(tmp_path / "none.txt")


def test_values_are_names_as_they_are_typed() -> None:
    assert read_values("ctx_size=8192, 16384") == ("ctx_size", ["8192", "16384"])
    assert read_values("--x=1e-4,1.10,true") == ("--x", ["1e-4", "1.10", "true"])
    assert read_values("env=a=b,c") == ("env", ["a=b", "c"])
    assert order_entries("x", ["1e-4", "1.10", "2"], "1.10", None).values == ["1.10", "2"]


def test_settings_have_the_types_of_variables() -> None:
    def settings(variable: str, *values: str, is_text: bool = False) -> list[Any]:
        return [entry_setting(variable, value, is_text=is_text) for value in values]

    words = ["on", "off", "true", "0.5", "1e-3", "-2", "1e400", "q8_0"]
    assert settings("x", *words) == ["on", "off", True, 0.5, 0.001, -2, "1e400", "q8_0"]
    assert settings("x", "1.10", "12345e67", "true", is_text=True) == ["1.10", "12345e67", "true"]
    assert settings("--x", "1.10", "1e-4", "true", "false", "$a") == ["1.10", "1e-4", True, False, "$$a"]


def test_what_is_typed_reaches_the_server() -> None:
    scenario = with_entries(experiment_of(container=False), question_of("--tag", ["1.10", "12345e67"])).scenario
    commands = [
        fill_variables(prepare_server(scenario, name).file, {}).server.command or [] for name in scenario.servers
    ]
    assert [command[-1] for command in commands] == ["1.10", "12345e67"]
    images = with_entries(experiment_of(), question_of("image", ["123", "1.10"])).scenario.servers.values()
    assert [server.variables["image"] for server in images] == ["123", "1.10"]
    numbers = with_entries(experiment_of(), question_of("gpu_memory_utilization", ["0.50", "6e-1"])).scenario.servers
    assert [server.variables["gpu_memory_utilization"] for server in numbers.values()] == [0.5, 0.6]


@pytest.mark.parametrize("given", ["ctx_size", "=1,2", "a b=1,2", "x=1,,2", "x=", "x=1,\x07"])
def test_values_that_are_none_are_refused(given: str, wording: Wording) -> None:
    with pytest.raises(HarnessError) as error:
        read_values(given)
    wording(error.value)


def test_the_entries_go_from_good_to_bad() -> None:
    def values(good: str | None = None, bad: str | None = None) -> list[Any]:
        return order_entries("x", [1, 2, 3, 4], good, bad).values

    assert (values(), values("2"), values("2", "3")) == ([1, 2, 3, 4], [2, 3, 4], [2, 3])
    assert values("4", "1") == [4, 3, 2, 1] and values(bad="1", good="3") == [3, 2, 1]


@pytest.mark.parametrize(
    ("values", "good", "bad"),
    [([1, 1], None, None), ([1], None, None), ([1, 2], "3", None), ([1, 2], "2", None), (range(1001), None, None)],
    ids=["twice", "one", "unknown", "the same", "too many"],
)
def test_a_list_that_cannot_be_bisected_is_refused(
    values: Any, good: str | None, bad: str | None, wording: Wording
) -> None:
    with pytest.raises(HarnessError) as error:
        order_entries("x", list(values), good, bad)
    wording(error.value)


def test_names_are_short_and_those_of_servers_are_valid_and_different() -> None:
    assert short_names(IMAGES)[:2] == ["engine:b1", "engine:b2"]
    assert server_names(IMAGES)[0] == "1-engine-b1"
    assert short_names(["a:1", "a:2"]) == ["a:1", "a:2"] and short_names(["/x/a", "/y/a"]) == ["x/a", "y/a"]
    digest = f"x/y@sha256:{'0' * 64}"
    assert short_names([digest, "x/y:2"]) == ["y@sha256:000000000000", "y:2"]
    assert short_names([digest, digest[:-1] + "1"])[0] == digest, "what tells them apart is not cut off"
    long = short_names([f"{'x' * 300}{number}" for number in range(2)])
    assert long[1].endswith("1") and "…" in long[1] and {len(name) for name in long} == {MAX_SHORT}
    same_ends = [f"{'x' * 100}{number}{'y' * 100}" for number in range(2)]
    assert short_names(same_ends) == same_ends
    names = server_names([f"x:{'LONG_' * 30}{number}" for number in range(12)])
    assert len(set(names)) == 12 and names[0].startswith("01-") and max(map(len, names)) <= 40
    assert server_names(["///", ":::"]) == ["1-entry", "2-entry"]


def test_a_build_gets_the_entry_as_a_word_and_no_shell_reads_it(tmp_path: Path) -> None:
    out, log = tmp_path / "out", tmp_path / "log"
    script = f"import pathlib, sys; pathlib.Path({str(out)!r}).write_text(repr(sys.argv[1:]))"
    words = build_words(f'{sys.executable} -c "{script}" --tag=x:{{}} {{}}', ["a"])
    evil = "$(touch pwned); `id` 'x"
    assert build(words, evil, log, 60) is None
    assert out.read_text() == repr([f"--tag=x:{evil}", evil]) and not (tmp_path / "pwned").exists()


def test_a_build_that_fails_has_its_code_and_last_lines(tmp_path: Path) -> None:
    script = "import sys; print(*range(50), sep=chr(10)); print('hipcc: error'); sys.exit(7)"
    failed = build([sys.executable, "-c", script, "{}"], "a", tmp_path / "log", 60)
    assert failed is not None and failed.code == "build_failed" and failed.values["code"] == 7
    assert failed.values["output"][-1] == "hipcc: error" and len(failed.values["output"]) == LAST_LINES
    own = build([f"{tmp_path}/make-{{}}"], "a", tmp_path / "log", 60)
    assert own is not None and own.values["code"] is None, "each entry has its own program"
    with pytest.raises(BuildCut):
        build([sys.executable, "-c", "import time; time.sleep(3600)", "{}"], "a", tmp_path / "log", 0.0)


def test_a_build_command_that_cannot_be_run_is_no_result_of_its_entry(tmp_path: Path) -> None:
    (tmp_path / "build.sh").write_text("#!/bin/sh\necho $1 > built\n")
    for program, folder in (("no-such-program", None), ("./build.sh", tmp_path), ("true", tmp_path / "none")):
        with pytest.raises(HarnessError, match="--build") as error:
            build([program, "{}"], "a", tmp_path / "log", 60, None if folder is None else str(folder))
        assert str(folder or Path.cwd()) in error.value.next_step
    (tmp_path / "build.sh").chmod(0o755)
    assert build(["./build.sh", "{}"], "a", tmp_path / "log", 60, str(tmp_path)) is None
    assert (tmp_path / "built").read_text() == "a\n"


@pytest.mark.parametrize("command", ["make", "make '{}", "make {}"])
def test_a_build_command_that_cannot_be_used_is_refused(command: str, wording: Wording) -> None:
    with pytest.raises(HarnessError) as error:
        build_words(command, ["--evil" if command == "make {}" else "a"])
    wording(error.value)


def question_of(variable: str, values: list[Any]) -> BisectQuestion:
    return replace(ASKED, server="one", variable=variable, values=values, images=None)


def experiment_of(**server: Any) -> Experiment:
    load = Load(user="batch", batch_size=2, requests=4, output_tokens=11)
    servers = {"one": Server(template="simulated", **server)}
    scenario = Scenario(version=1, question="q", model="m", servers=servers, loads={"l": load})
    return Experiment(Path("s.yaml"), scenario)


@pytest.mark.parametrize(
    ("variable", "values"),
    [
        ("image", ["foo/bar:1", "foo/bar:2"]), ("cpus", [0.05, 0.1]), ("mem_limit", ["1g", "2g"]),
        ("ipc", ["shareable", "private"]), ("shm_size", ["1g", "2g"]), ("port", [8001, 8002]),
    ],
)  # fmt: skip
def test_what_only_a_container_uses_is_refused_for_a_process(
    variable: str, values: list[Any], wording: Wording
) -> None:
    with pytest.raises(HarnessError, match="container: false") as error:
        with_entries(experiment_of(container=False), question_of(variable, values))
    wording(error.value)
    assert len(with_entries(experiment_of(), question_of(variable, values)).scenario.servers) == 2


def test_entries_that_start_the_same_server_are_refused(wording: Wording) -> None:
    for container in (True, False):
        with pytest.raises(HarnessError) as error:
            with_entries(experiment_of(container=container), question_of("gpu_memory_utilization", [0.5, 0.6, 0.50]))
        wording(error.value)
        servers = with_entries(experiment_of(container=container), question_of("--seed", [1, 2])).scenario.servers
        assert len(servers) == 2


def test_a_dollar_sign_of_a_value_is_no_variable() -> None:
    values = ["$HOME", "${NONE}", "$(touch x)"]
    scenario = with_entries(experiment_of(container=False), question_of("--tag", values)).scenario
    for name, value in zip(scenario.servers, values, strict=True):
        service = fill_variables(prepare_server(scenario, name).file, {}).server
        assert (service.command or [])[-1] == value


def test_the_metric_is_that_of_the_loads() -> None:
    work = Load(user="batch", batch_size=2, requests=4, output_tokens=11)
    users = Load(user="chat", users=2, duration_s=60, think_s=[1, 2])
    opened = Load(user="chat", users=2, duration_s=60, arrivals=Arrivals(rate=1))
    assert [default_metric([load]) for load in (work, users, opened)] == ["wall", "e2e_p50", "e2e_sched_p50"]
    for name in ("wall", "ttft_p50", "tpot_mean", "output_tok_s"):
        refuse_metric(name)
    for name in ("ttft", "error_rate", "goodput", "send_lag_p50", "fun"):
        with pytest.raises(HarnessError, match="--for"):
            refuse_metric(name)


def test_an_image_that_was_replaced_stops_the_search(wording: Wording) -> None:
    record, _, run = made_bisection([(0, 1.0), (0, 1.0), (4, 1.0)])
    first, other = f"x/y@sha256:{'1' * 64}", f"x/y@sha256:{'2' * 64}"

    def served(digest: str | None) -> ServedBy:
        return replace(run.cells[0].served_by, image_digest=digest)

    cells = [
        replace(cell, served_by=served(digest)) for cell, digest in zip(run.cells, (None, first, None), strict=True)
    ]
    for same in (first, None, first.replace("x/y", "mirror/y"), f"sha256:{'1' * 64}"):
        refuse_other_image(record, cells, 0, served(same))
    refuse_other_image(record, cells, 4, served(other))  # its first digest
    with pytest.raises(HarnessError) as error:
        refuse_other_image(record, cells, 0, served(other))
    assert first in error.value.what and other in error.value.what
    wording(error.value)


def test_the_file_is_read_as_it_was_written_and_damage_is_named(tmp_path: Path) -> None:
    record, *_ = made_bisection([(0, 1.0), (4, 1.4), (2, because("build_failed", "no"))])
    write_bisect(tmp_path, record)
    assert read_bisect(tmp_path) == record and (bisect_command(tmp_path) or "").startswith("harness bisect --resume")
    assert read_bisect(tmp_path / "none") is None and bisect_command(tmp_path / "none") is None
    file = tmp_path / BISECT_FILE
    whole = file.read_text()
    for place, value in {
        "starts.0.entry": 9,
        "starts.0.took_s": -1.0,
        "question.budget_s": 0.0,
        "question.values": ["a"],
        "question.variable": 3,
        "spent_s": -2.0,
        "format_version": 99,
    }.items():
        edited = json.loads(whole)
        *outer, last = place.split(".")
        inner: Any = edited
        for key in outer:
            inner = inner[int(key) if key.isdigit() else key]
        inner[last] = value
        file.write_text(json.dumps(edited))
        with pytest.raises(HarnessError, match=BISECT_FILE):
            read_bisect(tmp_path)


def test_a_command_bisects_another_part_of_the_list() -> None:
    command = ASKED.command(1, 3)
    assert command.startswith("harness bisect s.yaml --images images.txt") and IMAGES[3] in command
    assert "--runs" not in command and "--runs 'my runs'" in ASKED.command(1, 3, Path("my runs"))
    assert f"--values image={IMAGES[1]},{IMAGES[3]} " in ASKED.pair_command(1, 3)
    assert ASKED.pair_command(1, 2) == ASKED.command(1, 2)
    here, there = (replace(ASKED, folder=folder, build="./b.sh {}") for folder in (os.getcwd(), "/some where"))
    assert here.command(1, 3).startswith("harness bisect s.yaml")
    assert there.command(1, 3).startswith("cd -- '/some where' && harness bisect s.yaml")
    assert f"--runs {Path('runs').absolute()}" in there.command(1, 3)
    words = shlex.split(replace(ASKED, images=None).command(1, 3))
    assert f"image={IMAGES[1]},{IMAGES[2]},{IMAGES[3]}" in words and "--good" not in words
