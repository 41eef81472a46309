"""The commands of docs/recipes.md work, in the order of the page, on the embedded engine with less work."""

import json
import re
import shlex
from pathlib import Path

from harness.base.files import ROOT
from harness.base.process import free_port
from tests.support.command import harness
from tests.support.load_runs import end, log_of, start

PAGE = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
RECIPES = dict(re.findall(r"^## (\d+)\. .+\n```\n((?:.+\n)+?)```$", PAGE, re.MULTILINE))
MORE = dict(re.findall(r"^\| (\w+) .+? \| `(.+?)` \| \[", PAGE, re.MULTILINE))  # by the first word of the task
RUN = re.compile(r"\b\d{8}-\d{6}-[a-z0-9-]+-[0-9a-f]{4}\b")
LOG = """\
ValueError: Free memory on device cuda:0 (76.45/96.0 GiB) on startup is less than desired GPU memory utilization \
(0.92, 88.32 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""


def commands(name: str) -> list[list[str]]:
    """The words of each command of a recipe."""
    return [shlex.split(line, comments=True) for line in (RECIPES | MORE)[name].splitlines()]


def write_scenarios(folder: Path) -> None:
    """The scenarios of the page, with less work."""
    for name, block in re.findall(r"```yaml\n# (\S+)\n(.+?)```", PAGE, re.DOTALL):
        text = re.sub(r"requests: \d+", "requests: 10", re.sub(r"output_tokens: \d+", "output_tokens: 4", block))
        text = text.replace(
            "container: false}", "container: false, variables: {preset: instant, extra_args: [--step-base-s, '0.05']}}"
        )
        text = text.replace("{extra_args: [", "{preset: instant, extra_args: [--step-base-s, '0.05', ")
        (folder / name).write_text(text)


def test_the_recipes_work(tmp_path: Path, slow_engine: str) -> None:
    write_scenarios(tmp_path)
    results = (ROOT / "tests" / "data" / "imports" / "vllm-chat.json").read_text()
    (tmp_path / "monday.json").write_text(results)
    (tmp_path / "tuesday.json").write_text(json.dumps(json.loads(results) | {"date": "20261122-125836"}))
    (tmp_path / "server.log").write_text(LOG)

    def cook(recipe: str, *more: str, codes: tuple[int, ...] = (0,), **names: str) -> str:
        out = ""
        for words in commands(recipe):
            given = [names.get(word, word.replace("http://127.0.0.1:8000", slow_engine)) for word in words]
            assert given[0] == "harness"
            done = harness(*given[1:], *more, cwd=tmp_path)
            assert done.code in codes and "error:" not in done.err, (given, done)
            out += done.out + done.err
        return out

    assert "\nReport: runs/" in cook("1", "--repeats", "1", simulated="m")
    assert "\nnew     job" in cook("2", "--repeats", "1", codes=(0, 4, 5))
    imported, *_ = commands("3")
    monday, tuesday = harness(*imported[1:], cwd=tmp_path).out.split()
    compared = harness("compare", monday, tuesday, cwd=tmp_path)
    assert (compared.code, compared.err) == (5, "") and compared.out.startswith("Cannot tell: ")
    cook("find", "--max-users", "2", "--budget", "8s", codes=(0, 5), NAME="m")
    judged = cook("fail", codes=(0, 5))
    assert "passed error_rate == 0" in judged and (tmp_path / "junit.xml").read_text().count("<testcase") == 4
    run = RUN.findall(judged)[0]
    assert "500,000 items take" in cook("plan", codes=(0, 4, 5), RUN=run)
    assert "0.78" in cook("explain")
    (tmp_path / "runs" / run / "processes.jsonl").write_bytes(b"")
    assert "0 of 8 cells" in cook("resume", codes=(0, 5), RUN=run)
    assert f"/small/{run}: run.json" in cook("file", RUN=run)


def test_the_options_of_stock_locust_work(tmp_path: Path, engine: str) -> None:
    (locust,) = commands("watch")
    given = {"10m": "2s", "9646": str(free_port())}
    options = [given.get(word, word) for word in locust[locust.index("--headless") :]]
    assert end(start(tmp_path, engine, "chat", *options)) == 0, log_of(tmp_path)
    assert "LLM metrics" in log_of(tmp_path) and "ignores this option" not in log_of(tmp_path)
