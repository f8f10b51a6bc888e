"""What alembic runs: the given connection, the tables of `database/schema.py`.

Enters: the connection that `migrate.upgrade` put into the configuration. Leaves: nothing. Always true: the caller owns
the transaction. Next: `versions/`.
"""

from alembic import context

from hitsend.serve.database.schema import METADATA

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=METADATA,
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
