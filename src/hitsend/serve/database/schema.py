"""The tables, as SQLAlchemy Core sees them.

Enters: nothing. Leaves: `METADATA` and one `Table` each. Always true: equal to what the migrations build (a test
compares them); instants are seconds since the epoch (UTC), money is integer micro-dollars, prices are integer
pico-dollars per token (micro-dollars per million tokens); no column is named with a word that PostgreSQL reserves.
Next: `connection.py`.
"""

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Double,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
)

METADATA = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
        "ix": "ix_%(table_name)s_%(column_0_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
    }
)


def _caller() -> list[Column[str | None]]:
    """Who asked: `key_id` is null for the anonymous local principal."""
    return [
        Column("key_id", String(32)),
        Column("key_name", Text, nullable=False),
        Column("user_name", Text),
        Column("app_name", Text),
        Column("org_name", Text),
    ]


def _sold() -> list[Column[str] | Column[int] | Column[int | None]]:
    """What ran, and the price in force when it was promised."""
    return [
        Column("model", Text, nullable=False),
        Column("engine", Text, nullable=False),
        Column("price_id", Text, nullable=False),
        Column("price_input_picousd", BigInteger, nullable=False),
        Column("price_output_picousd", BigInteger, nullable=False),
        Column("price_cached_input_picousd", BigInteger),
    ]


KEYS = Table(
    "keys",
    METADATA,
    Column("key_id", String(32), primary_key=True),
    Column("salt", String(64), nullable=False),
    Column("digest", String(64), nullable=False),
    Column("key_name", Text, nullable=False),
    Column("user_name", Text),
    Column("app_name", Text),
    Column("org_name", Text),
    Column("created_at", Double, nullable=False),
    Column("revoked_at", Double),
    Column("role", String(16), nullable=False, server_default="caller"),
    Column("limits", Text, nullable=False, server_default="{}"),
    Column("models", Text),
    Column("endpoints", Text),
    Column("tier", Integer),
    Column("max_tier", Integer),
    Column("expires_at", Double),
    Column("previous_digest", String(64)),
    Column("overlap_until", Double),
    Column("rotated_at", Double),
    Column("last_used_at", Double),
)
"""`limits`, `models` and `endpoints` are JSON; `previous_digest` is of the secret before the last rotation."""

PRINCIPALS = Table(
    "principals",
    METADATA,
    Column("kind", String(8), primary_key=True),
    Column("org_name", Text, primary_key=True),
    Column("app_name", Text, primary_key=True),
    Column("user_name", Text, primary_key=True),
    Column("limits", Text, nullable=False),
    Column("models", Text),
    Column("tier", Integer),
    Column("max_tier", Integer),
    Column("created_at", Double, nullable=False),
    Column("disabled_at", Double),
)
"""Global, organisations, applications, users; a name that a level doesn't have is empty. `limits`, `models`: JSON."""

ACCESS_CHANGES = Table(
    "access_changes",
    METADATA,
    Column("name", String(16), primary_key=True),
    Column("version", BigInteger, nullable=False),
)
"""One row, `access`: counted up by everything that changes what callers may do, so that servers know when to read."""

HOLDS = Table(
    "holds",
    METADATA,
    Column("hold_id", String(32), primary_key=True),
    Column("request_id", Text, nullable=False, unique=True),
    Column("owner", Text, nullable=False, index=True),
    Column("lease_until", Double, nullable=False),
    *_caller(),
    *_sold(),
    Column("input_tokens", BigInteger, nullable=False),
    Column("output_tokens", BigInteger, nullable=False),
    Column("held_microusd", BigInteger, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("neurons_micro", BigInteger),
)
"""`neurons_micro`: what is held of the day's neurons; null where the price isn't one in neurons."""

LEDGER = Table(
    "ledger",
    METADATA,
    Column("seq", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True),
    Column("request_id", Text, nullable=False, unique=True),
    Column("hold_id", String(32), nullable=False, unique=True),
    *_caller(),
    *_sold(),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("cached_tokens", BigInteger, nullable=False),
    Column("completion_tokens", BigInteger, nullable=False),
    Column("reasoning_tokens", BigInteger, nullable=False),
    Column("discarded_tokens", BigInteger, nullable=False),
    Column("cost_microusd", BigInteger, nullable=False),
    Column("reason", Text, nullable=False),
    Column("is_estimate", Boolean, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("settled_at", Double, nullable=False),
    Column("day", String(10), nullable=False),
    Column("neurons_micro", BigInteger),
    Column("settled_by", Text),
    CheckConstraint("cached_tokens BETWEEN 0 AND prompt_tokens", name="cached_in_prompt"),
    CheckConstraint("reasoning_tokens BETWEEN 0 AND completion_tokens", name="reasoning_in_completion"),
    CheckConstraint("discarded_tokens >= 0 AND cost_microusd >= 0", name="not_negative"),
    Index("ix_ledger_day_key_id", "day", "key_id"),
)
"""`settled_by` is the process that wrote the row; null in rows from before it was noted."""

RECORDS = Table(
    "records",
    METADATA,
    Column("request_id", Text, primary_key=True),
    Column("received_at", Double, nullable=False),
    Column("state", String(16), nullable=False),
    Column("finish_reason", String(32)),
    Column("error_code", String(64)),
    Column("model", Text),
    Column("key_id", String(32)),
    Column("key_name", Text, nullable=False),
    Column("wall_ms", Double, nullable=False),
    Column("prompt_tokens", BigInteger, nullable=False),
    Column("completion_tokens", BigInteger, nullable=False),
    Column("cost_microusd", BigInteger, nullable=False),
    Column("body", LargeBinary, nullable=False),
    Column("ttft_ms", Double),
    Index(
        "ix_records_search",
        *("received_at", "request_id", "key_id", "key_name", "model", "finish_reason"),
        *("wall_ms", "ttft_ms", "cost_microusd"),
    ),
)
"""`body` are the record's facts as `core/shown.py` packs them, or its JSON; deflated with zlib where they are long. The
index holds all that is searched by: a search walks it from the newest record on, and reads only rows that it shows."""

RESPONSES = Table(
    "responses",
    METADATA,
    Column("response_id", Text, primary_key=True),
    Column("key_id", String(32)),
    Column("created_at", Double, nullable=False, index=True),
    Column("body", LargeBinary, nullable=False),
    Index("ix_responses_key_id_created_at", "key_id", "created_at"),
)
"""`body` is JSON deflated with zlib: the response, and the items of the conversation that led to it."""

IDEMPOTENCY = Table(
    "idempotency",
    METADATA,
    Column("scope", Text, primary_key=True),
    Column("idempotency_key", String(255), primary_key=True),
    Column("claim_id", String(32), nullable=False),
    Column("body_hash", String(64), nullable=False),
    Column("request_id", Text, nullable=False),
    Column("owner", Text, nullable=False, index=True),
    Column("lease_until", Double, nullable=False),
    Column("created_at", Double, nullable=False, index=True),
    Column("status", Integer),
    Column("content_type", Text),
    Column("num_bytes", BigInteger, nullable=False),
    Column("body", LargeBinary),
)
"""`scope` is the caller's key id; `status` is null while the first request runs; `body` is deflated with zlib, and null
when the answer was too large to keep; `num_bytes` is its size as stored."""

FILES = Table(
    "files",
    METADATA,
    Column("file_id", String(40), primary_key=True),
    Column("key_id", String(64)),
    Column("purpose", String(16), nullable=False),
    Column("file_name", Text, nullable=False),
    Column("num_bytes", BigInteger, nullable=False),
    Column("created_at", Double, nullable=False, index=True),
    Column("expires_at", Double, nullable=False, index=True),
    Index("ix_files_key_id_created_at", "key_id", "created_at"),
)
"""What is in `DATA_DIR/files`, under `file_id`; `file_name` is only what its owner calls it, never a path."""

BATCHES = Table(
    "batches",
    METADATA,
    Column("batch_id", String(40), primary_key=True),
    Column("key_id", String(64)),
    Column("caller", LargeBinary, nullable=False),
    Column("endpoint", String(32), nullable=False),
    Column("input_file_id", String(40), nullable=False),
    Column("output_file_id", String(40)),
    Column("error_file_id", String(40)),
    Column("status", String(16), nullable=False, index=True),
    Column("labels", Text, nullable=False),
    Column("faults", Text, nullable=False),
    Column("num_lines", BigInteger, nullable=False),
    Column("num_completed", BigInteger, nullable=False),
    Column("num_failed", BigInteger, nullable=False),
    Column("created_at", Double, nullable=False, index=True),
    Column("expires_at", Double, nullable=False),
    Column("in_progress_at", Double),
    Column("finalizing_at", Double),
    Column("completed_at", Double),
    Column("failed_at", Double),
    Column("expired_at", Double),
    Column("cancelling_at", Double),
    Column("cancelled_at", Double),
    Column("owner", Text),
    Column("lease_until", Double, nullable=False),
)
"""`caller` is who made it, as JSON (what it may do is looked up anew); `labels` and `faults` are JSON; `owner` is the
process that runs it until `lease_until`."""

BATCH_LINES = Table(
    "batch_lines",
    METADATA,
    Column("batch_id", String(40), primary_key=True),
    Column("line_number", BigInteger, primary_key=True),
    Column("is_failed", Boolean, nullable=False),
    Column("body", LargeBinary, nullable=False),
)
"""Lines that are done, until their batch is: `body` is the line of the output or error file, deflated with zlib."""
