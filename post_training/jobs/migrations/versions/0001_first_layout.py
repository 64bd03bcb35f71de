"""The first layout: jobs with their history, and the catalogs of models and data sets."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

ID = sa.String(255)
TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    version = op.create_table("schema_version", sa.Column("version", sa.Integer(), primary_key=True))
    op.bulk_insert(version, [{"version": 1}])
    _jobs()
    _history()
    _checkpoints()
    _models()
    _datasets()


def _of_a_job() -> sa.Column[str]:
    return sa.Column("job_uuid", ID, sa.ForeignKey("jobs.job_uuid", ondelete="CASCADE"), nullable=False)


def _jobs() -> None:
    op.create_table(
        "jobs",
        sa.Column("sequence", sa.Integer(), primary_key=True),
        sa.Column("job_uuid", ID, nullable=False, unique=True),
        sa.Column("body_hash", sa.String(64), nullable=False),
        sa.Column("provider_id", ID, nullable=False),
        sa.Column("model", ID, nullable=False),
        sa.Column("spec", sa.JSON(), nullable=False),
        sa.Column("status", sa.String(16), nullable=False, index=True),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("scheduled_at", TIME, nullable=False),
        sa.Column("started_at", TIME),
        sa.Column("completed_at", TIME),
        sa.Column("owner", sa.String(64)),
        sa.Column("heartbeat_at", TIME),
        sa.Column("cancel_requested_at", TIME),
        sa.Column("progress", sa.JSON()),
        sa.Column("report", sa.JSON()),
        sa.Column("resources", sa.JSON()),
        sa.Column("error", sa.JSON()),
    )


def _history() -> None:
    op.create_table(
        "transitions",
        sa.Column("id", sa.Integer(), primary_key=True),
        _of_a_job(),
        sa.Column("old", sa.String(16)),
        sa.Column("new", sa.String(16), nullable=False),
        sa.Column("at", TIME, nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
    )
    op.create_index("ix_transitions_job_uuid", "transitions", ["job_uuid"])
    op.create_table(
        "events",
        sa.Column("id", sa.Integer(), primary_key=True),
        _of_a_job(),
        sa.Column("at", TIME, nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("data", sa.JSON()),
    )
    op.create_index("events_by_job", "events", ["job_uuid", "id"])


def _checkpoints() -> None:
    op.create_table(
        "checkpoints",
        sa.Column("id", sa.Integer(), primary_key=True),
        _of_a_job(),
        sa.Column("identifier", ID, nullable=False, unique=True),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("metrics", sa.JSON()),
        sa.Column("verification", sa.JSON()),
        sa.UniqueConstraint("job_uuid", "step"),
    )
    op.create_index("ix_checkpoints_job_uuid", "checkpoints", ["job_uuid"])


def _models() -> None:
    op.create_table(
        "catalog_models",
        sa.Column("identifier", ID, primary_key=True),
        sa.Column("folder", sa.Text(), nullable=False),
        sa.Column("details", sa.JSON(), nullable=False),
        sa.Column("created_at", TIME, nullable=False),
    )
    op.create_table(
        "catalog_checkpoints",
        sa.Column("identifier", ID, primary_key=True),
        sa.Column("job_uuid", ID, nullable=False, index=True),
        sa.Column("model", ID, nullable=False),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("folder", sa.Text(), nullable=False),
        sa.Column("base_identifier", ID, nullable=False),
        sa.Column("base_folder", sa.Text(), nullable=False),
        sa.Column("details", sa.JSON(), nullable=False),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("completed_at", TIME),
    )
    op.create_table(
        "catalog_aliases",
        sa.Column("identifier", ID, primary_key=True),
        sa.Column("target", ID, nullable=False),
        sa.Column("details", sa.JSON(), nullable=False),
        sa.Column("created_at", TIME, nullable=False),
    )


def _datasets() -> None:
    op.create_table(
        "catalog_datasets",
        sa.Column("identifier", ID, primary_key=True),
        sa.Column("provider_id", ID, nullable=False),
        sa.Column("purpose", sa.String(64), nullable=False),
        sa.Column("source", sa.JSON(), nullable=False),
        sa.Column("details", sa.JSON(), nullable=False),
        sa.Column("fingerprint", sa.String(64), nullable=False),
        sa.Column("rows_file", sa.Text()),
        sa.Column("rows_bytes", sa.BigInteger()),
        sa.Column("created_at", TIME, nullable=False),
    )
