"""What every setting is made of: the base of all sections, and numbers with their bounds.

Enters: nothing. Leaves: types. Always true: a bound stands in the type, so that a value outside of it never gets in.
Next: `settings.py`.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

Positive = Annotated[int, Meta(ge=1)]
Count = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(gt=0)]
Price = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all sections: frozen, unknown keys refused."""
