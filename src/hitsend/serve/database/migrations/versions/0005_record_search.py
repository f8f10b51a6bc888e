"""Flight records with their time to first token, and an index from which searching them is answered."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

SEARCHED = ["received_at", "request_id", "key_id", "key_name", "model", "finish_reason"]
SEARCHED += ["wall_ms", "ttft_ms", "cost_microusd"]


def upgrade() -> None:
    """Add the column (empty in rows that exist); the new index begins as the old one, and takes its place."""
    op.add_column("records", sa.Column("ttft_ms", sa.Double))
    op.create_index("ix_records_search", "records", SEARCHED)
    op.drop_index("ix_records_received_at", "records")


def downgrade() -> None:
    """Put the old index back."""
    op.create_index("ix_records_received_at", "records", ["received_at"])
    op.drop_index("ix_records_search", "records")
    op.drop_column("records", "ttft_ms")
