"""Files, batches, and the lines of batches that are done."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the tables."""
    _files()
    _batches()
    op.create_table(
        "batch_lines",
        sa.Column("batch_id", sa.String(40), nullable=False),
        sa.Column("line_number", sa.BigInteger, nullable=False),
        sa.Column("is_failed", sa.Boolean, nullable=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("batch_id", "line_number", name="pk_batch_lines"),
    )


def _files() -> None:
    op.create_table(
        "files",
        sa.Column("file_id", sa.String(40), nullable=False),
        sa.Column("key_id", sa.String(64)),
        sa.Column("purpose", sa.String(16), nullable=False),
        sa.Column("file_name", sa.Text, nullable=False),
        sa.Column("num_bytes", sa.BigInteger, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("expires_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("file_id", name="pk_files"),
    )
    op.create_index("ix_files_created_at", "files", ["created_at"])
    op.create_index("ix_files_expires_at", "files", ["expires_at"])
    op.create_index("ix_files_key_id_created_at", "files", ["key_id", "created_at"])


def _batches() -> None:
    op.create_table(
        "batches",
        sa.Column("batch_id", sa.String(40), nullable=False),
        sa.Column("key_id", sa.String(64)),
        sa.Column("caller", sa.LargeBinary, nullable=False),
        sa.Column("endpoint", sa.String(32), nullable=False),
        sa.Column("input_file_id", sa.String(40), nullable=False),
        sa.Column("output_file_id", sa.String(40)),
        sa.Column("error_file_id", sa.String(40)),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("labels", sa.Text, nullable=False),
        sa.Column("faults", sa.Text, nullable=False),
        sa.Column("num_lines", sa.BigInteger, nullable=False),
        sa.Column("num_completed", sa.BigInteger, nullable=False),
        sa.Column("num_failed", sa.BigInteger, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("expires_at", sa.Double, nullable=False),
        sa.Column("in_progress_at", sa.Double),
        sa.Column("finalizing_at", sa.Double),
        sa.Column("completed_at", sa.Double),
        sa.Column("failed_at", sa.Double),
        sa.Column("expired_at", sa.Double),
        sa.Column("cancelling_at", sa.Double),
        sa.Column("cancelled_at", sa.Double),
        sa.Column("owner", sa.Text),
        sa.Column("lease_until", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("batch_id", name="pk_batches"),
    )
    op.create_index("ix_batches_created_at", "batches", ["created_at"])
    op.create_index("ix_batches_status", "batches", ["status"])


def downgrade() -> None:
    """Drop them."""
    op.drop_table("batch_lines")
    op.drop_table("batches")
    op.drop_table("files")
