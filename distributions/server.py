"""A stack behind HTTP: `create_app` gives it its routes, `serve` runs it until it is told to stop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

import uvicorn
from fastapi import FastAPI

import apis.datasets.routes
import apis.inference.routes
import apis.inspect.routes
import apis.models.routes
import apis.post_training.routes
from apis.common import Api
from apis.errors import PortBusy, RunConfigInvalid, StackError
from distributions.dialects import llama_stack_v1 as v1
from distributions.errors import CatchAll, add_exception_handlers
from distributions.inspection import StackInspection
from distributions.middleware import ApiKey, BodyLimit, LoopbackNames, TraceId, TranslateBody, hash_key, is_loopback
from distributions.resolver import PlannedProvider, plan
from distributions.run_config import LoggingConfig, StackRunConfig
from distributions.stack import Stack, build_stack
from providers.registry import BUILT_IN
from providers.spec import ProviderSpec

KEY_VARIABLE = "POSTGRAD_API_KEY"
STREAM_GRACE_SECONDS = 2
UNREAD_SECONDS = 60
_BACKLOG = 2048


def create_app(stack: Stack, api_key: str | None = None) -> FastAPI:
    """Every route of the stack. The app's lifespan starts the providers and shuts them down.

    Args:
        api_key: demanded from every caller; None: nothing is demanded.
    """

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        await stack.start()
        try:
            yield
        finally:
            await stack.shutdown()

    app = FastAPI(title="Postgrad", lifespan=lifespan)
    add_exception_handlers(app)
    _mount(app, stack)
    # The one added last meets a request first.
    app.add_middleware(TranslateBody, translations=v1.body_translations())
    app.add_middleware(BodyLimit, limit=stack.config.server.max_body_bytes)
    if api_key is not None:
        app.add_middleware(ApiKey, digest=hash_key(api_key))
    else:
        app.add_middleware(LoopbackNames)
    app.add_middleware(CatchAll)
    app.add_middleware(TraceId)
    return app


def _mount(app: FastAPI, stack: Stack) -> None:
    inspection = StackInspection(stack.providers, app.openapi, stack.store_answers)
    app.include_router(apis.inspect.routes.create_router(inspection), prefix="/v1")
    app.include_router(v1.create_inspect_router(inspection), prefix="/v1")
    for prefix in ("/v1", "/v1/openai/v1"):
        app.include_router(apis.models.routes.create_router(stack.models), prefix=prefix)
        if (inference := stack.impl(Api.inference)) is not None:
            app.include_router(apis.inference.routes.create_router(inference), prefix=prefix)
    for prefix in ("/v1", "/v1beta"):
        app.include_router(apis.datasets.routes.create_router(stack.datasets), prefix=prefix)
    app.include_router(v1.create_rows_router(stack.datasets), prefix="/v1")
    if (post_training := stack.impl(Api.post_training)) is not None:
        for prefix in ("/v1", "/v1alpha"):
            app.include_router(v1.create_flat_job_router(post_training), prefix=prefix)
            app.include_router(apis.post_training.routes.create_router(post_training), prefix=prefix)


def serve(
    config: StackRunConfig,
    host: str | None = None,
    port: int | None = None,
    specs: Sequence[ProviderSpec] = BUILT_IN,
    on_ready: Callable[[str], None] = lambda url: None,
) -> None:
    """Serve until SIGTERM or SIGINT, which are ignored from then on: what is left is to exit.

    Checks everything that can be checked before anything is written.

    Args:
        host, port: in place of those in the run.yaml; port 0 takes any free one.
        on_ready: told the server's URL once it answers.

    Raises:
        StackError: the stack cannot be built, started or served; see its subclasses.
    """
    host = host or config.server.host
    port = config.server.port if port is None else port
    api_key = config.environ.get(KEY_VARIABLE) or config.server.api_key
    check_exposure(host, api_key)
    planned = plan(config, specs)
    with contextlib.closing(bind(host, port)) as listener:
        asyncio.run(_serve(config, planned, listener, api_key, on_ready))


def check_exposure(host: str, api_key: str | None) -> None:
    """Refuse a key that is no key, and to serve other machines without one. Raises StackError."""
    if api_key is not None:
        hash_key(api_key)
    if api_key is None and not is_loopback(host):
        raise StackError(
            f"host {host} can be reached from other machines, so an API key is needed: set ${KEY_VARIABLE} "
            "(or server.api_key in the run.yaml), or serve on 127.0.0.1"
        )


def bind(host: str, port: int) -> socket.socket:
    """A bound socket, not yet listening. Port 0 takes any free one.

    Raises:
        PortBusy: something else has the port.
        StackError: the host is not an address of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Not by protocol 0, the default: asyncio turns Nagle's algorithm off only for sockets that say they are TCP, and
    # with it each answer on a kept connection would wait 40 ms for an acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        # Else a reader that takes nothing keeps its connection for ever: closing waits for what is still to be sent.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_SECONDS * 1000)
    try:
        listener.bind((host, port))
        # Bound alone does not keep another process out: two may bind with SO_REUSEADDR, only one may listen.
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE or isinstance(error, PermissionError):
            raise PortBusy(
                f"port {port} on {host} cannot be taken ({error.strerror}): stop what listens there, "
                "or choose another with --port"
            ) from error
        raise StackError(f"cannot serve on {host}:{port}: {error.strerror}") from error
    return listener


class _Server(uvicorn.Server):
    """A uvicorn server that starts the stack after it took over the signals, so that none is missed."""

    def __init__(self, config: uvicorn.Config, stack: Stack, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._stack, self._on_ready = stack, on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self._stack.start()
        await super().startup(sockets)
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._stack.end_streams()
        await super().shutdown(sockets)
        # Here and not after `serve`, where a second signal would end the process before its workers have saved.
        await self._stack.shutdown()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        # uvicorn raises the signal again once it has shut down; a server that was asked to stop ends with exit code 0.
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                # All is saved, and an impatient second signal must not make a failure of the exit.
                signal.signal(number, signal.SIG_IGN if self.should_exit else handler)


async def _serve(
    config: StackRunConfig,
    planned: Sequence[PlannedProvider],
    listener: socket.socket,
    api_key: str | None,
    on_ready: Callable[[str], None],
) -> None:
    stack = await build_stack(config, planned)
    url = _url(listener)
    settings = uvicorn.Config(
        create_app(stack, api_key),
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        ws="none",
        # Longer than any client's polling interval: a connection closed under a request would cost it a retry.
        timeout_keep_alive=75,
        timeout_graceful_shutdown=STREAM_GRACE_SECONDS,
    )
    try:
        await _Server(settings, stack, lambda: on_ready(url)).serve(sockets=[listener])
    finally:
        await stack.shutdown()


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def configure_logging(config: LoggingConfig | None = None) -> None:
    """Log to stderr, at the levels that `config` sets.

    Raises:
        RunConfigInvalid: a level that does not exist.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for noisy in ("uvicorn", "httpx", "httpcore"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    for category, level in (config.category_levels if config else {}).items():
        if level.upper() not in logging.getLevelNamesMapping():
            raise RunConfigInvalid(f"logging.category_levels.{category}: there is no level {level!r}")
        logging.getLogger(None if category in ("all", "root") else category).setLevel(level.upper())
