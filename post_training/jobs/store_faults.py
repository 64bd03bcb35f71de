"""What a store's database can run into, told apart and said without its URL."""

from __future__ import annotations

import os
import sqlite3
from enum import StrEnum
from pathlib import Path

from sqlalchemy import URL
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from apis.errors import StackError, StoreUnavailable
from post_training.jobs.engines import BUSY_TIMEOUT_SECONDS, IN_MEMORY


class _Fault(StrEnum):
    locked = "locked"
    read_only = "read-only"
    disk_full = "disk full"
    unreachable = "unreachable"
    refused = "refused"
    ended = "ended"


_OPERATOR = "whoever runs this server must"
_SAID = {
    _Fault.locked: f"the store is locked: others have been writing to it for over {BUSY_TIMEOUT_SECONDS} s; "
    f"try again, and if this lasts, {_OPERATOR} look for a process that holds it",
    _Fault.read_only: f"the store is read-only: nothing can be written; {_OPERATOR} make it writable",
    _Fault.disk_full: f"the store's disk is full: nothing was written; {_OPERATOR} free space on it",
    _Fault.unreachable: "the store is unreachable: its file cannot be opened or written, or its server is away; "
    f"try again, and if this lasts, {_OPERATOR} bring it back",
    _Fault.refused: "the store's server takes no more connections or requests now; "
    f"try again, and if this lasts, {_OPERATOR} look at the server's limits",
    _Fault.ended: "the store's server ended the connection: whether a change was stored is not known; "
    "look at it before sending it again",
}
_SQLITE = {
    sqlite3.SQLITE_BUSY: _Fault.locked,
    sqlite3.SQLITE_LOCKED: _Fault.locked,
    sqlite3.SQLITE_PROTOCOL: _Fault.locked,
    sqlite3.SQLITE_READONLY: _Fault.read_only,
    sqlite3.SQLITE_FULL: _Fault.disk_full,
    sqlite3.SQLITE_CANTOPEN: _Fault.unreachable,
    sqlite3.SQLITE_IOERR: _Fault.unreachable,
    sqlite3.SQLITE_PERM: _Fault.unreachable,
}
# By SQLSTATE, or by its first two characters.
_POSTGRESQL = {
    "55P03": _Fault.locked,  # lock_timeout
    "57014": _Fault.locked,  # a statement that ran into a time limit
    "40001": _Fault.locked,
    "40P01": _Fault.locked,
    "25006": _Fault.read_only,
    "53100": _Fault.disk_full,
    "53": _Fault.refused,
    "57P03": _Fault.refused,  # starting up or shutting down
    "08": _Fault.ended,
    "25P03": _Fault.ended,  # idle in a transaction for too long
    "57P": _Fault.ended,
}


def store_error(error: SQLAlchemyError) -> StoreUnavailable | None:
    """What a running server answers when the store fails it: locked, read-only, full, or away.

    Returns:
        None for anything else, which is a fault of the program.
    """
    fault = _fault(error)
    return None if fault is None else StoreUnavailable(_SAID[fault])


def opening_error(error: SQLAlchemyError, url: URL) -> StackError:
    """Why a store could not be opened, for whoever starts a server: names the file, quotes the database server."""
    if url.drivername == "sqlite":
        return StackError(_file_said(error, str(url.database)))
    said = _redacted(str(getattr(error, "orig", None) or type(error).__name__), url)
    fault = _fault(error)
    if fault is None or fault is _Fault.unreachable:
        return StackError(f"the PostgreSQL store cannot be opened: {said}; check its address, its login and its rights")
    return StackError(f"{_SAID[fault]} ({said})")


def check_file(url: URL) -> None:
    """Raises StackError where the SQLite file of `url` can't be written by this user, or its folder can't."""
    if url.drivername != "sqlite":
        return
    if url.database in IN_MEMORY:
        raise StackError("a store in memory would be another one for every process: name a file")
    path = Path(str(url.database))
    if not os.path.isdir(path.parent):
        raise StackError(f"the store {path} cannot be made: this user sees no such folder; make it, or name another")
    # Beside its file, SQLite keeps two more while it is open.
    for place in (path.parent, path, Path(f"{path}-wal"), Path(f"{path}-shm")):
        if os.path.lexists(place) and not _writable(place):
            raise StackError(f"the store {path} cannot be used: {_why_not(place)}")
    if path.is_dir():
        raise StackError(f"the store {path} is a folder: name a file in it")


def _fault(error: SQLAlchemyError) -> _Fault | None:
    if isinstance(error, PoolTimeout):
        return _Fault.locked
    if not isinstance(error, DBAPIError):
        return None
    if isinstance(error.orig, sqlite3.Error):
        return _SQLITE.get(_primary(error.orig))
    state = getattr(error.orig, "sqlstate", None)
    if state:
        return next((_POSTGRESQL[key] for key in (state, state[:3], state[:2]) if key in _POSTGRESQL), None)
    if error.connection_invalidated:
        return _Fault.ended
    return _Fault.unreachable if isinstance(error, OperationalError | InterfaceError) else None


def _primary(error: sqlite3.Error) -> int:
    # Errors of the driver itself, such as use after close, have no code.
    return getattr(error, "sqlite_errorcode", -1) & 0xFF


def _file_said(error: SQLAlchemyError, path: str) -> str:
    cause = getattr(error, "orig", None)
    code = _primary(cause) if isinstance(cause, sqlite3.Error) else -1
    if code == sqlite3.SQLITE_NOTADB:
        return f"{path} is not a SQLite database: name another file for the store, or move this one away"
    if code == sqlite3.SQLITE_CORRUPT:
        return f"the store {path} is damaged: put a backup in its place, or move it away to start anew"
    fault = _fault(error)
    said = str(cause or type(error).__name__)
    return f"the store {path} cannot be opened: {said}" if fault is None else f"{_SAID[fault]} ({path}: {said})"


def _writable(place: Path) -> bool:
    mode = os.W_OK | os.X_OK if place.is_dir() else os.W_OK
    return os.access(place, mode, effective_ids=os.access in os.supports_effective_ids)


def _why_not(place: Path) -> str:
    if os.statvfs(place).f_flag & os.ST_RDONLY:
        return f"{place} lies on a read-only mount; mount it writable, or keep the store elsewhere"
    return f"this user may not write {place}; give the user that right, or start as the user it belongs to"


def _redacted(text: str, url: URL) -> str:
    line = " ".join(text.split())
    return line.replace(str(url.password), "***") if url.password else line
