"""`hitsend plan rent-or-buy`: managed tokens or machines of one's own.

Enters: traffic and a price, what a replica costs, how fast it is or what it is made of. Leaves: crossover, chart,
sensitivity, a verdict. Always true: `--json` prints one document. Next: `plan_fleet.py`.
"""

from fractions import Fraction
from typing import Annotated, Any

import msgspec
import typer

from hitsend.cli import CallFailed, options
from hitsend.cli.plan_answer import Answer, give
from hitsend.cli.plan_memory import FactsFile
from hitsend.core.errors import ConfigError
from hitsend.plan.cost import plan_cost, spread
from hitsend.plan.facts import Facts, load_facts
from hitsend.plan.hardware import find_gpu
from hitsend.plan.models import find_checkpoint
from hitsend.plan.prices import find_rate
from hitsend.plan.rent import RentQuestion, plan_rent
from hitsend.plan.rent_text import rent_document
from hitsend.plan.roofline import Layout
from hitsend.plan.speed import SpeedQuestion, plan_speed


def rent_or_buy(
    dedicated_cost: Annotated[
        float, typer.Option("--dedicated-cost", metavar="C", help="USD a month (30 days) of one replica.")
    ],
    price: Annotated[str, typer.Option("--price", metavar="P", help="Managed: workers-ai:qwen3.8-27b, or 0.45/3.20.")],
    requests: Annotated[int, typer.Option("--requests", help="A month, in all.")] = 30_000,
    input_tokens: Annotated[int, typer.Option("--input", help="Tokens a request.")] = 1200,
    output_tokens: Annotated[int, typer.Option("--output", help="Tokens a request, without reasoning.")] = 400,
    reasoning: Annotated[int, typer.Option("--reasoning", help="Tokens a request that the model thinks.")] = 0,
    cached_share: Annotated[float, typer.Option("--cached-share", help="Part of the input, 0 to 1.")] = 0.0,
    ops_cost: Annotated[float, typer.Option("--ops-cost", help="USD a month of people and tools.")] = 0.0,
    redundancy: Annotated[int, typer.Option("--redundancy", help="Spare replicas.")] = 0,
    utilization: Annotated[float, typer.Option("--utilization", help="Of its rate, at peak.")] = 0.7,
    peak_factor: Annotated[float, typer.Option("--peak-factor", help="Peak / mean traffic.")] = 3.0,
    tokens_per_s: Annotated[
        float | None, typer.Option("--tokens-per-s", help="Output of one replica, as measured at your latency goal.")
    ] = None,
    model: Annotated[str | None, typer.Option("--model", metavar="M", help="Or plan its speed: with --gpu.")] = None,
    gpu: Annotated[str | None, typer.Option("--gpu", metavar="G")] = None,
    tp: Annotated[int, typer.Option("--tp", help="GPUs of one replica.")] = 1,
    weights: Annotated[str | None, typer.Option("--weights")] = None,
    batch: Annotated[int, typer.Option("--batch", help="Sequences at once on a replica.")] = 16,
    facts: FactsFile = None,
    as_json: options.Json = False,
) -> Answer:
    """The traffic at which a machine of your own costs what managed tokens do, and how sure that is."""
    known = load_facts(facts)
    lengths = (input_tokens, output_tokens, reasoning)
    usd = _managed_usd(known, price, requests, lengths, cached_share)
    if model is not None and tokens_per_s is None:
        if gpu is None:
            raise CallFailed("--model needs --gpu to plan a speed, or give --tokens-per-s")
        checkpoint, card = find_checkpoint(model, known), find_gpu(gpu, known)
        question = SpeedQuestion(checkpoint=checkpoint, gpu=card, layout=Layout(tp=tp), weights=weights, batch=batch)
        tokens_per_s = _tokens_per_s(question, lengths, cached_share)
    plan = plan_rent(
        RentQuestion(
            managed_usd=usd,
            requests=requests,
            output_tokens=float(requests * (output_tokens + reasoning)),
            dedicated_usd=dedicated_cost,
            ops_usd=ops_cost,
            redundancy=redundancy,
            tokens_per_s=tokens_per_s,
            utilization=utilization,
            peak_factor=peak_factor,
        )
    )
    found = rent_document(plan)
    return give(found, rent_text(found), as_json=as_json)


def rent_text(found: dict[str, Any]) -> list[str]:
    """The same document for a reader."""
    head = f"{found['managed_usd']:,.2f} USD managed, {found['dedicated_usd']:,.2f} dedicated: {found['cheaper']}"
    return [head, *(f"  {line}" for line in found["explain"])]


def _tokens_per_s(question: SpeedQuestion, lengths: tuple[int, int, int], cached_share: float) -> float:
    """Of one replica at this many sequences at once."""
    entry, leave, thought = lengths
    asked = msgspec.structs.replace(
        question, input=max(1, entry), output=max(1, leave + thought), prefix_hit=min(0.99, cached_share)
    )
    return plan_speed(asked).output_tokens_per_s.value


def _managed_usd(known: Facts, price: str, requests: int, lengths: tuple[int, int, int], cached_share: float) -> float:
    """Gross: what is free on some days is small where this question is asked."""
    if not 0 <= cached_share <= 1:
        raise ConfigError(f"--cached-share is {cached_share:g}, needed is 0 to 1")
    entry, leave, thought = lengths
    traffic = spread(
        requests,
        input_tokens=entry,
        output_tokens=leave,
        reasoning=thought,
        cached=Fraction(str(cached_share)),
        pattern=(1,) * 30,
    )
    return float(plan_cost(traffic, find_rate(price, known)).gross_usd)
