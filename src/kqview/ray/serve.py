"""Serve: the ASGI app of `kqview serve` in replicas of Ray Serve, which starts and drains them.

``serve run kqview.ray.serve:app model=/models/model.gguf n_slots=4 replicas=2``. A request with
the header ``serve_multiplexed_model_id`` goes to the replica that last had one of that value, so
that a chat finds its slot and its kept rows again. Ray asks each replica for its health as clients
would, with ``GET /health``.
"""

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, Final

import msgspec

from kqview.errors import KqviewError, RequestError
from kqview.extras import needed
from kqview.server.app import create_app
from kqview.server.settings import Settings

INSTALL: Final = 'run pip install "kqview[ray,server]"'
_OWN: Final[Mapping[str, int]] = {"replicas": 1, "cpus": 1, "gpus": 0, "sessions": 256}
_DRAIN_S: Final = 600.0  # for answers that run when a replica is replaced

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Scope]]
Send = Callable[[Scope], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

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
        status = [0]

        async def receive() -> Scope:
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Scope) -> None:
            status[0] = message.get("status", status[0])

        scope: Scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "GET",
            "scheme": "http", "path": "/health", "raw_path": b"/health", "query_string": b"",
            "root_path": "", "headers": [(b"host", b"localhost")], "client": ("127.0.0.1", 0),
            "server": ("127.0.0.1", 0),
        }  # fmt: skip
        for one in _apps:
            await one(scope, receive, send)
            if status[0] != 200:
                raise KqviewError(f"GET /health answers {status[0]}")


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
        await made(scope, receive, send)

    return sticky
