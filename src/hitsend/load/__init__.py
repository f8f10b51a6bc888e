"""The load tester: what a server that speaks OpenAI's API does under load, measured from the client's side.

Enters: addresses, a workload, how it arrives. Leaves: one document of figures (`document.py`), one row per request
(`rows.py`), a page (`page.py`). Always true: nothing here knows hitsend's server, only HTTP; an open loop counts from
the instant at which a request was to be sent, however late anything ran; every run ends: by count, by duration and by
timeout; what is drawn by chance follows from the seed; all but `client.py`,
`drive.py`, `probe.py`, `strain.py` and `run.py` is pure. Order of reading: `lengths.py`, `arrivals.py`, `words.py`,
`workload.py`, `trace.py`, `sample.py`, `sse.py`, `target.py`, `client.py`, `probe.py`, `drive.py`, `strain.py`,
`report.py`, `saturation.py`, `compare.py`, `result.py`, `run.py`, `document.py`, `rows.py`, `plots.py`, `page.py`,
`charts.py`.
"""
