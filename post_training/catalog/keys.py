"""API keys: made here, known by their digest, revoked for good.

A key is 256 bits of the system's randomness, so its SHA-256 cannot be turned back by guessing, and a slow hash, which
is for passwords that people choose, would only make every request wait.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from sqlalchemy import String, func, inspect, or_, select, update
from sqlalchemy.orm import Mapped, mapped_column

from apis.errors import InvalidField, NotFound
from post_training.jobs.database import Base, Database, UtcDateTime, now
from post_training.owners import MAX_OWNER_LENGTH

KEY_PREFIX = "pg_"
USE_NOTED_EVERY = timedelta(minutes=10)
_KEY_BYTES = 32
_MAX_NAME = 100


class ApiKeyRow(Base):
    """A key. What it unlocks with is not kept, only its digest; a revoked one stays, since jobs name it as their owner.

    Attributes:
        digest: SHA-256 of the key, hexadecimal.
        last_used_at: to within `USE_NOTED_EVERY`.
    """

    __tablename__ = "api_keys"

    id: Mapped[str] = mapped_column(String(MAX_OWNER_LENGTH), primary_key=True)
    name: Mapped[str] = mapped_column(String(_MAX_NAME))
    digest: Mapped[str] = mapped_column(String(64), unique=True)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    revoked_at: Mapped[datetime | None] = mapped_column(UtcDateTime, default=None)
    last_used_at: Mapped[datetime | None] = mapped_column(UtcDateTime, default=None)


@dataclass(frozen=True)
class LiveKey:
    """A key that opens the stack: its id, and when it was last seen to."""

    id: str
    last_used_at: datetime | None


@dataclass(frozen=True)
class KeyTable:
    """All keys at one moment.

    Attributes:
        live: the keys that are not revoked, by digest.
        any_stored: whether there are keys at all, revoked ones included: once there were, nobody is let in without.
    """

    live: Mapping[bytes, LiveKey]
    any_stored: bool


def key_digest(key: str) -> bytes:
    """[32] SHA-256 of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class ApiKeys:
    """The keys of one store."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def create(self, name: str = "") -> tuple[ApiKeyRow, str]:
        """Make a key; gives its row and the key itself, which is not kept.

        Raises:
            InvalidField: the name is too long, or holds what does not print.
        """
        if len(name) > _MAX_NAME or not name.isprintable():
            raise InvalidField(f"a key's name has at most {_MAX_NAME} characters, all of which print", param="name")
        key = KEY_PREFIX + secrets.token_urlsafe(_KEY_BYTES)
        row = ApiKeyRow(id=f"key_{secrets.token_hex(6)}", name=name, digest=key_digest(key).hex(), created_at=now())
        with self._database.session() as session:
            session.add(row)
        return row, key

    def all(self) -> Sequence[ApiKeyRow]:
        """Every key, revoked ones included, oldest first."""
        with self._database.reading() as session:
            return session.scalars(select(ApiKeyRow).order_by(ApiKeyRow.created_at, ApiKeyRow.id)).all()

    def revoke(self, key_id: str) -> ApiKeyRow:
        """End a key; what it owns stays. Revoked again it stays as it is. Raises NotFound."""
        with self._database.session() as session:
            row = session.get(ApiKeyRow, key_id)
            if row is None:
                raise NotFound(f"there is no key {key_id!r}; `postgrad keys list` shows all", param="key_id")
            row.revoked_at = row.revoked_at or now()
        return row

    def table(self) -> KeyTable:
        """What a server needs to know of the keys, in one short look."""
        columns = ApiKeyRow.digest, ApiKeyRow.id, ApiKeyRow.revoked_at, ApiKeyRow.last_used_at
        with self._database.reading() as session:
            rows = session.execute(select(*columns)).all()
        live = {bytes.fromhex(row.digest): LiveKey(row.id, row.last_used_at) for row in rows if row.revoked_at is None}
        return KeyTable(live, bool(rows))

    def is_live(self, key_id: str) -> bool:
        """Whether the key with this id is not revoked."""
        query = select(ApiKeyRow.id).where(ApiKeyRow.id == key_id, ApiKeyRow.revoked_at.is_(None))
        with self._database.reading() as session:
            return session.scalar(query) is not None

    def any_stored(self) -> bool:
        """Whether the store has keys. It is only read, and may be of a layout before there were any."""
        with self._database.reading() as session:
            if not inspect(session.connection()).has_table(ApiKeyRow.__tablename__):
                return False
            return bool(session.scalar(select(func.count()).select_from(ApiKeyRow)))

    def note_use(self, key_id: str, at: datetime) -> None:
        """Remember that a key was used, where that was not remembered of late."""
        stale = or_(ApiKeyRow.last_used_at.is_(None), ApiKeyRow.last_used_at <= at - USE_NOTED_EVERY)
        with self._database.session() as session:
            session.execute(update(ApiKeyRow).where(ApiKeyRow.id == key_id, stale).values(last_used_at=at))
