"""`hitsend users`: users, what is granted to them, and whether they are let in.

Enters: names and flags. Leaves: what was stored. Always true: as in `principals.py`, which does the work.
Next: `limits.py`.
"""

from hitsend.cli import principals

app = principals.group("user")
