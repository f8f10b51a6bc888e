"""Neurons beside dollars, who settled a row, and the answers that a repeated Idempotency-Key gets."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the columns (empty in rows that exist) and the table."""
    op.add_column("holds", sa.Column("neurons_micro", sa.BigInteger))
    op.add_column("ledger", sa.Column("neurons_micro", sa.BigInteger))
    op.add_column("ledger", sa.Column("settled_by", sa.Text))
    op.create_table(
        "idempotency",
        sa.Column("scope", sa.Text, nullable=False),
        sa.Column("idempotency_key", sa.String(255), nullable=False),
        sa.Column("claim_id", sa.String(32), nullable=False),
        sa.Column("body_hash", sa.String(64), nullable=False),
        sa.Column("request_id", sa.Text, nullable=False),
        sa.Column("owner", sa.Text, nullable=False),
        sa.Column("lease_until", sa.Double, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("status", sa.Integer),
        sa.Column("content_type", sa.Text),
        sa.Column("num_bytes", sa.BigInteger, nullable=False),
        sa.Column("body", sa.LargeBinary),
        sa.PrimaryKeyConstraint("scope", "idempotency_key", name="pk_idempotency"),
    )
    op.create_index("ix_idempotency_created_at", "idempotency", ["created_at"])
    op.create_index("ix_idempotency_owner", "idempotency", ["owner"])


def downgrade() -> None:
    """Drop them."""
    op.drop_table("idempotency")
    op.drop_column("ledger", "settled_by")
    op.drop_column("ledger", "neurons_micro")
    op.drop_column("holds", "neurons_micro")
