"""API keys, and whose jobs, models and data sets are.

What there is already was made without a key: it has no owner, as what the administrator makes.
"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"

TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    for table in ("jobs", "catalog_checkpoints", "catalog_aliases", "catalog_datasets"):
        op.add_column(table, sa.Column("owned_by", sa.String(64)))
    op.create_index("jobs_by_owner", "jobs", ["owned_by", "sequence"])
    op.create_index("checkpoint_models_by_owner", "catalog_checkpoints", ["owned_by", "created_at"])
    op.create_index("datasets_by_owner", "catalog_datasets", ["owned_by", "created_at"])
    _keys()
    op.execute("UPDATE schema_version SET version = 4")


def _keys() -> None:
    op.create_table(
        "api_keys",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("name", sa.String(100), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False, unique=True),
        sa.Column("created_at", TIME, nullable=False),
        sa.Column("revoked_at", TIME),
        sa.Column("last_used_at", TIME),
    )
