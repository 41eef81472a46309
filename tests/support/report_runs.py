"""Run directories made by hand for the tests of reports: plausible numbers out of a small model of batching."""

import random
from pathlib import Path

from msgspec.structs import replace

from harness.numbers.summarize import read_summary, summarize, write_summary
from harness.questions.report.page import run_html
from harness.records.manifest import CellRun, Machine, Phase, Run, ServedBy, Startup, read_run, write_run
from harness.records.records import ErrorKind, ProcessMark, Request
from harness.scenario import Load, Scenario, Server
from harness.scenario.plan import plan
from tests.support.made_runs import write_lines

HOSTILE = "</script><script>document.title='hacked'</script><img src=x onerror=\"document.title='hacked'\"> & 'quoted'"
START_S = 1_790_000_000.0


def scenario(repeats: int = 5, requests: int = 50, servers: tuple[str, ...] = ("open", "limited")) -> Scenario:
    return Scenario(
        version=1,
        question="How much faster is the same work when several requests run at once, and what does a limit of "
        "sequences do?",
        model="Qwen3.5-0.8B",
        servers={name: Server(template="simulated", container=False) for name in servers},
        loads={
            "sequential": Load(user="batch", batch_size=1, requests=requests, output_tokens=50),
            "batch-5": Load(user="batch", batch_size=5, requests=requests, output_tokens=50),
            "batch-10": Load(user="batch", batch_size=10, requests=requests, output_tokens=50),
        },
        repeats=repeats,
        max_error_rate=0.5,
        checks=["error_rate == 0", "ttft_p95 <= 2s"],
    )


# What is seen of a start from outside, and one that is told apart by the server's log.
SEEN = [("spawn", 0.21), ("port open", 0.34), ("health", 0.12), ("first answer", 0.4)]
BY_LOG = [
    ("pull", 0.01), ("flags", 0.3), ("create", 0.2), ("process", 1.9), ("weights", 0.8), ("compile", 3.1),
    ("graphs", 0.6), ("warm-up", 0.1), ("ready", 0.2), ("first answer", 0.4),
]  # fmt: skip
STARTUP = Startup(
    engine="vllm", version="0.32.0", attention_backend="TRITON_ATTN", max_model_len=8192, weights_gib=7.56,
    model_load_s=8.9, compile_s=3.42, compile_cache="warm", kv_cache_tokens=384_976, kv_cache_gib=52.87,
    max_concurrency=46.99,
)  # fmt: skip


def write_run_directory(
    folder: Path,
    *,
    repeats: int = 5,
    requests: int = 50,
    faults: int = 0,
    servers: tuple[str, ...] = ("open", "limited"),
    chunks: int = 50,
) -> Run:
    """A finished run with records, metrics, manifest and summary. The last server takes four sequences at once."""
    chosen = scenario(repeats, requests, servers)
    dice = random.Random(7)
    cells: list[CellRun] = []
    records: list[Request] = []
    marks: list[ProcessMark] = []
    scrapes: list[dict[str, object]] = []
    now = START_S
    for number, cell in enumerate(plan(chosen)):
        started = now
        phases = BY_LOG if cell.server == servers[-1] else SEEN
        served_by = ServedBy(
            url=f"http://127.0.0.1:{40000 + number}",
            template="simulated",
            simulated=True,
            version="0.1.0",
            model=chosen.model,
            arguments=["--max-num-seqs", "4" if cell.server == servers[-1] else "256", "--seed", "42"],
            phases=[Phase(name=name, seconds=round(s * dice.uniform(0.9, 1.15), 3)) for name, s in phases],
            startup=STARTUP,
            effective={"max_num_seqs": 4 if cell.server == servers[-1] else 256, "note": HOSTILE},
        )
        now += 1.2
        at_once = chosen.loads[cell.load].batch_size or 1
        limit = 4 if cell.server == servers[-1] else 256
        marks.append(
            ProcessMark(event="start", process=100 + number, cell=cell.id, wall_s=now, monotonic_s=now - START_S + 50)
        )
        made, now = _requests(cell.id, cell.load, 100 + number, now, at_once, limit, requests, dice, chunks)
        for i in range(faults):
            made[-1 - i] = _fault(made[-1 - i], i)
        records += made
        scrapes += _scrapes(cell.id, made, limit, started)
        now += 0.6
        marks.append(
            ProcessMark(
                event="end", process=100 + number, cell=cell.id, wall_s=now, monotonic_s=now - START_S + 50,
                sent=len(made), recorded=len(made), cpu_s=0.2,
            )
        )  # fmt: skip
        cells.append(
            CellRun(
                id=cell.id, server=cell.server, load=cell.load, repeat=cell.repeat, started_wall_s=started,
                ended_wall_s=now, served_by=served_by,
            )
        )  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    write_lines(folder / "requests.jsonl", records)
    write_lines(folder / "processes.jsonl", marks)
    write_lines(folder / "metrics.jsonl", scrapes)
    run = Run(
        id="20260921-140000-first-look",
        status="valid",
        started_wall_s=START_S,
        ended_wall_s=now,
        scenario_name="first-look",
        scenario=chosen,
        workload_sha256="5e1f" * 16,
        order=[cell.id for cell in plan(chosen)],
        cells=cells,
        machine=Machine(
            name="strix", kernel="6.17.0", cpu="AMD Ryzen AI Max+ 395", cores=32, ram_bytes=128 * 2**30, docker="29.1.2"
        ),
        versions={"harness": "0.1.0", "locust": "2.47.0", "python": "3.11.2"},
        git_commit="0123456789abcdef",
    )
    write_run(folder, run)
    write_summary(folder, summarize(folder))
    return run


def _requests(
    cell: str,
    load: str,
    process: int,
    now: float,
    at_once: int,
    limit: int,
    count: int,
    dice: random.Random,
    chunks: int,
) -> tuple[list[Request], float]:
    made: list[Request] = []
    for start in range(-at_once, count, at_once):  # one burst of warm-up first
        ends = [now]
        for place in range(min(at_once, count - start)):
            wave, company = divmod(place, limit)[0], min(at_once, limit)
            step = 0.0098 * (1 + 0.035 * (company - 1)) * dice.uniform(0.97, 1.05)
            first = 0.045 + 0.004 * place + wave * 50 * step * dice.uniform(0.9, 1.05) + dice.expovariate(200)
            arrivals = [round(first + step * i * 50 / chunks + dice.uniform(0, 0.001), 5) for i in range(chunks)]
            made.append(
                Request(
                    id=f"{cell}-{start + place}", cell=cell, load=load, user_class="BatchAgent",
                    index=start + place + at_once, user=0, process=process, clock="kernel",
                    phase="warmup" if start < 0 else "measured", sent_s=now - START_S + 50,
                    ended_s=arrivals[-1] + 0.0004, headers_s=0.002, chunks_s=arrivals, prompt_tokens=256,
                    output_tokens=50, asked_tokens=50, fixed_length=True, finish="length", status=200,
                )
            )  # fmt: skip
            ends.append(now + arrivals[-1])
        now = max(ends) + 0.001
    return made, now


def _fault(like: Request, number: int) -> Request:
    kinds: list[tuple[ErrorKind, str]] = [
        ("timeout", "nothing arrived for 300 s"),
        ("stream_error", HOSTILE),
        ("rejected", "503: the queue is full"),
    ]
    kind, message = kinds[number % len(kinds)]
    return replace(
        like, id=f"{like.id}-f{number}", chunks_s=[], output_tokens=None, finish=None, error=kind, message=message
    )


def _scrapes(cell: str, made: list[Request], limit: int, started: float) -> list[dict[str, object]]:
    spans = [(r.sent_s, r.sent_s + r.ended_s) for r in made]
    result: list[dict[str, object]] = []
    at = started + 1.3
    end = START_S - 50 + max(ended for _, ended in spans)
    while at < end and len(result) < 400:
        monotonic = at - START_S + 50
        open_now = sum(sent <= monotonic < ended for sent, ended in spans)
        values = {"running": float(min(open_now, limit)), "waiting": float(max(0, open_now - limit))}
        values |= {"kv_usage": min(1.0, values["running"] / 8), "preemptions": float(max(0, len(result) // 3 - 1))}
        result.append({"wall_s": at, "cell": cell, "values": values})
        at += 1.0 if len(made) > 1000 else 0.25
    return result


def write_report(folder: Path) -> Path:
    """Write the page of a run from its files."""
    path = folder / "report.html"
    path.write_text(run_html(folder, read_run(folder), read_summary(folder)), encoding="utf-8")
    return path
