"""Command line of the embedded engine: `python -m harness.simulated --help`."""

import argparse
import asyncio
import gc
import signal
import sys
from pathlib import Path

import msgspec

from harness.simulated.answer import FAULTS, parse_fault
from harness.simulated.engine import DEFAULT_PRESET, MEMORY, PRESETS, EngineConfig
from harness.simulated.kernels import KernelCache
from harness.simulated.server import ServerConfig, SimulatedServer, log
from harness.simulated.wire import TEXT_KINDS


def main(argv: list[str] | None = None) -> int:
    """Run the server until SIGTERM or Ctrl-C. Returns the exit status."""
    options = _parser().parse_args(argv)
    try:
        config = _config(options)
    except ValueError as error:
        print(f"ERROR [simulated] {error}", file=sys.stderr)
        return 1
    try:
        return asyncio.run(_run(config, options))
    except OSError as error:
        subject = error.filename or f"cannot listen on {config.host}:{config.port}"  # the file is the send log
        print(f"ERROR [simulated] {subject}: {error.strerror}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m harness.simulated",
        description="An OpenAI-compatible server that models continuous batching. It computes no model. Flags are "
        "named as vLLM's where vLLM has them; each overrides one parameter of the preset.",
        epilog="Faults, with the default of the parameter:\n"
        + "\n".join(f"  {kind + ('' if default is None else f':{default}'):16} {text}"
                    for kind, (default, text) in FAULTS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--preset", choices=sorted(PRESETS), default=DEFAULT_PRESET)
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8000, help="0 picks a free one")
    add("--model", default="simulated", help="the name under which the model is served")
    add("--served-model-name", help="the same, and stronger")
    add("--other-models", nargs="*", default=[], metavar="NAME", help="models that it has, too")
    add("--max-loaded-models", type=int, default=1, metavar="N", help="at the same time; requests wait for a switch")
    add("--switch-s", type=float, default=0.0, metavar="S", help="seconds to load one of several models")
    for field in msgspec.structs.fields(EngineConfig):
        flag = "--" + field.name.replace("_", "-")
        if field.name == "enable_prefix_caching":
            add(flag, action=argparse.BooleanOptionalAction, default=None)
        elif field.name == "num_gpu_blocks":
            add("--num-gpu-blocks-override", dest=field.name, type=int, metavar="N")
        else:
            add(flag, type=field.type, metavar="S" if field.name.endswith("_s") else "N")
    text = "acceptance rate of prompts of a kind (code, chat, structured) instead of --acceptance-rate; repeatable"
    add("--acceptance-of", action="append", default=[], metavar="KIND=N", help=text)
    add(
        "--gpu-memory-utilization",
        type=float,
        metavar="N",
        help="share of the GPU's memory for the engine, which decides the size of the KV cache and whether it starts",
    )
    add("--kv-cache-dtype", choices=["auto", "fp8"], default="auto", help="fp8: twice the tokens, 10 %% more mistakes")
    add("--free-memory-gib", type=float, metavar="N", help="what other programs leave of the GPU's memory")
    add("--natural-output-tokens", type=int, default=120, metavar="N", help="mean length of an answer left to itself")
    add("--send-log", type=Path, metavar="FILE", help="append the true send time of every chunk, as JSON lines")
    add("--fault", action="append", default=[], metavar="KIND[:N][@NTH]", help="of each NTH request; see below")
    add("--startup-s", type=float, default=0.0, metavar="S", help="seconds before the port is opened")
    add("--weights-s", type=float, default=0.0, metavar="S", help="after that, seconds to load the weights")
    add("--start-compile-s", type=float, default=0.0, metavar="S", help="then seconds to compile, if nothing is cached")
    add("--compile-cache", type=Path, metavar="DIR", help="where a later start finds what this one compiled")
    add("--build", default="1", metavar="NAME", help="of the engine: another one compiles anew")
    add("--fail-start", metavar="TEXT", help="log this instead of becoming ready, and exit")
    add("--exit-code", type=int, default=1, metavar="N", help="status of --fail-start")
    return parser


def _config(options: argparse.Namespace) -> ServerConfig:
    parameters = {name: getattr(options, name) for name in EngineConfig.__struct_fields__}
    overrides = {name: value for name, value in parameters.items() if value is not None}
    engine = msgspec.structs.replace(PRESETS[options.preset], **overrides)
    if options.gpu_memory_utilization is not None:
        engine = _with_memory(engine, options)
    is_small = options.kv_cache_dtype == "fp8"
    if is_small:
        engine = msgspec.structs.replace(engine, num_gpu_blocks=2 * engine.num_gpu_blocks)
    if problem := engine.problem():
        raise ValueError(problem)
    if not 0 <= options.port < 65536:
        raise ValueError(f"--port: no port is {options.port}; 0 to 65535")
    return ServerConfig(
        engine=engine,
        preset=options.preset,
        model=options.served_model_name or options.model,
        host=options.host,
        port=options.port,
        natural_output_tokens=options.natural_output_tokens,
        send_log=options.send_log,
        other_models=options.other_models,
        max_loaded_models=max(1, options.max_loaded_models),
        switch_s=options.switch_s,
        faults=[parse_fault(text) for text in [*options.fault, *(["mistakes"] if is_small else [])]],
        acceptance_of=dict(map(_kind_and_rate, options.acceptance_of)),
        kv_cache_dtype=options.kv_cache_dtype,
        gpu_memory_utilization=options.gpu_memory_utilization,
    )


def _kind_and_rate(text: str) -> tuple[str, float]:
    """Return the kind of prompts and the share of a text such as "code=0.8". Raises ValueError."""
    kind, _, number = text.partition("=")
    try:
        rate = float(number)
    except ValueError:
        rate = -1
    if kind not in TEXT_KINDS or not 0 <= rate <= 1:
        raise ValueError(f"--acceptance-of: expected code, chat or structured, =, and 0 to 1 (got {text!r})")
    return kind, rate


def _with_memory(engine: EngineConfig, options: argparse.Namespace) -> EngineConfig:
    """Return the engine with the KV cache that its share of the memory has room for. Raises ValueError as vLLM does."""
    memory = MEMORY[options.preset]
    if options.free_memory_gib is not None:
        memory = msgspec.structs.replace(memory, free_gib=options.free_memory_gib)
    if problem := memory.problem(options.gpu_memory_utilization):
        raise ValueError(problem)
    blocks = memory.blocks(options.gpu_memory_utilization, engine)
    if blocks < 1:
        raise ValueError(
            "No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the "
            "engine."
        )
    return msgspec.structs.replace(engine, num_gpu_blocks=blocks)


async def _run(config: ServerConfig, options: argparse.Namespace) -> int:
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    _log_start(config)
    kernels = KernelCache(options.compile_cache, options.build)
    if await _ends_within(stopped, options.startup_s):
        return 0
    if options.fail_start is not None:
        print(options.fail_start, file=sys.stderr, flush=True)
        return int(options.exit_code)
    if await _prepare(kernels, options, stopped):
        return 0
    server = SimulatedServer(config)
    server.engine.shapes.update(kernels.read_shapes())
    listening, port = await server.serve()
    host = "127.0.0.1" if config.host in ("0.0.0.0", "::") else config.host
    log("Application startup complete.")
    print(f"listening on http://{host}:{port}", flush=True)
    gc.collect()
    gc.freeze()  # these objects stay: a collection must not scan them while tokens are due
    await stopped.wait()
    log("stopping")
    listening.close()
    server.stop()
    kernels.store_shapes(server.engine.shapes)
    return 0


async def _prepare(kernels: KernelCache, options: argparse.Namespace, stopped: asyncio.Event) -> bool:
    """Load the weights and compile, as the options say. Return whether the server was stopped meanwhile."""
    if not options.weights_s and not options.start_compile_s:
        return False
    log("loading the weights")
    if await _ends_within(stopped, options.weights_s):
        return True
    log(f"the weights took {options.weights_s:g} s")
    is_cold = not kernels.has_graphs()
    if is_cold and await _ends_within(stopped, options.start_compile_s):
        return True
    log("compiled the graphs" if is_cold else "loaded the compiled graphs from the cache")
    if is_cold:
        kernels.store_graphs()
    return False


async def _ends_within(stopped: asyncio.Event, seconds: float) -> bool:
    try:
        await asyncio.wait_for(stopped.wait(), seconds)
    except TimeoutError:
        return False
    return True


def _log_start(config: ServerConfig) -> None:
    engine = config.engine
    tokens = engine.num_gpu_blocks * engine.block_size
    log(f"simulated engine: no model is computed, all timing comes from preset {config.preset}")
    parameters = msgspec.structs.asdict(engine)
    parameters["kv_cache_dtype"] = config.kv_cache_dtype
    if config.gpu_memory_utilization is not None:
        parameters["gpu_memory_utilization"] = config.gpu_memory_utilization
    log("parameters: " + ", ".join(f"{name}={value}" for name, value in parameters.items()))
    for fault in config.faults:
        log(f"fault {fault.kind}:{fault.parameter:g}, every {fault.every}")
    log(f"GPU KV cache size: {tokens:,} tokens, Maximum concurrency for {engine.max_model_len:,} tokens per request: "
        f"{tokens / engine.max_model_len:.2f}x")  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
