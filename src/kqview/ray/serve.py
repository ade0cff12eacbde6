"""Serve: the ASGI app of `kqview serve` in replicas of Ray Serve, which starts and drains them.

``serve run kqview.ray.serve:app model=/models/model.gguf n_slots=4 replicas=2``. A request with
the header ``serve_multiplexed_model_id`` goes to the replica that last had one of that value, so
that a chat finds its slot and its kept rows again. Each replica is asked for its health and its
metrics as clients would, with ``GET``: Ray asks for the health, and the replica that a client asks
for ``/metrics`` or ``/health`` asks all of them.
"""

import json
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from typing import Any, Final

import msgspec

from kqview import json_input
from kqview.errors import KqviewError, RequestError
from kqview.extras import needed
from kqview.server.app import create_app
from kqview.server.settings import Settings

INSTALL: Final = 'run pip install "kqview[ray,server]"'
_OWN: Final[Mapping[str, int]] = {"replicas": 1, "cpus": 1, "gpus": 0, "sessions": 256}
_SAMPLE: Final = re.compile(r"([\w:]+)(\{?)(.*)")  # with labels or without
_DRAIN_S: Final = 600.0  # for answers that run when a replica is replaced
_HEALTH_S: Final = 5.0  # for a replica to say how it is
# Pages that say something of all replicas, and the statuses of those that are no refusals.
_JOINED: Final[Mapping[str, tuple[int, ...]]] = {"/metrics": (200,), "/health": (200, 503)}

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Scope]]
Send = Callable[[Scope], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

_apps: Final[list[App]] = []  # of this process: a replica has one


def app(arguments: Mapping[str, Any]) -> Any:
    """The application for ``serve run``, or ``serve.run(app({...}))``.

    Args:
        arguments: Settings of the server by their names, as values or texts; and ``replicas``, the
            ``cpus`` and ``gpus`` of each, and ``sessions``, how many a replica is known for.

    Raises:
        RequestError: There is no such setting, or it has a wrong value.
        KqviewError: Ray Serve is not installed.
    """
    serve = needed("ray.serve", "kqview.ray.serve needs", INSTALL)
    own = {name: int(arguments.get(name, default)) for name, default in _OWN.items()}
    given = {name: one for name, one in arguments.items() if name not in own}
    if unknown := sorted(given.keys() - Settings.__dataclass_fields__.keys()):
        raise RequestError(
            f"the server has no setting {unknown[0]!r}; kqview serve --help lists them",
            parameter=unknown[0],
        )
    try:
        settings = msgspec.convert(given, Settings, strict=False)
    except msgspec.ValidationError as error:
        raise RequestError(f"the settings are wrong: {error}") from None

    def build() -> App:
        return _build(settings, own["sessions"])

    made = serve.ingress(build)(_Replica)
    return (
        serve.deployment(made)
        .options(
            name="kqview",
            num_replicas=own["replicas"],
            ray_actor_options={"num_cpus": own["cpus"], "num_gpus": own["gpus"]},
            max_ongoing_requests=1024,  # the server has limits and a queue of its own
            graceful_shutdown_timeout_s=_DRAIN_S,
        )
        .bind()
    )


class _Replica:
    """A replica: its app is made by `_build`."""

    async def check_health(self) -> None:
        """Ask the app; Ray calls this every few seconds.

        Raises:
            KqviewError: It is not healthy, and Ray replaces the replica.
        """
        for one in _apps:
            head, _ = await _answer(one, "/health", [(b"host", b"localhost")])
            if head["status"] != 200:
                raise KqviewError(f"GET /health answers {head['status']}")

    async def answer(self, path: str, headers: Headers) -> tuple[str, str]:
        """Its name, and what it answers to a client with *headers*.

        Raises:
            KqviewError: It refuses the client.
        """
        serve = needed("ray.serve", "kqview.ray.serve needs", INSTALL)
        head, body = await _answer(_apps[0], path, headers)
        if head["status"] not in _JOINED[path]:
            raise KqviewError(f"GET {path} answers {head['status']}")
        return serve.get_replica_context().replica_tag, body.decode()


async def _answer(app: App, path: str, headers: Headers) -> tuple[Scope, bytes]:
    """The head and the body of what *app* answers to a GET of *path*."""
    messages: list[Scope] = []

    async def receive() -> Scope:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Scope) -> None:
        messages.append(message)

    scope: Scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET",
        "scheme": "http", "path": path, "raw_path": path.encode(), "query_string": b"",
        "root_path": "", "headers": headers, "client": ("127.0.0.1", 0), "server": ("127.0.0.1", 0),
    }  # fmt: skip
    await app(scope, receive, send)
    return messages[0], b"".join(one["body"] for one in messages[1:])


def joined(pages: Iterable[tuple[str, str]]) -> str:
    """Pages of metrics as one, in which each sample names its replica.

    Args:
        pages: Name and page of each replica.
    """
    families: dict[str, dict[str, None]] = {}
    lines: dict[str, None] = {}
    for replica, page in sorted(pages):
        for line in page.splitlines():
            if line.startswith("# HELP "):
                lines = families.setdefault(line.split(" ")[2], {})
            if sample := _SAMPLE.fullmatch(line):
                name, brace, rest = sample.groups()
                line = f'{name}{{replica="{replica}"{"," if brace else "}"}{rest}'
            lines[line] = None  # once, if it is a head
    return "".join(f"{line}\n" for lines in families.values() for line in lines)


def joined_health(pages: Iterable[tuple[str, str]], n_silent: int) -> tuple[int, bytes]:
    """Status and body of a health check of all replicas.

    Requests are answered as long as one replica is healthy, so the status is 200 then; the body
    says "degraded" if another one is not.

    Args:
        pages: Name and answer of each replica.
        n_silent: Replicas that did not answer, or are not known to have.
    """
    replicas = {name: json_input.loads(page) for name, page in sorted(pages)}
    statuses = [one["status"] for one in replicas.values()] + ["silent"] * n_silent
    bad = [one for one in statuses if one != "ok"]
    is_down = len(bad) == len(statuses)
    status = "ok" if not bad else bad[0] if is_down else "degraded"
    body = {"status": status, "replicas": replicas, "n_silent": n_silent}
    return 503 if is_down else 200, json.dumps(body).encode()


def _build(settings: Settings, n_sessions: int) -> App:
    """The app of a replica, in its process."""
    serve = needed("ray.serve", "kqview.ray.serve needs", INSTALL)
    made = create_app(settings)
    _apps[:] = [made]

    @serve.multiplexed(max_num_models_per_replica=n_sessions)
    async def remember(session: str) -> str:
        return session

    async def sticky(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (session := serve.get_multiplexed_model_id()):
            await remember(session)
        path = scope.get("path", "")
        if scope.get("method") != "GET" or path not in _JOINED:
            return await made(scope, receive, send)
        head, body = await _answer(made, path, scope["headers"])
        if head["status"] in _JOINED[path]:
            own = serve.get_replica_context()
            handle = serve.get_deployment_handle(own.deployment, own.app_name)
            asked = handle.broadcast("answer", path, scope["headers"])
            limit_s = _HEALTH_S if path == "/health" else None
            found: list[Any]
            try:
                found = await asked.results_async(timeout_s=limit_s, return_exceptions=True)
            except TimeoutError as error:  # what others answered is lost with it
                found = [(own.replica_tag, body.decode()), error]
            pages = [one for one in found if not isinstance(one, BaseException)]
            if path == "/health":
                head["status"], body = joined_health(pages, len(found) - len(pages))
            else:
                body = joined(pages).encode()
            kept = [one for one in head["headers"] if one[0] != b"content-length"]
            head["headers"] = [*kept, (b"content-length", str(len(body)).encode())]
        await send(head)
        await send({"type": "http.response.body", "body": body})

    return sticky
