"""THE STORY: one chat request from parsed to settled, every stage called in order.

Enters: a `Request` and the `Flight` that records it. Leaves: `Started`, then `Delta`s, then `Completed`. Always true:
what a stage returns is recorded; a hold is taken before the engine works and settled exactly once after it, whatever
ended the request; closing this generator, or cancelling the task that runs it, cancels the request at whatever stage it
is. Next: `account.py`, then `access/` and down the alphabet.
"""

import secrets
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from hitsend.core.clock import Clock
from hitsend.core.constraint import ConstraintSpec
from hitsend.core.events import Routed, ToolCallMalformed
from hitsend.core.lifecycle import FinishReason, State
from hitsend.core.record import Flight
from hitsend.core.request import Completed, Delta, Request, Started
from hitsend.serve.access.limits import Size, most_output
from hitsend.serve.access.quota import Quota
from hitsend.serve.access.rights import check_model
from hitsend.serve.account import Account
from hitsend.serve.chat.budget import Budget
from hitsend.serve.chat.completion import Prompts, prepare_prompts
from hitsend.serve.chat.constraints import constraint_spec, grammar_source
from hitsend.serve.chat.formats import Formats, is_thinking_open, suited
from hitsend.serve.chat.prompt import Prompt
from hitsend.serve.chat.text import TextChild
from hitsend.serve.engine.protocol import ChoiceDone, Engine, Generation, Job, PromptScored, Tokens
from hitsend.serve.engine.several import admit_all, generate_all
from hitsend.serve.output.assemble import Assembler
from hitsend.serve.output.prompt_tokens import PromptTokens
from hitsend.serve.output.reader import AnswerReader, Markup, Wanted
from hitsend.serve.usage.ledger import Ledger
from hitsend.serve.usage.pricing import PriceBook
from hitsend.serve.usage.rows import HoldRequest

_TAIL = 32
"""Tokens at the prompt's end in which an opened thought would stand."""


@dataclass(frozen=True)
class Stages:
    """Everything that a request passes through; built once by `app.py`. `engines` goes by served model name."""

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


async def run(request: Request, flight: Flight, stages: Stages) -> AsyncGenerator[Started | Delta | Completed]:
    """Live through one request. Raises ServeErrors; those raised before `Started` cost the caller nothing."""
    engine = _route(request, flight, stages)
    request = suited(request, stages.text.facts, stages.formats)
    job = await _prepare(request, flight, stages, engine)
    admit_all(engine, job)
    hold = _to_hold(request, job, stages, engine)
    account = Account(stages.ledger, hold, flight, stages.clock, quota=stages.quota)
    async with account:
        choices = [_assembler(request, job, stages, index) for index in range(job.num_choices)]
        generation = generate_all(engine, job)
        account.watch(generation, choices)
        yield Started(
            request.request_id,
            int(flight.received_wall),
            request.model,
            system_fingerprint=_fingerprint(engine),
            prompt_tokens=job.num_prompt_tokens,
            windows=flight.windows,
        )
        prompts = _prompt_tokens(job, stages)
        for number, prompt in enumerate(prompts):
            if tokens := prompt.add(()):
                yield Delta(number * job.n, prompt=tokens)
        async for delta in _answer(generation, choices, prompts, flight):
            yield delta
    flight.enter(State.FINISHED)
    yield Completed(flight.usage, flight.cost_microusd, flight.timings(), _warnings(request, choices))


def _route(request: Request, flight: Flight, stages: Stages) -> Engine:
    check_model(request.principal, request.model, stages.engines)
    engine = stages.engines[request.model]
    flight.model = request.model
    flight.cells_total = engine.facts.num_cells
    flight.record(Routed(engine.name, request.model, "the only engine that serves this model"))
    return engine


async def _prepare(request: Request, flight: Flight, stages: Stages, engine: Engine) -> Job:
    """Messages or prompts become ids, and ids a job that fits."""
    context, keep_text = engine.facts.cells_per_slot, flight.keep_text
    if request.prompts:
        prompt: Prompt | Prompts = await prepare_prompts(request, stages.text, stages.clock, keep_ids=keep_text)
    else:
        prompt = await stages.text.prepare(request, wants_text=keep_text, max_prompt_tokens=context)
        flight.record(prompt.rendered(request.template_kwargs))
    flight.record(prompt.tokenized())
    first, *more = prompt.every if isinstance(prompt, Prompts) else (prompt.prompt_token_ids,)
    most = longest_answer(request, stages, (first, *more))
    fitted = stages.budget.fit(request, prompt, engine.facts, most)
    flight.record(fitted)
    return Job(
        request_id=request.request_id,
        prompt_token_ids=first,
        sampling=fitted.sampling,
        n=request.n,
        max_tokens=fitted.max_tokens,
        deadline_s=stages.wait_timeout_s,
        constraint=await constrain(request, first, stages),
        more_prompts=tuple(more),
        tier=request.served_tier,
        tenant=request.principal.tenant,
    )


def longest_answer(request: Request, stages: Stages, prompts: Sequence[Sequence[int]]) -> int | None:
    """Tokens that the caller's levels leave each choice, so that the hold fits what they can ever contain."""
    price = stages.prices.find(request.model, is_local=True)
    size = Size(
        input_tokens=sum(map(len, prompts)),
        choices=request.n * len(prompts),
        max_tokens=request.max_tokens,
        input_picousd=price.dearest_input_picousd,
        output_picousd=price.output_picousd,
        input_param="prompt" if request.prompts else "messages",
    )
    return most_output(request.principal.levels, size)


async def constrain(request: Request, token_ids: Sequence[int], stages: Stages) -> ConstraintSpec | None:
    """What the answer is held to once its thoughts are over, compiled once already. Raises InvalidRequest.

    What goes on from a prompt without messages has no thoughts: all of it is held to it.
    """
    words, formats = stages.text.vocabulary, stages.formats if request.messages else Formats()
    source = grammar_source(request, formats.tool, words)
    return constraint_spec(
        None if source is None else await stages.text.compile(source),
        formats.reasoning,
        words,
        is_open=_is_thinking_open(request, token_ids, stages),
        may_open=_is_thinking_wanted(request),
        budget=request.thinking_token_budget,
    )


def _is_thinking_open(request: Request, token_ids: Sequence[int], stages: Stages) -> bool:
    tail = stages.text.vocabulary.detokenize(tuple(token_ids[-_TAIL:]))
    return is_thinking_open(request, tail, stages.formats)


def _is_thinking_wanted(request: Request) -> bool:
    return request.template_kwargs.get("enable_thinking") is not False


def _to_hold(request: Request, job: Job, stages: Stages, engine: Engine) -> HoldRequest:
    return HoldRequest(
        request_id=request.request_id,
        principal=request.principal,
        model=request.model,
        engine=engine.name,
        price=stages.prices.find(request.model, is_local=True),
        input_tokens=job.num_prompt_tokens,
        output_tokens=job.max_tokens * job.num_choices,
    )


def _assembler(request: Request, job: Job, stages: Stages, index: int) -> Assembler:
    return Assembler(
        stages.text.vocabulary,
        request.stop,
        want_logprobs=request.logprobs,
        index=index,
        shows_stop=request.include_stop,
        min_tokens=request.min_tokens,
        reader=_reader(request, job, stages) if request.messages else None,
    )


def _reader(request: Request, job: Job, stages: Stages) -> AnswerReader:
    """Who looks for thoughts and calls."""
    wanted = Wanted(
        tools=request.tools if request.tool_choice.mode != "none" else (),
        is_parallel=request.parallel_tool_calls,
        is_thinking_open=_is_thinking_open(request, job.prompt_token_ids, stages),
        is_thinking_wanted=_is_thinking_wanted(request),
    )
    return AnswerReader(stages.markup, wanted, lambda: f"call_{secrets.token_hex(12)}")


def _warnings(request: Request, choices: Sequence[Assembler]) -> tuple[str, ...]:
    return (*request.warnings, *(f"tool_calls: {fault}" for choice in choices for fault in choice.faults))


def _prompt_tokens(job: Job, stages: Stages) -> list[PromptTokens]:
    """One per prompt, where their log-probabilities are wanted."""
    if job.sampling.prompt_logprobs is None:
        return []
    return [PromptTokens(stages.text.vocabulary, ids) for ids in (job.prompt_token_ids, *job.more_prompts)]


async def _answer(
    generation: Generation, choices: Sequence[Assembler], prompts: Sequence[PromptTokens], flight: Flight
) -> AsyncGenerator[Delta]:
    """The engine's events become deltas, or go to the record. Ends when the engine has ended every choice."""
    async for event in generation:
        delta: Delta | None
        if isinstance(event, Tokens):
            delta = _feed(choices[event.choice], event, flight)
            if delta is not None and delta.finish_reason is not None:
                await generation.end_choice(event.choice)
        elif isinstance(event, ChoiceDone):
            choice = choices[event.choice]
            delta = None if choice.is_finished else choice.finish(FinishReason(event.reason))
        elif isinstance(event, PromptScored):
            delta = _scored(event, prompts, len(choices) // len(prompts))
        else:
            delta = None
            flight.record(event)
        if delta is None:
            continue
        for fault in choices[delta.index].faults if delta.finish_reason is not None else ():
            flight.record(ToolCallMalformed(delta.index, fault))
        flight.capture_output(delta)
        yield delta


def _feed(choice: Assembler, tokens: Tokens, flight: Flight) -> Delta | None:
    delta, seen = choice.feed(tokens.sampled)
    for fact in seen:
        flight.record(fact)
    return delta


def _scored(event: PromptScored, prompts: Sequence[PromptTokens], n: int) -> Delta | None:
    number = event.choice // n
    tokens = prompts[number].add(event.scored)
    return Delta(number * n, prompt=tokens) if tokens else None


def _fingerprint(engine: Engine) -> str:
    return f"{engine.facts.model} on {engine.facts.library}"
