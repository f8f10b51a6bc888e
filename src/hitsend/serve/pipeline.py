"""THE STORY: one chat request from parsed to settled, every stage called in order.

Enters: a `Request` and the `Flight` that records it. Leaves: `Started`, then `Delta`s, then `Completed`. Always true:
what a stage returns is recorded; a hold is taken before the engine works and settled exactly once after it, whatever
ended the request; closing this generator, or cancelling the task that runs it, cancels the request at whatever stage it
is. Next: `account.py`, then `access/` and down the alphabet.
"""

import secrets
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from hitsend.core.constraint import ConstraintSpec
from hitsend.core.events import Answered, Fitted, PrefixMatched, Routed, Step, ToolCallMalformed
from hitsend.core.lifecycle import FinishReason, State
from hitsend.core.record import Flight
from hitsend.core.request import Completed, Delta, Request, Started
from hitsend.serve.access.rights import check_model
from hitsend.serve.access.room import Size, most_output
from hitsend.serve.account import Account
from hitsend.serve.chat.completion import Prompts, prepare_prompts
from hitsend.serve.chat.constraints import constraint_spec, grammar_source
from hitsend.serve.chat.formats import Formats, is_thinking_open, suited
from hitsend.serve.chat.handover import Counted, check, count, fit, handed_over, is_settled
from hitsend.serve.chat.prompt import Prompt
from hitsend.serve.engine.openai_body import asked
from hitsend.serve.engine.protocol import ChoiceDone, Counting, Engine, Generation, Job, PromptScored, Tokens
from hitsend.serve.engine.several import admit_all, generate_all
from hitsend.serve.output.assemble import Assembler
from hitsend.serve.output.passed import PassedChoice
from hitsend.serve.output.prompt_tokens import PromptTokens
from hitsend.serve.output.reader import AnswerReader, Wanted
from hitsend.serve.stages import Stages
from hitsend.serve.usage.rows import HoldRequest

_TAIL = 32
"""Tokens at the prompt's end in which an opened thought would stand."""


@dataclass(frozen=True)
class Attempt:
    """One request, ready for one engine; nothing is held yet."""

    request: Request
    job: Job
    engine: Engine
    stages: Stages

    def hold(self) -> HoldRequest:
        """The most that it can use there."""
        return _to_hold(self.request, self.job, self.stages, self.engine)


async def run(request: Request, flight: Flight, stages: Stages) -> AsyncGenerator[Started | Delta | Completed]:
    """Live through one request. Raises ServeErrors; those raised before `Started` cost the caller nothing."""
    attempt = await prepare(request, flight, stages, _route(request, flight, stages))
    async with account_of(attempt, flight) as account:
        deltas, choices = begin(attempt, flight, account)
        yield await started(attempt, flight, account)
        async for delta in deltas:
            yield delta
    flight.enter(State.FINISHED)
    yield Completed(flight.usage, flight.cost_microusd, flight.timings(), warnings_of(attempt, choices))


def account_of(attempt: Attempt, flight: Flight) -> Account:
    """Its hold and bill, still to be entered."""
    stages = attempt.stages
    is_streamed = attempt.request.stream
    return Account(stages.ledger, attempt.hold(), flight, stages.clock, quota=stages.quota, is_streamed=is_streamed)


async def prepare(request: Request, flight: Flight, stages: Stages, engine: Engine) -> Attempt:
    """Everything up to the hold. Raises what preparing and `Engine.admit` raise."""
    engine.shed(request.principal.tenant, request.n * max(1, len(request.prompts)))
    if engine.takes == "messages":
        request, counted, counting = await count_handed_over(request, stages, may_follow=True)
        job, fitted = hand_over(request, stages, counted)
        job = msgspec.structs.replace(job, traceparent=flight.traceparent, counting=counting)
        flight.record(fitted)
    else:
        request = suited(request, stages.text.facts, stages.formats)
        job = await _prepare(request, flight, stages, engine)
    admit_all(engine, job)
    return Attempt(request, job, engine, stages)


def begin(
    attempt: Attempt, flight: Flight, account: Account
) -> tuple[AsyncGenerator[Delta], Sequence[Assembler | PassedChoice]]:
    """Hand the job to the engine; the account, entered, bills it. Raises what `Engine.generate` raises."""
    request, job, stages = attempt.request, attempt.job, attempt.stages
    choices = _choices(request, job, stages, attempt.engine)
    generation = generate_all(attempt.engine, job)
    account.watch(generation, choices)
    return _answer(generation, choices, attempt, flight), choices


async def started(attempt: Attempt, flight: Flight, account: Account) -> Started:
    """The first word, once the engine has taken the request and the hold is safe. Raises what an upstream's refusal
    becomes, and StorageFailed."""
    request, job, engine = attempt.request, attempt.job, attempt.engine
    num_prompt_tokens, is_begun = job.num_prompt_tokens, engine.gives == "text"
    if is_begun:
        await _until_answered(account.generation, flight)
        num_prompt_tokens = account.generation.produced.prompt_tokens
    await account.secured()
    return Started(
        request.request_id,
        int(flight.received_wall),
        request.model,
        system_fingerprint=_fingerprint(engine),
        prompt_tokens=num_prompt_tokens,
        windows=flight.windows,
        has_more=is_begun,
    )


def _route(request: Request, flight: Flight, stages: Stages) -> Engine:
    check_model(request.principal, request.model, stages.engines)
    note_engine(request, flight, stages, Routed("", "", "the only engine that serves this model"))
    return stages.engines[request.model]


def note_engine(request: Request, flight: Flight, stages: Stages, why: Routed) -> None:
    """Record which engine is asked, for this reason."""
    engine = stages.engines[request.model]
    flight.model = request.model
    flight.cells_total = engine.facts.num_cells
    layout = engine.facts.layout if engine.is_local else None
    flight.record(msgspec.structs.replace(why, engine=engine.name, model=request.model, layout=layout))


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
    most = longest_answer(request, stages, sum(map(len, (first, *more))))
    fitted = stages.budget.fit(request, prompt, engine.facts, most)
    flight.record(fitted)
    return Job(
        request_id=request.request_id,
        prompt_token_ids=first,
        sampling=fitted.sampling,
        n=request.n,
        max_tokens=fitted.max_tokens,
        deadline_s=stages.wait_timeout_s,
        cache_salt=request.cache_salt,
        boundaries=() if isinstance(prompt, Prompts) else tuple(span.end for span in prompt.spans),
        constraint=await constrain(request, first, stages),
        adapter=stages.adapter,
        more_prompts=tuple(more),
        tier=request.served_tier,
        tenant=request.principal.tenant,
    )


async def count_handed_over(
    request: Request, stages: Stages, *, may_follow: bool = False
) -> tuple[Request, Counted, Counting | None]:
    """The request as an engine that renders it gets it, and how long its prompt may be. `may_follow`: where nothing
    depends on it, the exact number may come once the request is sent, by what is returned as the third.

    Raises InvalidRequest for what that engine doesn't take.
    """
    terms = stages.handovers[request.model]
    request = handed_over(request, terms, check(request, terms, set(asked(request))))
    known = None
    if may_follow and terms.counter is not None:
        bound = count(request, None)
        if is_settled(request, terms, bound, stages.budget.ceiling):
            return request, bound, partial(terms.counter, request)
    if terms.is_counted and not request.prompts:
        known = (await stages.text.prepare(request)).num_tokens
    elif terms.counter is not None:
        known = await terms.counter(request)
    return request, count(request, known), None


def hand_over(request: Request, stages: Stages, counted: Counted) -> tuple[Job, Fitted]:
    """Messages stay messages: only what may be asked is checked, and what to reserve is bounded."""
    most = longest_answer(request, stages, counted.reserved)
    known = counted.reserved if counted.is_exact else 0
    fitted = fit(request, stages.handovers[request.model], stages.budget.ceiling, most, known)
    job = Job(
        request_id=request.request_id,
        prompt_token_ids=(),
        sampling=fitted.sampling,
        n=request.n * max(1, len(request.prompts)),
        max_tokens=fitted.max_tokens,
        deadline_s=stages.wait_timeout_s,
        tier=request.served_tier,
        tenant=request.principal.tenant,
        chat=request,
        num_prompt_reserved=counted.reserved,
        num_prompt_estimated=counted.estimated,
    )
    return job, fitted


async def _until_answered(generation: Generation, flight: Flight) -> None:
    """An upstream's refusal shall still become a status, so nothing is said to the client before it has answered."""
    async for event in generation:
        assert not isinstance(event, Tokens | PromptScored | ChoiceDone | Delta)
        flight.record(event)
        if isinstance(event, Answered) and event.reason == "ok":
            return


def longest_answer(request: Request, stages: Stages, input_tokens: int) -> int | None:
    """Tokens that the caller's levels leave each choice, so that the hold fits what they can ever contain.

    `input_tokens` of all prompts together.
    """
    price = stages.prices.find(request.model, is_local=stages.engines[request.model].is_local)
    size = Size(
        input_tokens=input_tokens,
        choices=request.n * max(1, len(request.prompts)),
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
    terms = stages.handovers.get(request.model)
    return HoldRequest(
        request_id=request.request_id,
        principal=request.principal,
        model=request.model,
        engine=engine.name,
        price=stages.prices.find(request.model, is_local=engine.is_local),
        input_tokens=job.num_prompt_tokens,
        output_tokens=job.max_tokens * job.num_choices,
        neurons_limit_micro=None if terms is None else terms.neurons_limit_micro,
    )


def _choices(request: Request, job: Job, stages: Stages, engine: Engine) -> Sequence[Assembler | PassedChoice]:
    if engine.gives == "text":
        return [PassedChoice() for _ in range(job.num_choices)]
    return [_assembler(request, job, stages, index) for index in range(job.num_choices)]


def _assembler(request: Request, job: Job, stages: Stages, index: int) -> Assembler:
    return Assembler(
        stages.text.vocabulary,
        request.stop,
        want_logprobs=request.logprobs,
        want_ids=request.return_token_ids,
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


def warnings_of(attempt: Attempt, choices: Sequence[Assembler | PassedChoice]) -> tuple[str, ...]:
    """What the answer says beside itself."""
    return (*attempt.request.warnings, *(f"tool_calls: {fault}" for choice in choices for fault in choice.faults))


def _prompt_tokens(job: Job, stages: Stages) -> list[PromptTokens]:
    """One per prompt, where their log-probabilities are wanted."""
    if job.sampling.prompt_logprobs is None:
        return []
    return [PromptTokens(stages.text.vocabulary, ids) for ids in (job.prompt_token_ids, *job.more_prompts)]


async def _answer(
    generation: Generation, choices: Sequence[Assembler | PassedChoice], attempt: Attempt, flight: Flight
) -> AsyncGenerator[Delta]:
    """The engine's events become deltas, or go to the record. Ends when the engine has ended every choice."""
    job, stages = attempt.job, attempt.stages
    prompts = _prompt_tokens(job, stages)
    for delta in _of_prompts(attempt, prompts):
        flight.capture_output(delta)
        yield delta
    async for event in generation:
        found: Delta | None
        if isinstance(event, Step):  # the most frequent one
            flight.record(event)
            continue
        if isinstance(event, Delta):
            found = _passed(event, choices[event.index], flight)
        elif isinstance(event, Tokens | ChoiceDone):
            found = await _assembled(event, generation, choices[event.choice], flight)
        elif isinstance(event, PromptScored):
            found = _scored(event, prompts, job.n)
        else:
            found = None
            flight.record(_spelt(event, stages) if flight.keep_text and isinstance(event, PrefixMatched) else event)
        if found is None:
            continue
        for fault in choices[found.index].faults if found.finish_reason is not None else ():
            flight.record(ToolCallMalformed(found.index, fault))
        flight.capture_output(found)
        yield found


def _of_prompts(attempt: Attempt, prompts: Sequence[PromptTokens]) -> list[Delta]:
    """What is said of prompts before anything else, as far as it was asked for."""
    job = attempt.job
    found = [Delta(number * job.n, prompt=tokens) for number, one in enumerate(prompts) if (tokens := one.add(()))]
    if attempt.request.return_token_ids and attempt.engine.gives == "tokens":
        ids = (job.prompt_token_ids, *job.more_prompts)
        found += [Delta(number * job.n, prompt_ids=one) for number, one in enumerate(ids)]
    return found


def _spelt(event: PrefixMatched, stages: Stages) -> PrefixMatched:
    """With the texts of the two tokens that part prompt and cache."""
    if event.cached_token_id is None or event.prompt_token_id is None:
        return event
    texts = [stages.text.vocabulary.spelling(token) for token in (event.cached_token_id, event.prompt_token_id)]
    return msgspec.structs.replace(event, cached_text=texts[0], prompt_text=texts[1])


def _passed(delta: Delta, choice: Assembler | PassedChoice, flight: Flight) -> Delta:
    assert isinstance(choice, PassedChoice)
    choice.take(delta)
    if delta.token_ids:
        flight.capture_tokens(delta.index, delta.token_ids)
    return delta


async def _assembled(
    event: Tokens | ChoiceDone, generation: Generation, choice: Assembler | PassedChoice, flight: Flight
) -> Delta | None:
    """What can be shown after it, if anything."""
    assert isinstance(choice, Assembler)
    if isinstance(event, ChoiceDone):
        return None if choice.is_finished else choice.finish(FinishReason(event.reason))
    flight.capture_tokens(event.choice, (token.token_id for token in event.sampled))
    delta, seen = choice.feed(event.sampled)
    for fact in seen:
        flight.record(fact)
    if delta is not None and delta.finish_reason is not None:
        await generation.end_choice(event.choice)
    return delta


def _scored(event: PromptScored, prompts: Sequence[PromptTokens], n: int) -> Delta | None:
    number = event.choice // n
    tokens = prompts[number].add(event.scored)
    return Delta(number * n, prompt=tokens) if tokens else None


def _fingerprint(engine: Engine) -> str | None:
    """What computes, as far as it is ours to know."""
    return None if not engine.is_local else f"{engine.facts.model} on {engine.facts.library}"
