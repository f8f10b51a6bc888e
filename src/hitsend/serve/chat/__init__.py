"""Chat: messages become prompt token ids that fit, and every sampling value becomes known.

Enters: a `Request` with messages in hitsend's own words. Leaves: a `Prompt` (ids, spans, times) and a `Fitted` (limits
in tokens, sampling values and where each came from). Always true: the checkpoint's own template and vocabulary decide
how a conversation is written; nobody can type a control token; nothing is ever cut to fit; rendering and tokenising
happen in a child process that can be killed, so that neither a template nor a text can stop the edge.
Order of reading: `template.py`, `marks.py`, `tokenizer.py`, `prompt.py` (these run in the text child), `text.py` (the
edge's side of it), `completion.py` (prompts without messages), `budget.py`, `presets.py`, `formats.py`,
`tool_prompt.py`.
"""
