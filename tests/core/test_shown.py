"""What is stored of a record, and what is shown of it."""

import msgspec

from hitsend.core import events as ev
from hitsend.core.limits import LevelUse
from hitsend.core.record import Flight
from hitsend.core.request import SamplingParams
from hitsend.core.shown import as_json
from tests.core.test_record import HandClock, _fly


def test_what_was_packed_is_shown_as_the_flight_shows_itself():
    clock = HandClock()
    flight = _fly(clock)
    flight.record(ev.Released(100.040, 7))
    flight.close()
    packed = flight.pack()
    assert not packed.startswith(b"{")
    assert msgspec.json.decode(as_json(packed)) == msgspec.json.decode(msgspec.json.encode(flight.snapshot()))


def test_a_number_too_long_to_pack_is_kept_as_json():
    flight = _fly(HandClock())
    flight.record(ev.Rendered(100.001, 100.003, "ab", 10, {"seed": 10**30}))
    flight.close()
    packed = flight.pack()
    assert packed.startswith(b"{")
    assert as_json(packed) == packed
    assert b"1000000000000000000000000000000" in packed


def test_what_older_versions_stored_is_left_as_it_is():
    for stored in (b'{"request_id":"r"}', b"", b"first"):
        assert as_json(stored) == stored


def test_a_record_of_a_version_that_knew_less_is_shown():
    flight = Flight("req_1", HandClock())
    flight.record(ev.Fitted(10, (), SamplingParams(), {"seed": "client"}))
    flight.close()
    kept = msgspec.msgpack.decode(flight.pack())
    kept["events"].append({"type": "from_another_time", "value": 1})
    kept["at"].append(100.02)
    shown = msgspec.json.decode(as_json(msgspec.msgpack.encode(kept)))
    assert {"type": "from_another_time", "value": 1, "at_ms": 20.0} in shown["events"]
    assert shown["sampling_sources"] == {"seed": "client"}


def test_limits_of_levels_are_stored_in_short_and_shown_one_by_one_as_before():
    flight = _fly(HandClock())
    told = (60, None, None, 4, None, None, 0)
    flight.record(ev.LimitsChecked((LevelUse("org acme", (3, 0, 0, 1, 0, 0, 9), told),)))
    flight.close()
    shown = msgspec.json.decode(as_json(flight.pack()))
    wanted = [
        {"level": "org acme", "name": name, "value": value, "limit": limit}
        for name, value, limit in (("requests_per_minute", 3, 60), ("parallel_requests", 1, 4), ("usd_per_month", 9, 0))
    ]
    (event,) = (one for one in shown["events"] if one["type"] == "limits_checked")
    assert event["limits"] == wanted
    assert shown["limits"][-3:] == wanted
    kept = msgspec.msgpack.decode(flight.pack())
    next(one for one in kept["events"] if one["type"] == "limits_checked")["limits"] = wanted  # as it once was stored
    assert msgspec.json.decode(as_json(msgspec.msgpack.encode(kept))) == shown
