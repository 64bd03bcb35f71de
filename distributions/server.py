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
import apis.sft_sessions.routes
from apis.body_limit import BodyLimit
from apis.common import Api
from apis.errors import PortBusy, RunConfigInvalid, StackError
from apis.sft_sessions.protocol import OffersSessions
from distributions.authentication import HASH_PREFIX, Authenticate, KeyRing, hash_key, is_loopback, store_has_keys
from distributions.dialects import llama_stack_alpha as alpha
from distributions.dialects import llama_stack_alpha_catalog as alpha_catalog
from distributions.dialects import llama_stack_v1 as v1
from distributions.dialects.llama_stack_datasets import create_rows_router
from distributions.dialects.llama_stack_inference_routes import create_inference_router
from distributions.dialects.openai_streams import StreamsWithoutDone
from distributions.dialects.other_apis import create_other_apis_router
from distributions.errors import CatchAll, add_exception_handlers, error_response
from distributions.inspection import StackInspection
from distributions.methods import Methods
from distributions.middleware import TraceId, TranslateBody
from distributions.openapi import Documented
from distributions.resolver import PlannedProvider, plan
from distributions.run_config import LoggingConfig, StackRunConfig
from distributions.stack import Stack, build_stack
from post_training.catalog.keys import ApiKeys
from post_training.listening import listen, url_of
from providers.spec import ProviderSpec

KEY_VARIABLE = "POSTGRAD_API_KEY"
STREAM_GRACE_SECONDS = 2
# 16 characters of a password generator are beyond guessing over a network; what people think up is mostly shorter.
MIN_KEY_LENGTH, MIN_KEY_SYMBOLS = 16, 6

log = logging.getLogger(__name__)


def create_app(stack: Stack, api_key: str | None = None) -> FastAPI:
    """Every route of the stack. The app's lifespan starts the providers and shuts them down.

    Args:
        api_key: the administrator's. None: only keys in the store are known, and without any nothing is demanded.
    """

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        await stack.start()
        try:
            yield
        finally:
            await stack.shutdown()

    app = Documented(lifespan=lifespan)
    add_exception_handlers(app)
    _mount(app, stack)
    # The one added last meets a request first.
    app.add_middleware(Methods)
    app.add_middleware(StreamsWithoutDone)
    app.add_middleware(TranslateBody, translations=v1.body_translations(), words=v1.body_words())
    app.add_middleware(BodyLimit, limit=stack.config.server.max_body_bytes, answer=error_response)
    administrator = None if api_key is None else hash_key(api_key)
    app.add_middleware(Authenticate, keys=KeyRing(ApiKeys(stack.database)), administrator=administrator)
    app.add_middleware(CatchAll)
    app.add_middleware(TraceId)
    return app


def _mount(app: FastAPI, stack: Stack) -> None:
    """Each API where it is at home, and, marked as deprecated, where older clients look for it."""
    inspection = StackInspection(stack.providers, app.openapi, stack.store_answers)
    app.include_router(apis.inspect.routes.create_router(inspection), prefix="/v1")
    app.include_router(apis.inspect.routes.create_router(inspection), prefix="/v1alpha/admin")
    app.include_router(v1.create_inspect_router(inspection), prefix="/v1")
    app.include_router(alpha_catalog.create_alpha_inspect_router(inspection), prefix="/alpha")
    _mount_models(app, stack)
    for prefix, old in (("/v1beta", None), ("/v1", True)):
        app.include_router(apis.datasets.routes.create_router(stack.datasets), prefix=prefix, deprecated=old)
    app.include_router(create_rows_router(stack.datasets), prefix="/v1")
    app.include_router(alpha_catalog.create_alpha_datasets_router(stack.datasets), prefix="/alpha")
    if (post_training := stack.impl(Api.post_training)) is not None:
        for prefix, old in (("/v1alpha", None), ("/v1", True)):
            app.include_router(v1.create_flat_job_router(post_training), prefix=prefix)
            app.include_router(apis.post_training.routes.create_router(post_training), prefix=prefix, deprecated=old)
        app.include_router(alpha.create_alpha_jobs_router(post_training), prefix="/alpha")
        if isinstance(post_training, OffersSessions):
            app.include_router(apis.sft_sessions.routes.create_scheduler_router(post_training.sessions))
    app.include_router(create_other_apis_router())


def _mount_models(app: FastAPI, stack: Stack) -> None:
    inference = stack.impl(Api.inference)
    for prefix, old in (("/v1", None), ("/v1/openai/v1", True)):
        app.include_router(apis.models.routes.create_router(stack.models), prefix=prefix, deprecated=old)
        if inference is not None:
            app.include_router(apis.inference.routes.create_router(inference), prefix=prefix, deprecated=old)
    app.include_router(alpha_catalog.create_alpha_models_router(stack.models), prefix="/alpha")
    if inference is not None:
        app.include_router(create_inference_router(inference), prefix="/v1")
        app.include_router(create_inference_router(inference, plain_deltas=True), prefix="/alpha")


def serve(
    config: StackRunConfig,
    host: str | None = None,
    port: int | None = None,
    specs: Sequence[ProviderSpec] | None = None,
    on_ready: Callable[[str], None] = lambda url: None,
) -> None:
    """Serve until SIGTERM or SIGINT, which are ignored from then on: what is left is to exit.

    Checks everything that can be checked before anything is written.

    Args:
        host, port: in place of those in the run.yaml; port 0 takes any free one.
        specs: as `plan`.
        on_ready: told the server's URL once it answers.

    Raises:
        StackError: the stack cannot be built, started or served; see its subclasses.
    """
    host = host or config.server.host
    port = config.server.port if port is None else port
    api_key = config.environ.get(KEY_VARIABLE) or config.server.api_key
    check_exposure(host, api_key, lambda: store_has_keys(config))
    planned = plan(config, specs)
    with contextlib.closing(bind(host, port)) as listener:
        asyncio.run(_serve(config, planned, listener, api_key, on_ready))


def check_exposure(host: str, api_key: str | None, has_keys: Callable[[], bool] = lambda: False) -> None:
    """Refuse a key that is no key, and to serve other machines without one or with one that can be guessed.

    Args:
        has_keys: whether there are keys in the store; asked only where that decides.

    Raises:
        StackError
    """
    if api_key is not None:
        hash_key(api_key)
        _check_strength(api_key, others_reach=not is_loopback(host))
    if api_key is None and not is_loopback(host) and not has_keys():
        raise StackError(
            f"host {host} can be reached from other machines, so an API key is needed: make one with "
            f"`postgrad keys create`, set ${KEY_VARIABLE} (or server.api_key in the run.yaml), or serve on 127.0.0.1"
        )


def _check_strength(api_key: str, others_reach: bool) -> None:
    """Refuse an administrator's key that can be guessed where others can try, elsewhere warn. A digest tells nothing.

    Raises:
        StackError
    """
    if api_key.startswith(HASH_PREFIX) or (len(api_key) >= MIN_KEY_LENGTH and len(set(api_key)) >= MIN_KEY_SYMBOLS):
        return
    fault = (
        f"the administrator's API key can be guessed: it needs at least {MIN_KEY_LENGTH} characters, of which "
        f"{MIN_KEY_SYMBOLS} differ; set ${KEY_VARIABLE} (or server.api_key) to what `openssl rand -hex 32` prints, or "
        "leave it out and use `postgrad keys create`"
    )
    if others_reach:
        raise StackError(fault)
    log.warning("%s", fault)


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens. Port 0 takes any free one.

    Raises:
        PortBusy: something else has the port.
        StackError: the host is not an address of this machine.
    """
    try:
        return listen(host, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE or isinstance(error, PermissionError):
            raise PortBusy(
                f"port {port} on {host} cannot be taken ({error.strerror}): stop what listens there, "
                "or choose another with --port"
            ) from error
        raise StackError(f"cannot serve on {host}:{port}: {error.strerror}") from error


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
    url = url_of(*listener.getsockname()[:2])
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
