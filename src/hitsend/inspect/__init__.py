"""Looking into a running server: the page in `web/`, and `explain.py`, which says where a request's time went.

Enters: what `/inspect/state`, `/inspect/requests` and `/inspect/requests/{id}` answer. Leaves: a picture. Always true:
the pages are static files (`web/index.html`, `web/page.js`, `web/page.css`; `web/docs.html` and `web/docs.js` draw
`/openapi.json`), load nothing from anywhere else, run under a Content-Security-Policy without inline code, and put text
on the screen as text only.
Next: `serve/api/inspect.py`, which serves the files and the JSON.
"""
