"""`python -m hitsend`, the same as the `hitsend` command.

Enters: command-line arguments. Leaves: an exit status. Always true: nothing but the call. Next: `cli/__init__.py`.
"""

from hitsend.cli import main

main()
