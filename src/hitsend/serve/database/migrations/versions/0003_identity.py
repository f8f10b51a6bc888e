"""Organisations, applications and users; what keys may use; and a number that says when any of it changed."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_ADDED = ("role", "limits", "models", "endpoints", "tier", "max_tier", "expires_at")
_ADDED_BY_ROTATION = ("previous_digest", "overlap_until", "rotated_at", "last_used_at")


def upgrade() -> None:
    """Create the tables, add the columns. Keys that exist become callers without limits, as they were."""
    op.add_column("keys", sa.Column("role", sa.String(16), nullable=False, server_default="caller"))
    op.add_column("keys", sa.Column("limits", sa.Text, nullable=False, server_default="{}"))
    op.add_column("keys", sa.Column("models", sa.Text))
    op.add_column("keys", sa.Column("endpoints", sa.Text))
    op.add_column("keys", sa.Column("tier", sa.Integer))
    op.add_column("keys", sa.Column("max_tier", sa.Integer))
    op.add_column("keys", sa.Column("expires_at", sa.Double))
    op.add_column("keys", sa.Column("previous_digest", sa.String(64)))
    op.add_column("keys", sa.Column("overlap_until", sa.Double))
    op.add_column("keys", sa.Column("rotated_at", sa.Double))
    op.add_column("keys", sa.Column("last_used_at", sa.Double))
    op.create_table(
        "principals",
        sa.Column("kind", sa.String(8), nullable=False),
        sa.Column("org_name", sa.Text, nullable=False),
        sa.Column("app_name", sa.Text, nullable=False),
        sa.Column("user_name", sa.Text, nullable=False),
        sa.Column("limits", sa.Text, nullable=False),
        sa.Column("models", sa.Text),
        sa.Column("tier", sa.Integer),
        sa.Column("max_tier", sa.Integer),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("disabled_at", sa.Double),
        sa.PrimaryKeyConstraint("kind", "org_name", "app_name", "user_name", name="pk_principals"),
    )
    op.create_table(
        "access_changes",
        sa.Column("name", sa.String(16), nullable=False),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_access_changes"),
    )
    op.execute("INSERT INTO access_changes (name, version) VALUES ('access', 0)")


def downgrade() -> None:
    """Drop them."""
    op.drop_table("access_changes")
    op.drop_table("principals")
    for column in (*_ADDED, *_ADDED_BY_ROTATION):
        op.drop_column("keys", column)
