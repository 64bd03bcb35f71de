"""The tables of the model catalog."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import JSON, Index, String, Text
from sqlalchemy.orm import Mapped, mapped_column

from apis.common import MAX_IDENTIFIER_LENGTH
from post_training.jobs.database import Base, UtcDateTime
from post_training.owners import MAX_OWNER_LENGTH


class BaseModelRow(Base):
    """A base model, everybody's. `folder` is relative to the home folder, or absolute where it lies elsewhere."""

    __tablename__ = "catalog_models"

    identifier: Mapped[str] = mapped_column(String(MAX_IDENTIFIER_LENGTH), primary_key=True)
    folder: Mapped[str] = mapped_column(Text)
    details: Mapped[dict[str, Any]] = mapped_column(JSON)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)


class CheckpointModelRow(Base):
    """A verified checkpoint that can be served and trained on. `completed_at` is its job's, None until then.

    `owned_by` is its job's, too.
    """

    __tablename__ = "catalog_checkpoints"

    identifier: Mapped[str] = mapped_column(String(MAX_IDENTIFIER_LENGTH), primary_key=True)
    job_uuid: Mapped[str] = mapped_column(String(MAX_IDENTIFIER_LENGTH), index=True)
    model: Mapped[str] = mapped_column(String(MAX_IDENTIFIER_LENGTH))
    kind: Mapped[str] = mapped_column(String(16))
    epoch: Mapped[int]
    step: Mapped[int]
    folder: Mapped[str] = mapped_column(Text)
    base_identifier: Mapped[str] = mapped_column(String(MAX_IDENTIFIER_LENGTH))
    base_folder: Mapped[str] = mapped_column(Text)
    details: Mapped[dict[str, Any]] = mapped_column(JSON)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    completed_at: Mapped[datetime | None] = mapped_column(UtcDateTime, default=None)
    owned_by: Mapped[str | None] = mapped_column(String(MAX_OWNER_LENGTH), default=None)

    __table_args__ = (Index("checkpoint_models_by_owner", "owned_by", "created_at"),)


class AliasRow(Base):
    """Another name. Where `target` is the name itself, it stands for what the rules of `resolve` make of it."""

    __tablename__ = "catalog_aliases"

    identifier: Mapped[str] = mapped_column(String(MAX_IDENTIFIER_LENGTH), primary_key=True)
    target: Mapped[str] = mapped_column(String(MAX_IDENTIFIER_LENGTH))
    details: Mapped[dict[str, Any]] = mapped_column(JSON)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    owned_by: Mapped[str | None] = mapped_column(String(MAX_OWNER_LENGTH), default=None)
