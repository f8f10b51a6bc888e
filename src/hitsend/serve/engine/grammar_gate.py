"""Commands wait here until their grammar is compiled, so that no step ever waits for one.

Enters: commands, in the order in which they came. Leaves: the same commands, to the loop. Always true: the commands of
one request keep their order, commands of others overtake; a grammar that is compiled already costs no waiting.
Next: `worker.py`.
"""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from hitsend.serve.engine.grammar import Compiler
from hitsend.serve.loop.messages import Command, Shutdown, Submit

LOOK_S = 0.003
"""How often a driver at rest looks whether a grammar is ready."""


class GrammarGate:
    """In front of `Loop.handle`."""

    def __init__(self, compiler: Compiler, handle: Callable[[Command], None]) -> None:
        self._compiler = compiler
        self._handle = handle
        self._held: dict[str, tuple[Future[Any], list[Command]]] = {}

    @property
    def is_empty(self) -> bool:
        """Whether nobody waits."""
        return not self._held

    def handle(self, command: Command) -> None:
        """Hand it over, or keep it. After `Shutdown` the loop refuses whatever was kept."""
        if isinstance(command, Shutdown):
            self._handle(command)
            for _, kept in self._held.values():
                self._release(kept)
            self._held.clear()
            return
        held = self._held.get(command.request_id)
        grammar = command.constraint.grammar if isinstance(command, Submit) and command.constraint else None
        if held is not None:
            held[1].append(command)
        elif grammar is not None and not self._compiler.is_ready(grammar):
            self._held[command.request_id] = (self._compiler.prepare(grammar), [command])
        else:
            self._handle(command)

    def let_pass(self) -> None:
        """Hand over what is ready."""
        for request_id, (compiled, kept) in [*self._held.items()]:
            if not compiled.done():
                continue
            del self._held[request_id]
            submit = kept[0]
            if isinstance(submit, Submit) and submit.constraint and submit.constraint.grammar:
                self._compiler.prepared(submit.constraint.grammar, compiled)
            self._release(kept)

    def _release(self, kept: list[Command]) -> None:
        for command in kept:
            self._handle(command)
