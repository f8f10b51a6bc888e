"""The built-in price lists, one dated file each: data, no code.

Enters: nothing. Leaves: `*.toml` with `id` (the version that ledger rows keep), `as_of`, `source`, `engine` (a kind, or
`*`), `unit` (usd or neurons, per million tokens) and `[[models]]`. Always true: a published list is never edited;
prices that change come as a new file, so that a row's version always means the same. Next: `../pricing.py`.
"""
