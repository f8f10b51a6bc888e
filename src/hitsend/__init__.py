"""hitsend: what happens when you hit send, as one program you can run, read, inspect and bill from."""

__version__ = "0.1.0"
