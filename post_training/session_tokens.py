"""The tokens of sessions: what a client must show to the training server of its session, and nobody else has.

They are computed from a secret of the state folder, so that a submit that is sent again is answered as the first time
and neither the store nor a log holds one.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from contextlib import suppress
from pathlib import Path

SECRET_FILE = "session.key"
USER = "session"
_SECRET_BYTES = 32


def session_token(home: Path, job_uuid: str, created: str) -> str:
    """The token of one session.

    Args:
        created: when its job was accepted, so that another job under the same id has another token.

    Raises:
        OSError: the secret can be neither read nor made.
    """
    message = f"{job_uuid}\n{created}".encode()
    return hmac.new(_secret(home), message, hashlib.sha256).hexdigest()


def token_digest(token: str) -> str:
    """What the store keeps of a token: sha256 in hexadecimal."""
    return hashlib.sha256(token.encode()).hexdigest()


def _secret(home: Path) -> bytes:
    path = home / SECRET_FILE
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return _make_secret(path)


def _make_secret(path: Path) -> bytes:
    """Two that make it at once end with the same one: only the first link succeeds."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(descriptor, secrets.token_bytes(_SECRET_BYTES))
        os.fsync(descriptor)
        with suppress(FileExistsError):
            os.link(draft, path)
    finally:
        os.close(descriptor)
        draft.unlink()
    return path.read_bytes()
