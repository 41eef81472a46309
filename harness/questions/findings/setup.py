"""Findings about how servers and loads were set up."""

from typing import Any

import numpy as np

from harness.base.command_line import command_line, positional
from harness.base.metrics import METRICS
from harness.base.units import count, figures, milliseconds, short_percent
from harness.hardware.bounds import decode_bound, run_gpu, run_model, ttft_floor
from harness.numbers.load_generator import MAX_CORE_WAIT, core_wait
from harness.numbers.summary import ENOUGH
from harness.numbers.warnings import HOST_CPU_FULL
from harness.questions.findings.rules import RowFacts, RuleResult, gain, rule, shorter
from harness.records.records import MAX_CPU
from harness.scenario import max_processes
from harness.scenario.check_syntax import parse_check

SMALL_SHM = 64 << 20  # Docker's default
FIRST_SLOW, FIRST_PART = 3.0, 0.1  # times the usual TTFT; of the time of all requests
CLIENT = 0.05  # of a number
FEW_ACCEPTED, MIN_DRAFTED = 0.4, 500
SLOWER = 1.02  # beyond what equal runs differ
SPECULATION = "harness run speculation"
NO_SPECULATION = {"drafts": None, "speculation": None}  # of the embedded engine, and of vLLM


@rule(
    when="several GPU workers share a /dev/shm of 64 MiB or less",
    means="Workers exchange data through /dev/shm. If it is too small, they fall back to slower ways, or the server "
    "dies.",
    actions="a larger /dev/shm; with one worker it changes nothing",
)
def small_shared_memory(row: RowFacts) -> RuleResult | None:
    host = (row.served.container or {}).get("HostConfig")
    workers = [row.served.effective.get(name) for name in ("tensor_parallel_size", "pipeline_parallel_size", "tp_size")]
    together = int(np.prod([number for number in workers if isinstance(number, int) and number > 0]))
    if not isinstance(host, dict) or host.get("IpcMode") == "host" or together < 2:
        return None
    size = host.get("ShmSize")
    if not isinstance(size, int) or size > SMALL_SHM:
        return None
    return RuleResult(
        cost=None,
        measured=f"{together} workers share {size >> 20} MiB of /dev/shm",
        why="Docker's default of 64 MiB",
        actions=[row.action("A /dev/shm of 16 GiB, of which only pages in use take memory", {"shm": None})],
        values={"shm_bytes": size, "workers": together},
    )


@rule(
    when="rows that are compared run different versions of one engine, and no setting of the scenario asks for that",
    means="The difference between these rows is also one of versions. Servers that start an engine bring their own, "
    "often an older one.",
    actions="images with the same version",
)
def versions_differ(row: RowFacts) -> RuleResult | None:
    version, name = _version(row), None if row.engine is None else row.engine.name
    servers = row.data.run.scenario.servers
    for facts in {run_row.row.server: run_row for run_row in row.run_rows}.values():
        other = facts.row
        if other.server == row.row.server or facts.engine is None or facts.engine.name != name:
            continue
        asked = [servers[server].variables.get("image") for server in (row.row.server, other.server)]
        if None not in (version, _version(facts)) and version != _version(facts) and asked[0] == asked[1]:
            return RuleResult(
                cost=None,
                measured=f"{row.row.server} runs {row.title} {version}, {other.server} {_version(facts)}",
                why="each server brings its own engine",
                actions=[
                    row.action(
                        "Give both servers images with the same version of the engine, or name the versions in "
                        "the result",
                        settings={f"{row.server_key}.variables": "image: ..."},
                    )
                ],
                values={"version": version, "other": _version(facts), "server": other.server},
            )
    return None


def _version(row: RowFacts) -> str | None:
    return None if row.served.startup is None else row.served.startup.version


@rule(
    when="the server reports another number for a setting than the scenario gives",
    means="The server ignored or replaced the setting, so that the run is not of what was asked for.",
    actions="the setting as the server knows it, or the number that it can have",
)
def setting_replaced(row: RowFacts) -> RuleResult | None:
    given = row.data.run.scenario.servers[row.row.server].variables
    different: dict[str, Any] = {}
    for name, spelled in ({} if row.engine is None else row.engine.settings).items():
        asked = given.get(spelled.variable or "")
        ran = row.setting(name)
        numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (asked, ran))
        if numbers and asked != ran and not (row.shares_context and name == "context"):
            different[spelled.variable or ""] = [asked, ran]
    if not different:
        return None
    (key, (asked, ran)), *_ = different.items()
    return RuleResult(
        cost=None,
        measured=f"the scenario gives {key} {asked}, and the server runs with {ran}",
        why="the server limits it, an argument comes twice, or this version does not know it",
        actions=[
            row.action(
                "Read the server's log for the setting, and give the number that it uses",
                settings={f"{row.server_key}.variables": f"{key}: {ran}"},
            )
        ],
        values={"settings": different},
    )


@rule(
    when="the first requests took over 3 times the usual time to the first token, and that was 10 % of the time; not "
    "where servers have `caches`, which asks about them",
    means="The server compiled kernels or filled caches while it was measured: the numbers depend on how many "
    "requests follow.",
    actions="a warm-up until the server is steady; a volume that keeps the compiled kernels",
)
def cold_start(row: RowFacts) -> RuleResult | None:
    if row.load.agent_trace is not None:  # first steps are longer by themselves
        return None
    if any(server.caches is not None for server in row.data.run.scenario.servers.values()):
        return None  # how slow the first requests are is the question there: its answer says it
    excess = total = 0.0
    firsts = []
    for name in row.row.cells:
        rows = row.data.cells[name].counted
        rows = rows.where(rows.good & (rows.chunks > 0))
        wave = max(1, min(row.in_flight, len(rows) // 4))
        if len(rows) < 8:
            return None
        order = np.argsort(rows.sent_s)
        e2e_s = (rows.last_chunk_s)[order]
        usual_s = float(np.median(e2e_s[wave:]))
        first_s = float(np.median(e2e_s[:wave]))
        if first_s < FIRST_SLOW * usual_s:
            return None
        excess, total = excess + float((e2e_s[:wave] - usual_s).sum()), total + float(e2e_s.sum())
        firsts.append((first_s, usual_s))
    if not firsts or excess < FIRST_PART * total:
        return None
    first_s, usual_s = firsts[0]
    mean_s = row.row.pooled.e2e.mean
    expected = shorter("e2e_mean", "a mean E2E", mean_s, 1 - excess / total) if mean_s else None
    return RuleResult(
        cost=excess / total,
        measured=f"the first requests took {milliseconds(first_s)} ms, the others {milliseconds(usual_s)} ms: "
        f"{short_percent(excess / total)} of the time of all requests",
        why="kernels are compiled at their first use, for each shape",
        actions=[
            row.action("Measure again: the kernels are compiled now", gain=expected)
            if row.is_quick  # it has no warm-up
            else row.warm_up("Warm up until the server is steady", expected)
        ],
        values={"first_s": first_s, "usual_s": usual_s, "share": excess / total},
    )


@rule(
    when="the load generator's delays may change a number of the row by 5 % or more",
    means="The client is a part of what was measured.",
    actions="more load processes where the load has a user for each and other programs leave them the CPU; a free "
    "core; another machine for the load",
    requests=ENOUGH,
)
def load_generator(row: RowFacts) -> RuleResult | None:
    errors = {metric: max(error) for metric, error in row.row.client_error.items()}
    worst = max(errors, key=lambda metric: errors[metric], default=None)
    if worst is None or errors[worst] < CLIENT:
        return None
    more = min(2 * row.load.processes, max_processes(row.load))
    # `harness quick` has one load process, and no workers.
    action = row.action("Stop other programs on this machine, or send the load from another one")
    if not row.is_quick and more > row.load.processes and not _others_had_the_cpu(row):
        action = row.action(
            f"{more} load processes, or another machine for the load",
            settings={row.load_key: f"processes: {more}"},
            risk="they need cores, which the server may need too",
        )
    return RuleResult(
        cost=max((error for metric, error in errors.items() if metric.startswith("e2e_p")), default=None),
        measured=f"delays of the load generator are up to {short_percent(errors[worst])} of {worst}",
        why="its processes were busy, or waited for a free core",
        actions=[action],
        values={"metric": worst, "error": errors[worst]},
    )


def _others_had_the_cpu(row: RowFacts) -> bool:
    """Whether other programs kept the load processes from running: more of them would wait as well."""
    marks = [mark for name in row.row.cells for mark in row.data.marks.get(name, [])]
    if core_wait(marks) > MAX_CORE_WAIT:
        return True
    loads = [cell.machine_load for cell in row.cells if cell.machine_load is not None]
    own = max((mark.cpu_max for mark in marks if mark.cpu_max is not None), default=MAX_CPU)
    is_full = any((load.host_cpu_mean or 0.0) >= HOST_CPU_FULL for load in loads)
    return is_full and own < MAX_CPU and row.data.run.remote is None


@rule(
    when="less than 40 % of the drafted tokens were accepted",
    means="Speculation computes tokens that are thrown away. With several users that time is missing for others.",
    actions="fewer drafted tokens; a comparison with no speculation, with the number of users that you expect",
)
def speculation_rejected(row: RowFacts) -> RuleResult | None:
    drafted, accepted = row.drafts
    if drafted < MIN_DRAFTED or accepted >= FEW_ACCEPTED * drafted:
        return None
    return RuleResult(
        cost=None,
        measured=f"{short_percent(accepted / drafted)} of {drafted:,.0f} drafted tokens were accepted",
        why="the draft does not fit these answers",
        actions=[
            row.action(
                "Draft fewer tokens; compare with the server without speculation, which may be slower all the same",
                NO_SPECULATION,
                risk="one user alone may be slower",
                verify=SPECULATION,
            )
        ],
        values={"drafted": drafted, "accepted": accepted},
    )


@rule(
    when="with speculation each token took at least 2 % longer than on the same server without it, in each repeat",
    means="The draft and the tokens that are not accepted take compute. One user leaves it idle; several need it.",
    actions="no speculation from that number of users on",
    requests=ENOUGH,
)
def speculation_costs(row: RowFacts) -> RuleResult | None:
    ratio = _with_speculation(row)
    if ratio is None or ratio[1] < SLOWER:
        return None
    others = [other for other in row.neighbours if other.in_flight != row.in_flight]
    factors = {
        facts.in_flight: effect[0] for facts in (row, *others) if (effect := _with_speculation(facts)) is not None
    }
    cheap = [users for users, factor in factors.items() if factor < 1]
    costly = [users for users in factors if users > max(cheap, default=0)]
    if row.in_flight not in costly:  # with more users it pays again: chance, or another cause
        return None
    factors_text = ", ".join(f"{users} at once: {figures(factor)} times" for users, factor in sorted(factors.items()))
    drafted, accepted = row.drafts
    text = f"{short_percent(1 - 1 / ratio[0])} less time for each token, as measured without speculation"
    return RuleResult(
        cost=(row.part_of("decode") or 1.0) * (1 - 1 / ratio[0]),
        measured=f"speculation makes each token slower from {count(min(costly), 'request')} at once on (time of a "
        f"token with it, {factors_text})",
        why=f"{short_percent(accepted / drafted)} of the drafted tokens were accepted",
        actions=[
            row.action(
                f"Start the server without speculation for {count(min(costly), 'request')} at once and more",
                NO_SPECULATION,
                gain=gain("tpot_mean", 1 / ratio[0], text),
                risk="fewer users at once may be slower" if cheap else "",
                verify=SPECULATION,
            )
        ],
        values={"from": min(costly), "ratios": {str(users): factor for users, factor in sorted(factors.items())}},
    )


def _with_speculation(row: RowFacts) -> tuple[float, float] | None:
    """TPOT with speculation / without: the ratio of the means, and its smallest value over the repeats.

    None where the server does not speculate, or no valid row of the same load and type of server does not.
    """
    servers, mine = row.data.run.scenario.servers, row.data.run.scenario.servers[row.row.server]
    if not row.drafts[0] or row.row.invalid is not None:
        return None
    for other in row.run_rows:
        same = other.row.load == row.row.load and servers[other.row.server].template == mine.template
        if not same or other.drafts[0] or other.row.invalid is not None:
            continue
        with_it, without = ([cell.numbers.tpot.mean for cell in facts.cells] for facts in (row, other))
        times, others = [time_s for time_s in with_it if time_s], [time_s for time_s in without if time_s]
        if times and others:
            return (sum(times) / len(times)) / (sum(others) / len(others)), min(times) / max(others)
    return None


@rule(
    when="an SLO asks for less time than the memory bandwidth or the compute of the GPU allows for one user",
    means="No setting of this server can meet it with this model on this GPU.",
    actions="fewer bytes per token: a quantized or smaller model; another SLO; a faster GPU",
)
def slo_beyond_hardware(row: RowFacts) -> RuleResult | None:
    ran = next((cell for cell in row.data.run.cells if cell.id in row.row.cells), None)
    if ran is None or not len(row.tokens):
        return None
    size, (gpu, gpus) = run_model(ran), run_gpu(row.data.run, ran)
    prompt = (row.row.pooled.prompt_tokens or 0) / max(1, row.row.pooled.succeeded)
    if size is None or gpu is None:
        return None
    floors = {"tpot": 1 / decode_bound(size, gpu, context=prompt, gpus=gpus)}
    floors["ttft"] = max(filter(None, ttft_floor(size, gpu, prompt, gpus)))
    bounds: list[tuple[str, str, float]] = []  # text, latency, seconds
    for text in row.data.run.scenario.checks:
        check = parse_check(text)
        if not check.concerns(row.row.server, row.row.load):
            continue
        bounds += [(slo.text, slo.latency, slo.bound_s) for slo in check.slos]
        if not check.relative and check.operator in ("<", "<="):
            bounds.append((text, METRICS[check.metric].latency, check.bound))
    broken = [(text, bound_s, floors[name]) for text, name, bound_s in bounds if floors.get(name, 0.0) > bound_s > 0]
    if not broken:
        return None
    text, bound_s, floor = max(broken, key=lambda slo: slo[2] / slo[1])
    share = bound_s / floor
    return RuleResult(
        cost=None,  # less time is what the hardware cannot give
        measured=f"{text} asks for {milliseconds(bound_s)} ms; {gpu.name} needs at least {milliseconds(floor)} ms",
        why=f"a token reads {figures(size.read_bytes / 1e9)} GB at {figures(gpu.bandwidth_gb_s * gpus)} GB/s",
        actions=[
            row.action(
                f"Weights of {short_percent(share)} of the size or less, or an SLO of {milliseconds(floor / 0.6)} ms",
                risk="a quantized model answers a little differently",
                verify=command_line("harness", "expect", *positional(row.data.run.scenario.model)),
            )
        ],
        values={"slo": text, "bound_s": bound_s, "floor_s": floor},
    )


RULES = (
    small_shared_memory, versions_differ, setting_replaced, cold_start, load_generator, speculation_rejected,
    speculation_costs, slo_beyond_hardware,
)  # fmt: skip
