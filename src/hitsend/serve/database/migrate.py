"""Running the migrations from the program itself.

Enters: a connection inside a transaction that may write. Leaves: the newest schema, or nothing changed. Always true: a
second process that waited for the first one's lock finds nothing left to do. Next: `migrations/env.py`.
"""

from importlib.resources import as_file, files

from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from alembic.util.exc import CommandError
from sqlalchemy import Connection

from hitsend.core.errors import ConfigError


def upgrade(connection: Connection) -> None:
    """Bring the schema to the head. Raises ConfigError for a database written by a newer hitsend."""
    with as_file(files("hitsend.serve.database") / "migrations") as folder:
        config = _config(str(folder))
        config.attributes["connection"] = connection
        try:
            command.upgrade(config, "head")
        except CommandError as error:
            raise ConfigError(f"the database was written by another version of hitsend: {error}") from error


def newest() -> str | None:
    """The last migration's id."""
    with as_file(files("hitsend.serve.database") / "migrations") as folder:
        return ScriptDirectory.from_config(_config(str(folder))).get_current_head()


def _config(folder: str) -> Config:
    config = Config()
    config.set_main_option("script_location", folder.replace("%", "%%"))
    return config
