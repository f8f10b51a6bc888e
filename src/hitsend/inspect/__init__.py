"""Looking into a running server: the page in `web/`.

Enters: what `/inspect/state`, `/inspect/requests` and `/inspect/requests/{id}` answer. Leaves: a picture. Always true:
the page is three static files (`web/index.html`, `web/page.js`, `web/page.css`), loads nothing from anywhere else, runs
under a Content-Security-Policy without inline code, and puts text on the screen as text only.
Next: `serve/api/inspect.py`, which serves the files and the JSON.
"""
