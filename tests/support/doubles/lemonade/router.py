"""Models of the double: known, downloaded, loaded; one language model at a time."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec

from tests.support.doubles.lemonade.arguments import BadArgument, llama_arguments, vllm_arguments
from tests.support.doubles.lemonade.backend import Backend, NotReady, free_port, log
from tests.support.doubles.lemonade.bodies import body, error, load_error
from tests.support.doubles.lemonade.settings import Settings

FAMILY = "gfx1151"
BUILT_IN = {
    "Qwen3.5-0.8B-FP16-vLLM": {"checkpoint": "Qwen/Qwen3.5-0.8B", "recipe": "vllm", "size": 1.77},
    "Qwen3.5-0.8B-GGUF": {"checkpoint": "unsloth/Qwen3.5-0.8B-GGUF:Q4_K_M", "recipe": "llamacpp", "size": 0.6},
}
KERNEL_PAGE = "https://lemonade-server.ai/gfx1151_linux.html"
OPTIONS = ("ctx_size", "vllm_args", "vllm_backend", "llamacpp_args", "llamacpp_backend", "pinned")


class Model(msgspec.Struct, frozen=True):
    name: str  # as listed, without a prefix
    canonical: str  # user.NAME or builtin.NAME
    checkpoint: str
    recipe: str

    @property
    def served(self) -> str:
        """The name that the backend knows: a built-in model has no prefix there."""
        return self.canonical.removeprefix("builtin.")


class Loaded(msgspec.Struct):
    model: Model
    options: dict[str, Any]
    backend: Backend


class Router:
    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.loaded: Loaded | None = None
        self.installed = {"vllm"} | {"llamacpp"} if settings.behaviour.installed else set()
        self.downloaded: set[str] = set()
        self.loads = 0  # started backends
        self._registered: dict[str, dict[str, Any]] = dict(settings.user_models)
        self._lock = threading.RLock()

    def models(self) -> list[Model]:
        own = [_model(name, f"user.{name}", found) for name, found in self._registered.items()]
        return own + [_model(name, f"builtin.{name}", found) for name, found in BUILT_IN.items()]

    def find(self, name: str) -> Model:
        """A model by its canonical or its bare name. Raises Refused."""
        for model in self.models():
            if name in (model.name, model.canonical):
                if model.recipe == "vllm" and not self.settings.behaviour.gpu:
                    was = "Model 'user.TinyVLLM' is not available on this system. Unsupported GPU"
                    raise error("model_not_supported", 404, message=was.replace("user.TinyVLLM", name))
                return model
        text = body("errors")["model_not_found"]["error"]["message"].replace("NoSuch", name)
        raise error("model_not_found", 404, message=text, requested_model=name)

    def is_downloaded(self, model: Model) -> bool:
        return model.checkpoint.startswith("/") or model.canonical in self.downloaded

    def describe(self, model: Model) -> dict[str, Any]:
        """An entry of /models."""
        options = self.resolve(model, {})
        local = model.checkpoint.startswith("/")
        return {
            **body("model"),
            "id": model.name,
            "checkpoint": model.checkpoint,
            "checkpoints": {"main": model.checkpoint},
            "context_length": options["ctx_size"],
            "downloaded": self.is_downloaded(model),
            "recipe": model.recipe,
            "recipe_options": self.settings.saved_options.get(model.canonical, {}),
            "source": "local_path" if local else "huggingface",
        }

    def options(self, asked: str) -> dict[str, Any]:
        """The body of /models/ID/options: it repeats the ID that was asked for. Raises Refused."""
        model = self.find(asked)
        saved = self.settings.saved_options.get(model.canonical, {})
        effective = {"model_name": asked, "merge_args": True, **self.resolve(model, {})}
        return {"defaults": {"ctx_size": -1}, "effective": effective, "model_name": asked,
                "recipe": model.recipe, "saved": saved}  # fmt: skip

    def resolve(self, model: Model, asked: dict[str, Any]) -> dict[str, Any]:
        """Options of a load: the request's, then recipe_options.json, then the configuration."""
        config = self.settings.config
        section = config.get(model.recipe, {})
        below = {"ctx_size": config["ctx_size"], f"{model.recipe}_args": section.get("args", "")}
        saved = self.settings.saved_options.get(model.canonical, {})
        given = {key: value for key, value in asked.items() if key in OPTIONS and value is not None}
        found = {**below, **saved, **given}
        if found["ctx_size"] == -1:
            found["ctx_size"] = 4096  # by the memory that is free
        return {key: value for key, value in found.items() if value != ""}

    def pull(self, name: str, asked: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Progress of a download. Raises Refused when there is none."""
        if self.settings.config["offline"]:
            raise error("pull_offline", 400)
        if asked.get("checkpoint"):
            entry = {"checkpoint": asked["checkpoint"], "recipe": asked.get("recipe", "llamacpp")}
            self._registered[name.removeprefix("user.")] = entry
        model = self.find(name)
        return self._download(model)

    def _download(self, model: Model) -> Iterator[dict[str, Any]]:
        if not self.settings.behaviour.hub:
            raise NotReady("CURL error: Couldn't resolve host name")
        whole = 100_000_000
        head = {"file": "model.safetensors", "file_index": 1, "total_files": 1, "bytes_previously_downloaded": 0}
        for percent in range(0, 101, 25):
            so_far = {"bytes_downloaded": whole * percent // 100, "percent": percent}
            yield {**head, **so_far, "bytes_total": whole, "total_download_size": whole}
            time.sleep(0.02)
        self.downloaded.add(model.canonical)

    def load(self, name: str, asked: dict[str, Any]) -> Model:
        """Load a model, and wait until it answers. The same options again do nothing. Raises Refused."""
        with self._lock:
            model = self.find(name)
            options = self.resolve(model, asked)
            now = self.loaded
            if now is not None and now.backend.alive and now.model == model and now.options == options:
                return model
            if now is not None and now.backend.alive and now.model != model and now.options.get("pinned"):
                raise error("slots_pinned", 409, requested_model=name)
            if not self.is_downloaded(model):
                for _ in self.pull(model.canonical, {}):
                    pass
            try:
                self._start(model, options)
            except NotReady as first:
                log(f"(Router) Backend load failed: {first}")
                log("(Router) Load failed with non-file-not-found error, evicting all models and retrying...")
                try:
                    self._start(model, options)
                except NotReady as again:
                    log(f"(Router) Retry also failed: {again}")
                    raise load_error(name, str(again)) from None
            except BadArgument as problem:
                raise load_error(name, str(problem)) from None
            return model

    def _start(self, model: Model, options: dict[str, Any]) -> None:
        self.evict()
        behaviour = self.settings.behaviour
        port = free_port()
        log(f"({'vLLM' if model.recipe == 'vllm' else 'llamacpp'}) Loading model: {model.name}")
        if model.recipe == "vllm":
            self._probe_quantization(model)
            arguments = vllm_arguments(model.checkpoint, model.served, port, options, FAMILY)
            backend = Backend("vllm-server", arguments, port)
        else:
            backend = Backend("llama-server", llama_arguments(model.checkpoint, port, options), port)
        self.loads += 1
        never = self.loads <= behaviour.never_ready
        try:
            backend.wait_ready(float(self.settings.config["global_timeout"]), never)
        except NotReady:
            if backend.alive:
                backend.stop(behaviour.unload_s)
            raise
        self.loaded = Loaded(model, options, backend)

    def _probe_quantization(self, model: Model) -> None:
        """Without a quantization_config in the cache Lemonade asks the hub, offline or not, also for a path."""
        if self.settings.behaviour.hub:
            return
        folder = self.settings.home / ".cache/huggingface/hub" / ("models--" + model.checkpoint.replace("/", "--"))
        texts = [path.read_text() for path in folder.glob("snapshots/*/config.json")]
        if not any("quantization_config" in text for text in texts):
            raise NotReady("CURL error: Couldn't resolve host name")

    def evict(self) -> bool:
        """Unload what is loaded. False when there was nothing."""
        with self._lock:
            if self.loaded is None:
                return False
            self.loaded.backend.stop(self.settings.behaviour.unload_s)
            self.loaded = None
            return True

    def for_request(self, name: str, asked: dict[str, Any]) -> Loaded:
        """The model of a chat request. One that is not loaded gets the saved options."""
        with self._lock:
            model = self.find(name)
            now = self.loaded
            if now is None or now.model != model or not now.backend.alive:
                self.load(name, {"ctx_size": asked.get("ctx_size")})
            assert self.loaded is not None
            return self.loaded


def _model(name: str, canonical: str, found: dict[str, Any]) -> Model:
    return Model(name, canonical, str(found["checkpoint"]), str(found["recipe"]))
