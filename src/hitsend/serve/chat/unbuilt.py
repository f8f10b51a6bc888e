"""What a request may ask for on the wire, but nothing behind it can do yet.

Enters: a `Request`. Leaves: nothing, or an InvalidRequest. Always true: this is the only such place, and every way to a
prompt (answering, counting tokens) passes it; a constraint that can't be kept is refused, never ignored.
Next: `prompt.py`.
"""

from hitsend.core.errors import InvalidRequest
from hitsend.core.request import Request


def refuse_unbuilt(request: Request) -> None:
    """Raises InvalidRequest that names the field."""
    if request.tool_choice.mode == "required":
        raise InvalidRequest("a call can't be forced yet: tool_choice has to be auto or none", param="tool_choice")
    if request.output_format is not None:
        raise InvalidRequest(f"output format {request.output_format.kind} is not supported", param="response_format")
