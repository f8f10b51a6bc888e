"""Keys, holds, the ledger and records."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create everything."""
    _create_keys()
    _create_holds()
    _create_ledger()
    _create_records()
    _make_append_only()


def downgrade() -> None:
    """Drop everything."""
    for table in ("records", "ledger", "holds", "keys"):
        op.drop_table(table)


def _caller() -> list[sa.Column[str]]:
    return [
        sa.Column("key_id", sa.String(32)),
        sa.Column("key_name", sa.Text, nullable=False),
        sa.Column("user_name", sa.Text),
        sa.Column("app_name", sa.Text),
        sa.Column("org_name", sa.Text),
    ]


def _sold() -> list[sa.Column[str] | sa.Column[int]]:
    return [
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("engine", sa.Text, nullable=False),
        sa.Column("price_id", sa.Text, nullable=False),
        sa.Column("price_input_picousd", sa.BigInteger, nullable=False),
        sa.Column("price_output_picousd", sa.BigInteger, nullable=False),
        sa.Column("price_cached_input_picousd", sa.BigInteger),
    ]


def _create_keys() -> None:
    op.create_table(
        "keys",
        sa.Column("key_id", sa.String(32), nullable=False),
        sa.Column("salt", sa.String(64), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("key_name", sa.Text, nullable=False),
        sa.Column("user_name", sa.Text),
        sa.Column("app_name", sa.Text),
        sa.Column("org_name", sa.Text),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("revoked_at", sa.Double),
        sa.PrimaryKeyConstraint("key_id", name="pk_keys"),
    )


def _create_holds() -> None:
    op.create_table(
        "holds",
        sa.Column("hold_id", sa.String(32), nullable=False),
        sa.Column("request_id", sa.Text, nullable=False),
        sa.Column("owner", sa.Text, nullable=False),
        sa.Column("lease_until", sa.Double, nullable=False),
        *_caller(),
        *_sold(),
        sa.Column("input_tokens", sa.BigInteger, nullable=False),
        sa.Column("output_tokens", sa.BigInteger, nullable=False),
        sa.Column("held_microusd", sa.BigInteger, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("hold_id", name="pk_holds"),
        sa.UniqueConstraint("request_id", name="uq_holds_request_id"),
    )
    op.create_index("ix_holds_owner", "holds", ["owner"])


def _create_ledger() -> None:
    op.create_table(
        "ledger",
        sa.Column("seq", sa.BigInteger().with_variant(sa.Integer, "sqlite"), nullable=False, autoincrement=True),
        sa.Column("request_id", sa.Text, nullable=False),
        sa.Column("hold_id", sa.String(32), nullable=False),
        *_caller(),
        *_sold(),
        sa.Column("prompt_tokens", sa.BigInteger, nullable=False),
        sa.Column("cached_tokens", sa.BigInteger, nullable=False),
        sa.Column("completion_tokens", sa.BigInteger, nullable=False),
        sa.Column("reasoning_tokens", sa.BigInteger, nullable=False),
        sa.Column("discarded_tokens", sa.BigInteger, nullable=False),
        sa.Column("cost_microusd", sa.BigInteger, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("is_estimate", sa.Boolean, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("settled_at", sa.Double, nullable=False),
        sa.Column("day", sa.String(10), nullable=False),
        sa.PrimaryKeyConstraint("seq", name="pk_ledger"),
        sa.UniqueConstraint("request_id", name="uq_ledger_request_id"),
        sa.UniqueConstraint("hold_id", name="uq_ledger_hold_id"),
        sa.CheckConstraint("cached_tokens BETWEEN 0 AND prompt_tokens", name="ck_ledger_cached_in_prompt"),
        sa.CheckConstraint(
            "reasoning_tokens BETWEEN 0 AND completion_tokens", name="ck_ledger_reasoning_in_completion"
        ),
        sa.CheckConstraint("discarded_tokens >= 0 AND cost_microusd >= 0", name="ck_ledger_not_negative"),
    )
    op.create_index("ix_ledger_day_key_id", "ledger", ["day", "key_id"])


def _create_records() -> None:
    op.create_table(
        "records",
        sa.Column("request_id", sa.Text, nullable=False),
        sa.Column("received_at", sa.Double, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("finish_reason", sa.String(32)),
        sa.Column("error_code", sa.String(64)),
        sa.Column("model", sa.Text),
        sa.Column("key_id", sa.String(32)),
        sa.Column("key_name", sa.Text, nullable=False),
        sa.Column("wall_ms", sa.Double, nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger, nullable=False),
        sa.Column("completion_tokens", sa.BigInteger, nullable=False),
        sa.Column("cost_microusd", sa.BigInteger, nullable=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("request_id", name="pk_records"),
    )
    op.create_index("ix_records_received_at", "records", ["received_at"])


def _make_append_only() -> None:
    """The database itself refuses to change or drop a ledger row, whoever asks."""
    if op.get_bind().dialect.name == "sqlite":
        for change in ("UPDATE", "DELETE"):
            op.execute(
                f"CREATE TRIGGER ledger_no_{change.lower()} BEFORE {change} ON ledger "
                "BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END"
            )
        return
    op.execute(
        "CREATE FUNCTION ledger_is_append_only() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE EXCEPTION 'the ledger is append-only'; END $$"
    )
    op.execute(
        "CREATE TRIGGER ledger_append_only BEFORE UPDATE OR DELETE ON ledger "
        "FOR EACH ROW EXECUTE FUNCTION ledger_is_append_only()"
    )
