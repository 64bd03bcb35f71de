"""Files of data sets, fetched from URLs that the stack allows.

A name is resolved once for each connection, all its addresses are checked, and the connection is made to an address
that was checked: a name that answers otherwise the next time (DNS rebinding) is not asked a next time. Redirects go
through the same checks. No proxy is used, whatever the environment says, since it would resolve names itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import Iterable
from typing import Any, BinaryIO, TypeAlias, cast
from urllib.parse import urljoin

import anyio
import httpcore

from apis.errors import DataInvalid, InvalidField, PostgradError, TooLarge, Unavailable
from post_training.data.addresses import WebAddress, check_address, check_url
from post_training.data.sources import SourcePolicy, kind_of_web_file

MAX_REDIRECTS = 5
CONNECT_SECONDS = 10.0
_REDIRECTS = (301, 302, 303, 307, 308)
_PARAM = "source.uri"
# What comes of a connection that fails: httpcore's own, and what it lets through of TLS and of anyio while it reads.
_FAULTS = (
    httpcore.NetworkError,
    httpcore.TimeoutException,
    httpcore.ProtocolError,
    httpcore.UnsupportedProtocol,
    anyio.BrokenResourceError,
    anyio.ClosedResourceError,
    anyio.EndOfStream,
    OSError,
)
_Found: TypeAlias = list[tuple[Any, ...]]


class _NotWritten(Exception):
    """The file could not be written: apart from what the network does, which raises the same kinds of errors."""

    def __init__(self, error: OSError) -> None:
        super().__init__(str(error))
        self.error = error


def fetch(url: str, policy: SourcePolicy, to: BinaryIO) -> str:
    """Fetch what `url` names into an open file, as it arrives. Call it in a thread.

    Returns:
        the kind of file that it is, see `kind_of_web_file`.

    Raises:
        InvalidField: the URL, a redirect or an address is not allowed, or it is no file of rows.
        DataInvalid: the server does not give it, or is not the one that it says it is.
        TooLarge: over `max_fetch_bytes`.
        Unavailable: the server cannot be reached, or takes longer than `fetch_seconds`.
        OSError: the file cannot be written.
    """
    try:
        return asyncio.run(_fetch_in_time(url, policy, to))
    except _NotWritten as fault:
        raise fault.error from None


async def _fetch_in_time(url: str, policy: SourcePolicy, to: BinaryIO) -> str:
    network = _CheckedAddresses(policy)
    limit = asyncio.timeout(policy.fetch_seconds)
    try:
        async with limit:
            return await _fetch(url, policy, to, network)
    except _FAULTS as error:  # TimeoutError is an OSError
        raise (_too_slow(policy, network.resolving) if limit.expired() else _broken_off(error)) from None


def _too_slow(policy: SourcePolicy, resolving: str | None) -> Unavailable:
    seconds = f"{policy.fetch_seconds:g} s (`fetch_seconds` of the datasetio provider)"
    if resolving is not None:
        return Unavailable(
            f"the address of {resolving} could not be found out within {seconds}: check the URL's host, or try again "
            "later",
            param=_PARAM,
        )
    return Unavailable(
        f"fetching the data set took longer than {seconds}: send a smaller file, or try again later", param=_PARAM
    )


def _broken_off(error: Exception) -> PostgradError:
    # httpcore drops the cause of its errors, and keeps it as their argument.
    cause = next((part for part in (error, *error.args) if isinstance(part, ssl.SSLError)), error)
    if isinstance(cause, ssl.SSLCertVerificationError):
        return DataInvalid(
            f"the certificate of the data set's server is not trusted here ({cause.verify_message}): give a URL whose "
            "host shows one that is",
            param=_PARAM,
        )
    return Unavailable(
        f"the data set's server cannot be reached, or broke off ({type(cause).__name__}): try again later",
        param=_PARAM,
    )


async def _fetch(url: str, policy: SourcePolicy, to: BinaryIO, network: _CheckedAddresses) -> str:
    first = address = check_url(url, policy.allowed_hosts)
    async with httpcore.AsyncConnectionPool(network_backend=network) as pool:
        for _ in range(MAX_REDIRECTS + 1):
            async with pool.stream("GET", _url(address), headers=_headers(address)) as response:
                if response.status not in _REDIRECTS:
                    return await _take(response, [first, address], policy, to)
                address = _next(address, _header(response, b"location"), policy)
    raise InvalidField(f"the URL redirects more than {MAX_REDIRECTS} times: give the file's own", param=_PARAM)


def _next(address: WebAddress, location: str, policy: SourcePolicy) -> WebAddress:
    try:
        following = check_url(urljoin(address.url, location), policy.allowed_hosts)
    except ValueError:
        raise InvalidField("the URL redirects to what is not a URL: give the file's own", param=_PARAM) from None
    if address.scheme == "https" and following.scheme == "http":
        raise InvalidField("the URL redirects from https to http, where anybody could change the data", param=_PARAM)
    return following


async def _take(
    response: httpcore.Response, addresses: Iterable[WebAddress], policy: SourcePolicy, to: BinaryIO
) -> str:
    _check_status(response.status)
    if _header(response, b"content-encoding") not in ("", "identity"):
        raise DataInvalid("the server compresses the file although it was not asked to: give another URL", param=_PARAM)
    paths = [address.target.partition("?")[0] for address in addresses]
    kind = kind_of_web_file(paths, _header(response, b"content-type"))
    declared = _header(response, b"content-length")
    taken = 0
    _check_size(int(declared) if declared.isdecimal() else 0, policy)
    async for chunk in response.aiter_stream():
        taken += len(chunk)
        _check_size(taken, policy)
        _write(chunk, to)  # here, where it holds up nobody: this loop has nothing else to do
    return kind


def _write(chunk: bytes, to: BinaryIO) -> None:
    try:
        to.write(chunk)
    except OSError as error:
        raise _NotWritten(error) from error


def _check_status(status: int) -> None:
    if status == 200:
        return
    error: type[PostgradError] = Unavailable if status == 429 or status >= 500 else DataInvalid
    raise error(f"the data set's server answers with status {status} instead of the file", param=_PARAM)


def _check_size(size: int, policy: SourcePolicy) -> None:
    if size > policy.max_fetch_bytes:
        raise TooLarge(
            f"the file is over the limit of {policy.max_fetch_bytes} bytes (`max_fetch_bytes` of the datasetio "
            "provider): give a part of it, or put it under a folder this server reads from",
            param=_PARAM,
        )


def _url(address: WebAddress) -> httpcore.URL:
    return httpcore.URL(
        scheme=address.scheme, host=address.host, port=address.port, target=address.target.encode("ascii")
    )


def _headers(address: WebAddress) -> dict[bytes | str, bytes | str]:
    host = f"[{address.host}]" if ":" in address.host else address.host
    return {
        "Host": host if address.has_default_port else f"{host}:{address.port}",
        "User-Agent": "postgrad",
        "Accept": "*/*",
        "Accept-Encoding": "identity",
    }


def _header(response: httpcore.Response, name: bytes) -> str:
    return next((value.decode("latin-1").strip() for key, value in response.headers if key.lower() == name), "")


class _CheckedAddresses(httpcore.AsyncNetworkBackend):
    """Connects to addresses that were checked, and to nothing else.

    Attributes:
        resolving: the name whose addresses are asked for just now.
    """

    def __init__(self, policy: SourcePolicy) -> None:
        self.resolving: str | None = None
        self._policy = policy
        self._backend = cast(httpcore.AsyncNetworkBackend, httpcore.AnyIOBackend())

    async def connect_tcp(
        self, host: str, port: int, timeout: float | None = None, *args: Any, **options: Any
    ) -> httpcore.AsyncNetworkStream:
        self.resolving = host
        addresses = await _resolve(host, port)
        self.resolving = None
        for address in addresses:
            check_address(address, self._policy.allow_private_addresses)
        fault: Exception = httpcore.ConnectError()
        for address in addresses:
            try:
                return await self._backend.connect_tcp(address, port, CONNECT_SECONDS, *args, **options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                fault = error
        raise fault


async def _resolve(host: str, port: int) -> list[str]:
    """The addresses of a host, each once. Raises Unavailable where it has none.

    A resolver can't be interrupted, so a thread of its own asks it, which nobody waits for: not this loop's end, as for
    the threads of its executor, and not the server's.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[_Found | Exception] = loop.create_future()

    def ask() -> None:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            found = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: the answer came too late
            loop.call_soon_threadsafe(lambda: answer.done() or answer.set_result(found))

    threading.Thread(target=ask, name="resolver", daemon=True).start()
    found = await answer
    if isinstance(found, Exception):
        raise Unavailable("the URL's host has no address: check its name, or try again later", param=_PARAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))
