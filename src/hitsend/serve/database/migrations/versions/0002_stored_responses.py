"""Stored responses."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create their table."""
    op.create_table(
        "responses",
        sa.Column("response_id", sa.Text, nullable=False),
        sa.Column("key_id", sa.String(32)),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("response_id", name="pk_responses"),
    )
    op.create_index("ix_responses_created_at", "responses", ["created_at"])
    op.create_index("ix_responses_key_id_created_at", "responses", ["key_id", "created_at"])


def downgrade() -> None:
    """Drop it."""
    op.drop_table("responses")
