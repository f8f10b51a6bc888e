"""Serving: the path of a request, in alphabetical order.

Enters: HTTP. Leaves: a streamed answer, one ledger row and a flight record. Always true: access < api < chat < engine <
loop < output < stream < usage is both the order of the packages and the order of the request. Read `pipeline.py` first.
"""
