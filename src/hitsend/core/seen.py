"""An open request as the live view shows it, whichever process has it.

Enters: a flight. Leaves: numbers and names, nothing of its text. Always true: instants are the machine's monotonic
clock, which all processes of one server share. Next: `record.py`.
"""

import msgspec

from hitsend.core.events import Fitted, Step, Tokenized
from hitsend.core.record import Flight


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """`received_at` and `first_token_at` in the clock's seconds; tokens None until they are known."""

    request_id: str
    name: str
    model: str | None
    engine: str | None
    state: str
    received_at: float
    first_token_at: float | None
    prompt_tokens: int | None
    prefilled_tokens: int
    output_tokens: int
    max_tokens: int | None
    step: Step | None


def seen(flight: Flight) -> Seen:
    """How it stands."""
    events = flight.events()
    tokenized = next((event for event in events if isinstance(event, Tokenized)), None)
    fitted = next((event for event in events if isinstance(event, Fitted)), None)
    return Seen(
        request_id=flight.request_id,
        name=flight.principal.name,
        model=flight.model,
        engine=flight.engine,
        state=str(flight.state),
        received_at=flight.received_at,
        first_token_at=flight.first_token_at,
        prompt_tokens=None if tokenized is None else tokenized.num_tokens,
        prefilled_tokens=flight.num_prefilled,
        output_tokens=flight.num_decoded,
        max_tokens=None if fitted is None else fitted.max_tokens,
        step=flight.last_step,
    )
