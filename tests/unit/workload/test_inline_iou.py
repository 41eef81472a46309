"""The inline IoU: which programs of an answer's shell commands count, and how alike two answers are."""

import json
from collections import Counter

import pytest

from harness.workload.agent_traces.inline_iou import MAX_CHARS, Actions, actions_of, iou, mean_iou


def actions(*commands: str) -> Counter[str]:
    return actions_of(("bash", json.dumps({"command": command})) for command in commands)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("ls -la && cat tides.py", {"ls": 1, "cat": 1}),
        ("cd beds && ls | wc -l; head -3 plan.txt", {"ls": 1, "wc": 1, "head": 1}),
        ("python a.py || python3 b.py\npytest -q", {"python": 2, "pytest": 1}),
        ("FOO=1 BAR=x /usr/bin/python3.11 a.py", {"python": 1}),
        ("sudo env A=1 time nice exec command make all", {"make": 1}),
        ("/opt/Python2.7.18 x; pip3 install y; PIP list", {"python": 1, "pip": 2}),
        ("egrep a b; fgrep a b; rg a; ag a", {"grep": 4}),
        ("less a; more b; gawk c; locate d; wget e; apt-get f", {"cat": 2, "awk": 1, "find": 1, "curl": 1, "apt": 1}),
        ("sphinx-build a b; sphinx-quickstart", {"sphinx": 2}),
        (". venv/bin/activate; source x", {"source": 2}),
        ("grep -E 'a|b; cat' x | sort", {"grep": 1, "sort": 1}),
        ('sed "s/x && rm y/z/" f; rm `find . | head`', {"sed": 1, "rm": 1}),
        ("echo done; cd a; ./run.sh; python_x; docker ps", {}),
        ("(cd a; ls)", {}),
        ("timeout 5 python x", {"timeout": 1}),
        ("cat <<END > f\ngit x\nEND", {"cat": 1, "git": 1}),
        ("echo 'not closed | cat", {"cat": 1}),
        ("nice -n 5 python x", {}),
        ("", {}), ("   \n\n;;&&||", {}), ("=x ls", {}),
    ],
)  # fmt: skip
def test_the_programs_of_a_command(command: str, expected: Actions) -> None:
    assert actions(command) == expected


def test_of_several_calls_those_of_bash_count_and_their_arguments_must_be_an_object() -> None:
    calls = [
        ("bash", '{"command": "ls"}'), ("bash", '{"cmd": "ls; cat a"}'), ("shell", '{"command": "rm a"}'),
        ("bash", '{"command": "rm'), ("bash", '"rm a"'), ("bash", '{"command": ["rm"]}'), ("bash", None), ("bash", ""),
        ("bash", '{"command": "", "cmd": "wc a"}'), ("bash", "[" * 5000),
    ]  # fmt: skip
    assert actions_of(calls) == {"ls": 2, "cat": 1, "wc": 1}


def test_a_long_command_is_read_to_its_limit() -> None:
    assert actions("ls;" * MAX_CHARS) == {"ls": MAX_CHARS // 3}
    assert actions("'\"`" * MAX_CHARS) == {}


@pytest.mark.parametrize(
    ("recorded", "generated", "score"),
    [
        (["grep -rn x . | head -5"], ["rg x src; ls"], 1 / 3),
        (["cd r && python3 a.py && python3 b.py"], ["FOO=1 /usr/bin/python3.11 a.py"], 1 / 2),
        (["git diff -- a.py > p.txt"], [], 0.0),
        (["ls; ls; cat a"], ["ls; cat a; cat b"], 2 / 4),
        (["ls", "cat a"], ["cat b; ls"], 1.0),
        (["echo done"], ["ls"], None),
    ],
)
def test_the_score_of_a_turn(recorded: list[str], generated: list[str], score: float | None) -> None:
    assert iou(actions(*recorded), actions(*generated)) == score


def test_the_score_of_a_run_is_the_mean_of_its_turns_with_four_decimals() -> None:
    assert mean_iou([1.0, 0.5, 1 / 3]) == 0.6111
    assert mean_iou([]) is None
