import pytest

from hitsend.core.errors import InvalidRequest
from hitsend.core.request import Message, OutputFormat, Request, Tool, ToolChoice
from hitsend.serve.chat.unbuilt import refuse_unbuilt

PLAIN = {"request_id": "r", "model": "m", "messages": (Message("user", "hi"),)}


def test_what_cannot_be_kept_is_refused_by_name():
    refuse_unbuilt(Request(**PLAIN))
    refuse_unbuilt(Request(**PLAIN, tools=(Tool("f"),), tool_choice=ToolChoice("none")))
    with pytest.raises(InvalidRequest) as refused:
        refuse_unbuilt(Request(**PLAIN, tools=(Tool("f"),)))
    assert refused.value.param == "tools"
    with pytest.raises(InvalidRequest, match="json_object"):
        refuse_unbuilt(Request(**PLAIN, output_format=OutputFormat("json_object")))
