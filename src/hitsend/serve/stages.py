"""What a request passes through: the parts that `app.py` builds once and `pipeline.py` calls.

Enters: built parts. Leaves: `Stages`. Always true: frozen; `of` gives the terms of the model that is asked. Next:
`pipeline.py`.
"""

from dataclasses import dataclass, field, replace

from hitsend.core.clock import Clock
from hitsend.serve.access.quota import Quota
from hitsend.serve.chat.budget import Budget
from hitsend.serve.chat.formats import Formats
from hitsend.serve.chat.handover import Handover
from hitsend.serve.chat.text import TextChild
from hitsend.serve.engine.protocol import Engine
from hitsend.serve.output.reader import Markup
from hitsend.serve.usage.ledger import Ledger
from hitsend.serve.usage.pricing import PriceBook


@dataclass(frozen=True)
class Words:
    """How one embedded model is spoken to, under one of its names; `adapter` is what that name adds to it."""

    text: TextChild
    budget: Budget
    formats: Formats
    markup: Markup
    adapter: str | None = None


@dataclass(frozen=True)
class Stages:
    """Everything that a request passes through; built once by `app.py`. `engines` goes by served model name.

    `handovers` are the terms of those engines that take messages, by the same names; `words` are those of embedded
    models that aren't spoken to like the first one.
    """

    clock: Clock
    text: TextChild
    budget: Budget
    engines: dict[str, Engine]
    prices: PriceBook
    ledger: Ledger
    quota: Quota
    wait_timeout_s: float
    formats: Formats
    markup: Markup
    handovers: dict[str, Handover] = field(default_factory=dict)
    adapter: str | None = None
    words: dict[str, Words] = field(default_factory=dict)

    def of(self, model: str) -> "Stages":
        """The same, for requests to this model."""
        words = self.words.get(model)
        if words is None:
            return self
        return replace(
            self,
            text=words.text,
            budget=words.budget,
            formats=words.formats,
            markup=words.markup,
            adapter=words.adapter,
        )
