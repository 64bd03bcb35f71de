"""Who may ask, and on whose behalf: the administrator's key, keys in the store, or anybody on this machine.

A stack without any key answers only this machine. Where there is an administrator's key, or ever was one in the store,
each request but health must bring a key. What a request may see follows from its key (`post_training.owners`).
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
import re
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path
from urllib.parse import urlsplit

import anyio
import anyio.to_thread
from sqlalchemy.exc import SQLAlchemyError
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from apis.errors import InvalidField, PostgradError, StackError, Unauthorized
from distributions.errors import error_response
from distributions.run_config import StackRunConfig
from post_training.catalog.keys import USE_NOTED_EVERY, ApiKeys, KeyTable, LiveKey, key_digest
from post_training.jobs.database import Database, now
from post_training.jobs.store_faults import opening_error
from post_training.owners import ADMINISTRATOR, NOBODY, Caller, acting_as, key_holder

log = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/v1/health", "/alpha/health", "/v1alpha/admin/health"})
HASH_PREFIX = "sha256:"
_READING = ("GET", "HEAD", "OPTIONS")
FRESH_SECONDS = 1.0
"""So old the keys that a server knows may be; a key is good for no longer after it was revoked."""


def hash_key(key: str) -> bytes:
    """The digest of an API key. `sha256:<hex>` is the digest itself, so that a run.yaml need not hold the key.

    Raises:
        StackError: what follows `sha256:` is not a digest.
    """
    if not key.startswith(HASH_PREFIX):
        return key_digest(key)
    digest = key.removeprefix(HASH_PREFIX)
    if not re.fullmatch("[0-9a-fA-F]{64}", digest):
        raise StackError(f"the API key: after `{HASH_PREFIX}` there must be 64 hexadecimal digits")
    return bytes.fromhex(digest)


class KeyRing:
    """The keys of a store as a server knows them: read when it is made, then in a thread, once each `FRESH_SECONDS`.

    Raises:
        SQLAlchemyError: the store cannot be read.
    """

    def __init__(self, keys: ApiKeys, clock: Callable[[], float] = time.monotonic) -> None:
        self._keys = keys
        self._clock = clock
        self._read_at = clock()
        self._fault: SQLAlchemyError | None = None
        self._table = keys.table()
        self._reading = anyio.Lock()
        self._noted: dict[str, datetime] = {}
        self._writing: set[asyncio.Task[None]] = set()
        # Of their own, so that requests which wait for the store keep nobody out.
        self._threads, self._writers = anyio.CapacityLimiter(1), anyio.CapacityLimiter(1)

    @property
    def known(self) -> bool:
        """Whether the store had keys when it was last read."""
        return self._table.any_stored

    async def demanded(self) -> bool:
        """Whether the store has keys; as it was last known where it cannot be read."""
        try:
            await self._fresh()
        except SQLAlchemyError as error:
            log.error("the API keys cannot be read: %s", type(error).__name__)
        return self.known

    async def find(self, digest: bytes) -> LiveKey | None:
        """The key with this digest, unless it is revoked. Raises SQLAlchemyError.

        Looked up by its digest, which tells by the time that takes nothing of a key: nobody can choose a digest.
        """
        return (await self._fresh()).live.get(digest)

    async def still_opens(self, digest: bytes) -> bool:
        """Whether a key that was taken is good still; yes where the store cannot be read just now."""
        try:
            return await self.find(digest) is not None
        except SQLAlchemyError:
            return True

    async def _fresh(self) -> KeyTable:
        async with self._reading:
            if self._clock() - self._read_at >= FRESH_SECONDS:
                await self._read()
            # One fault answers all who wait: each with a time-out of its own, they would wait for one another.
            if self._fault is not None:
                raise self._fault
            return self._table

    async def _read(self) -> None:
        began = self._clock()
        try:
            found = await anyio.to_thread.run_sync(self._keys.table, limiter=self._threads)
        except SQLAlchemyError as error:
            self._fault, self._read_at = error, self._clock()
            return
        # Keys are never deleted: a store that lost them is no reason to let everybody in.
        self._table = KeyTable(found.live, found.any_stored or self.known)
        self._fault, self._read_at = None, began

    def note_use(self, key: LiveKey) -> None:
        """Have the time of use stored, beside the request, where the stored one is old."""
        at = now()
        last = max((t for t in (key.last_used_at, self._noted.get(key.id)) if t is not None), default=None)
        if last is not None and at - last < USE_NOTED_EVERY:
            return
        self._noted[key.id] = at
        task = asyncio.create_task(self._store_use(key.id, at))
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)

    async def _store_use(self, key_id: str, at: datetime) -> None:
        try:
            await anyio.to_thread.run_sync(self._keys.note_use, key_id, at, limiter=self._writers)
        except (SQLAlchemyError, PostgradError) as error:
            self._noted[key_id] = at - USE_NOTED_EVERY + timedelta(minutes=1)
            log.warning("when key %s was used could not be stored: %s", key_id, type(error).__name__)


class _Revoked(Exception):
    """The key of an answer that is being given was revoked."""


class Authenticate:
    """ASGI middleware: lets a request in, on behalf of whoever its key is of, or answers 401.

    Args:
        administrator: the digest of the administrator's key, None where there is none.
    """

    def __init__(self, app: ASGIApp, keys: KeyRing, administrator: bytes | None) -> None:
        self.app, self.keys, self.administrator = app, keys, administrator

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            caller = await self._caller(scope)
        except (Unauthorized, InvalidField) as error:
            response = error_response(error, scope["path"], part="header")
            if isinstance(error, Unauthorized):
                response.headers["www-authenticate"] = "Bearer"
            await response(scope, receive, send)
            return
        with acting_as(caller):
            if caller.sees_all or caller is NOBODY:
                await self.app(scope, receive, send)
            else:
                await self._while_valid(scope, receive, send)

    async def _while_valid(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, and end an answer that would go on, as a stream of events does, once its key is revoked."""
        digest, endless = _bearer_digest(scope) or b"", False

        async def send_if_valid(message: Message) -> None:
            nonlocal endless
            if message["type"] == "http.response.start":
                endless = all(name.lower() != b"content-length" for name, _ in message["headers"])
            elif endless and message.get("more_body") and not await self.keys.still_opens(digest):
                raise _Revoked
            await send(message)

        try:
            await self.app(scope, receive, send_if_valid)
        except _Revoked:
            await send({"type": "http.response.body", "body": b""})

    async def _caller(self, scope: Scope) -> Caller:
        """Raises Unauthorized; InvalidField for another's host name where there are no keys."""
        digest = _bearer_digest(scope)
        if digest is not None and self.administrator is not None and hmac.compare_digest(digest, self.administrator):
            return ADMINISTRATOR
        if scope["path"] in OPEN_PATHS:
            # Not held up by the store, whose health is asked for.
            if self.administrator is None and not self.keys.known:
                _check_loopback_name(scope)
            return NOBODY
        if self.administrator is None and not await self.keys.demanded():
            _check_loopback_name(scope)
            return ADMINISTRATOR
        key = await self.keys.find(digest) if digest is not None else None
        if key is None:
            raise Unauthorized("this server needs an API key: send `Authorization: Bearer <key>`")
        self.keys.note_use(key)
        return key_holder(key.id)


def _bearer_digest(scope: Scope) -> bytes | None:
    scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
    return key_digest(key.strip()) if scheme.lower() == "bearer" else None


def _check_loopback_name(scope: Scope) -> None:
    """Refuse a request that does not name this machine as its host.

    A page of another site can have its own name resolve to 127.0.0.1 and then send requests from the visitor's browser
    as if they came from the same site (DNS rebinding); its name still stands in their Host header. Without that it can
    send what it may not read the answer of, such as a cancel; browsers say in Origin where that comes from.
    """
    if not is_loopback(_host_name(Headers(scope=scope).get("host", ""))):
        raise InvalidField(
            "this server has no API key, so it answers only under 127.0.0.1, localhost or ::1", param="Host"
        )
    origin = Headers(scope=scope).get("origin")
    if origin is not None and scope["method"] not in _READING and not is_loopback(urlsplit(origin).hostname or ""):
        raise InvalidField("this server has no API key, so it takes nothing from pages of other sites", param="Origin")


def _host_name(header: str) -> str:
    """The name in a Host header, without port and brackets."""
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0]


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def store_has_keys(config: StackRunConfig) -> bool:
    """Whether a stack's store, before the stack starts, holds API keys. Raises StackError where it is broken."""
    url = config.metadata_store.sqlalchemy_url(config.home)
    if url.startswith("sqlite:///") and not Path(url.removeprefix("sqlite:///")).is_file():
        return False
    database = Database(url)
    try:
        return ApiKeys(database).any_stored()
    except SQLAlchemyError as error:
        raise opening_error(error, database.engine.url) from error
    finally:
        database.close()
