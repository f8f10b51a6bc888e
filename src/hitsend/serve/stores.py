"""Everything that is kept beyond a request: opened, started, and stopped again.

Enters: settings. Leaves: one database and what stands on it: ledger, keys, records, stored responses, limits. Always
true: all of them work when `open_stores` returns, and the stack that it was given stops them in the reverse order, the
database last. Next: `upstreams.py`.
"""

from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hitsend.core.clock import Clock
from hitsend.core.errors import ConfigError
from hitsend.serve.access.auth import Authenticator
from hitsend.serve.access.issuers import tokens_of
from hitsend.serve.access.memory import MemoryQuota
from hitsend.serve.access.principals import PrincipalStore
from hitsend.serve.access.store import KeyStore
from hitsend.serve.api.services import Administration
from hitsend.serve.database.connection import Database, database_url
from hitsend.serve.database.watch import DatabaseWatch
from hitsend.serve.database.writer import Writer
from hitsend.serve.usage.batches import BatchStore
from hitsend.serve.usage.files import FileStore
from hitsend.serve.usage.idempotency import IdempotencyStore
from hitsend.serve.usage.ledger import Ledger
from hitsend.serve.usage.records import RecordStore
from hitsend.serve.usage.report import Spending
from hitsend.serve.usage.responses import ResponseStore
from hitsend.settings import Settings

if TYPE_CHECKING:
    from hitsend.serve.access.valkey import ValkeyQuota


@dataclass(frozen=True)
class Stores:
    """What is kept on disk."""

    database: Database
    writer: Writer
    records: RecordStore
    ledger: Ledger
    auth: Authenticator
    responses: ResponseStore
    admin: Administration
    quota: "MemoryQuota | ValkeyQuota"
    idempotency: IdempotencyStore
    files: FileStore
    batches: BatchStore


async def open_stores(settings: Settings, clock: Clock, stack: AsyncExitStack) -> Stores:
    """Open and start them; `stack` stops them. Raises ConfigError."""
    database = await Database.open(database_url(settings.usage.url, settings.server.data_dir), settings.usage)
    stack.push_async_callback(database.close)
    watch = DatabaseWatch(database)
    watch.start()
    stack.push_async_callback(watch.stop)
    writer = Writer(database)
    writer.start()
    stack.push_async_callback(writer.stop)
    ledger = Ledger(database, writer, clock, settings.usage)
    await ledger.start()
    stack.push_async_callback(ledger.stop)
    records = RecordStore(database, writer, clock, settings.record)
    records.start()
    stack.push_async_callback(records.stop)
    auth = Authenticator(keys := KeyStore(database, clock), tokens_of(settings.oidc))
    await auth.start()
    stack.push_async_callback(auth.stop)
    responses = ResponseStore(database, writer, clock, settings.responses)
    responses.start()
    stack.push_async_callback(responses.stop)
    idempotency = IdempotencyStore(writer, clock, settings.usage, ledger.owner)
    idempotency.start()
    stack.push_async_callback(idempotency.stop)
    files = FileStore(database, writer, clock, settings.batches, Path(settings.server.data_dir) / "files")
    files.start()
    stack.push_async_callback(files.stop)
    return Stores(
        database,
        writer,
        records,
        ledger,
        auth,
        responses,
        Administration(keys, PrincipalStore(database, clock), auth.refresh),
        quota=await _open_quota(settings, clock, Spending(database), stack),
        idempotency=idempotency,
        files=files,
        batches=BatchStore(database, writer, clock, settings.batches, settings.usage.hold_lease_s),
    )


async def _open_quota(
    settings: Settings, clock: Clock, spending: Spending, stack: AsyncExitStack
) -> "MemoryQuota | ValkeyQuota":
    if settings.access.quota_url is None:
        return MemoryQuota(clock, spending)
    try:
        from hitsend.serve.access.valkey import open_quota  # noqa: PLC0415  # its library is an extra
    except ImportError as error:
        raise ConfigError("access.quota_url: needs the client library: pip install 'hitsend[valkey]'") from error
    quota = await open_quota(settings.access, clock, spending)
    stack.push_async_callback(quota.stop)
    return quota
