"""Requests of the double, under all the prefixes that Lemonade takes."""

import json
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.support.doubles.lemonade import chat, health
from tests.support.doubles.lemonade.backend import NotReady
from tests.support.doubles.lemonade.bodies import Refused, body, error
from tests.support.doubles.lemonade.router import KERNEL_PAGE, Router

PREFIXES = ("/api/v0", "/api/v1", "/v0", "/v1")
POST_ONLY = ("/load", "/unload", "/pull", "/install", "/chat/completions", "/completions")
GET_ONLY = ("/health", "/models", "/stats", "/system-info", "/system-stats", "/downloads")
MODEL_FIELDS = {"/load": "model_name", "/pull": "model_name", "/chat/completions": "model", "/completions": "model"}


class Lemonade(BaseHTTPRequestHandler):
    """One connection. `router` is set by the one who makes the server."""

    protocol_version = "HTTP/1.1"
    router: Router

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_HEAD(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""

    def _answer(self, respond: Callable[[str, bytes], None]) -> None:
        asked = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            respond(self.path.partition("?")[0], asked)
        except Refused as refused:
            self._json(refused.status, refused.body)
        except json.JSONDecodeError as problem:
            self._json(400, {"error": f"Invalid JSON in request body: [json.exception.parse_error.101] {problem}"})
        except NotReady as problem:
            self._json(500, {"error": str(problem)})

    def _get(self, path: str, _asked: bytes) -> None:
        router = self.router
        if path == "/live":
            return self._json(200, {"status": "ok"})
        if path == "/internal/config":
            return self._json(200, router.settings.config)
        name = _route(path)
        if name in POST_ONLY:
            return self._json(405, body("errors")["get_on_post"])
        if name == "/health":
            return self._json(200, health.health(router))
        if name == "/models":
            everything = "show_all=true" in self.path
            listed = [model for model in router.models() if everything or router.is_downloaded(model)]
            return self._json(200, {"data": [router.describe(model) for model in listed], "object": "list"})
        if name is not None and name.startswith("/models/"):
            wanted = name.removeprefix("/models/")
            if wanted.endswith("/options"):
                return self._json(200, router.options(wanted.removesuffix("/options")))
            return self._json(200, router.describe(router.find(wanted)))
        simple = {"/stats": body("stats"), "/system-stats": body("system-stats"), "/downloads": {"downloads": []}}
        if name == "/system-info":
            return self._json(200, health.system_info(router))
        if name in simple:
            return self._json(200, simple[name])
        self._json(404, {"error": {"message": "The requested endpoint does not exist", "type": "not_found"}})

    def _post(self, path: str, text: bytes) -> None:
        router = self.router
        name = _route(path)
        if router.settings.behaviour.new_status_codes and name in GET_ONLY:
            return self._json(405, {"error": "Method Not Allowed. Use GET for this endpoint"})
        asked: dict[str, Any] = json.loads(text) if text.strip() or name != "/unload" else {}
        self._require_fields(name, asked)
        if name in ("/chat/completions", "/completions"):
            return self._complete("/v1" + name, asked)
        if name == "/load":
            model = router.load(str(asked.get("model_name")), asked)
            found = {"checkpoint": model.checkpoint, "model_name": asked["model_name"], "recipe": model.recipe}
            return self._json(200, {**found, "status": "success"})
        if name == "/unload":
            return self._unload(asked.get("model_name"))
        if name == "/pull":
            return self._pull(asked)
        if name == "/install":
            return self._install(str(asked.get("recipe")), str(asked.get("backend")))
        if name == "/install/dry-run":
            return self._json(200, health.dry_run(asked))
        self._json(404, {"error": {"message": "The requested endpoint does not exist", "type": "not_found"}})

    def _require_fields(self, name: str | None, asked: dict[str, Any]) -> None:
        """Refuse a request without a model, or with a wrong type, as this version does. Raises Refused."""
        is_new = self.router.settings.behaviour.new_status_codes
        if is_new and name in MODEL_FIELDS and not asked.get(MODEL_FIELDS[name]):
            raise error("missing_model", 400)
        context = asked.get("ctx_size")
        if context is not None and not isinstance(context, int):
            text = f"[json.exception.type_error.302] type must be number, but is {type(context).__name__}"
            raise Refused(400 if is_new else 500, {"error": text})

    def _unload(self, name: str | None) -> None:
        loaded = self.router.loaded
        if name is None:
            self.router.evict()
            return self._json(200, {"message": "All models unloaded successfully", "status": "success"})
        if loaded is None or name not in (loaded.model.name, loaded.model.canonical) or not self.router.evict():
            return self._json(404, {"error": f"Model not loaded: {name}"})
        found = {"message": "Model unloaded successfully", "model_name": name, "status": "success"}
        self._json(200, found)

    def _install(self, recipe: str, backend: str) -> None:
        state = health.system_info(self.router)["recipes"].get(recipe, {}).get("backends", {}).get(backend)
        if state is None or state["state"] == "unsupported":
            why = state["message"] if state is not None else "Unknown backend"
            text = f"Cannot install {recipe}:{backend} on this system: {why}"
            return self._json(400, {"backend": backend, "error": text, "recipe": recipe})
        if state["message"] == "Linux kernel missing support":
            return self._json(200, {"action": KERNEL_PAGE, "backend": backend, "recipe": recipe})
        self.router.installed.add(recipe)
        self._json(200, {"backend": backend, "recipe": recipe, "status": "success"})

    def _pull(self, asked: dict[str, Any]) -> None:
        name = str(asked.get("model_name"))
        progress = self.router.pull(name, asked)
        if asked.get("subscribe") is False:
            job = {"id": "1", "model_name": name, "status": "completed", "percent": 100}
            for _ in progress:
                pass
            return self._json(200, job)
        if not asked.get("stream"):
            for _ in progress:
                pass
            return self._json(200, {"model_name": name, "status": "success"})
        self._stream(_pull_events(progress))

    def _complete(self, path: str, asked: dict[str, Any]) -> None:
        self._send(200, *chat.answer(self.router, path, asked))

    def _stream(self, events: Iterator[bytes]) -> None:
        self._head(200, "text/event-stream", {"Transfer-Encoding": "chunked", "X-Accel-Buffering": "no"})
        for event in events:
            self.wfile.write(b"%x\r\n%b\r\n" % (len(event), event))
            self.wfile.flush()
        self.wfile.write(b"0\r\n\r\n")

    def _json(self, status: int, found: Any) -> None:
        self._send(status, "application/json", json.dumps(found, sort_keys=True).encode())

    def _send(self, status: int, kind: str, text: bytes) -> None:
        self._head(status, kind, {"Content-Length": str(len(text))})
        if self.command != "HEAD":
            self.wfile.write(text)

    def _head(self, status: int, kind: str, more: dict[str, str]) -> None:
        self.send_response_only(status)
        self.send_header("Content-Type", kind)
        for name, value in more.items():
            self.send_header(name, value)
        self.end_headers()


def _route(path: str) -> str | None:
    """The path without its prefix; None for one without."""
    return next((path.removeprefix(p) for p in PREFIXES if path.startswith(p + "/")), None)


def _pull_events(progress: Iterator[dict[str, Any]]) -> Iterator[bytes]:
    try:
        for found in progress:
            yield b"event: progress\ndata: " + json.dumps(found).encode() + b"\n\n"
    except NotReady as problem:
        yield b"event: error\ndata: " + json.dumps({"error": str(problem)}).encode() + b"\n\n"
        return
    yield b'event: complete\ndata: {"percent": 100}\n\n'
