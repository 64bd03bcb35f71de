"""Sessions: jobs whose client drives them, which may be paused or asked to complete; checkpoints with names."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"

TIME = sa.DateTime(timezone=True)
QUEUE = "jobs_by_queue"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("paused", sa.Boolean, nullable=False, server_default=sa.false()))
    op.add_column("jobs", sa.Column("is_session", sa.Boolean, nullable=False, server_default=sa.false()))
    op.add_column("jobs", sa.Column("completion_requested_at", TIME))
    op.add_column("checkpoints", sa.Column("name", sa.String(64)))
    op.drop_index(QUEUE, "jobs")
    op.create_index(QUEUE, "jobs", ["status", "paused", "provider_id", "device_kind", "sequence"])
    op.create_index("jobs_by_kind", "jobs", ["is_session", "sequence"])
    op.execute("UPDATE schema_version SET version = 5")
