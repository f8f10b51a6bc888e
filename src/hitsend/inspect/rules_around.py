"""Rules about what lies around the engine: failures, refusals, clients, upstreams, the gateway itself.

Enters: `Figures`, perhaps a `Baseline`. Leaves: a `Finding`, or None where the rule doesn't hold or the server doesn't
tell what it asks. Always true: pure; a rule never takes an unknown figure for 0. Next: `rules_engine.py`.
"""

from hitsend.inspect.baseline import Baseline
from hitsend.inspect.findings import Finding, Threshold, at_least, at_most, seen, slow_tpot, slow_ttft, sure
from hitsend.inspect.readings import Figures, over

FAILED_SHARE = Threshold(0.05)
REFUSED_SHARE = Threshold(0.1)
PAUSED_SHARE = Threshold(0.3)
CLIENT_SHARE = Threshold(0.3)
UPSTREAM_SHARE = Threshold(0.6)
EDGE_CORES = Threshold(0.8)
EDGE_SHARE = Threshold(0.3)
SLOTS_SHARE = Threshold(0.9)
SATURATED = Threshold(0.9)


def engine_failing(now: Figures, _: Baseline | None) -> Finding | None:
    """The engine was started again, is away, or fails requests."""
    share = over(now.failed, (now.requests or 0.0) + 1e-9) if now.failed else None
    evidence = []
    if now.restarts:
        evidence.append(at_least("engine restarts", now.restarts, "", Threshold(1.0)))
    if now.is_up is False:
        evidence.append(at_most("engine up", 0.0, "", Threshold(0.0)))
    if share is not None and share >= FAILED_SHARE.value:
        evidence.append(at_least("requests failed by the server", min(1.0, share), "share", FAILED_SHARE))
    if not evidence:
        return None
    return Finding(
        name="engine_failing",
        text="The engine fails or is being restarted: nothing else matters until it stays up.",
        confidence="high",
        evidence=tuple(evidence),
        change="Read the server's log around the restart: out of memory, a crash, or killed from outside.",
        effect="Requests stop failing; until then every restart costs the load time of the model and all that ran.",
        measure="hitsend_engine_restarts_total over the next hour; it has to stay where it is.",
    )


def context_too_small(now: Figures, _: Baseline | None) -> Finding | None:
    """Requests are refused because they can't ever fit."""
    share = over(now.too_long, now.requests)
    if share is None or share < REFUSED_SHARE.value:
        return None
    return Finding(
        name="context_too_small",
        text="Requests ask for more tokens than one sequence can hold here, and are refused.",
        confidence=sure(share, REFUSED_SHARE.value),
        evidence=(
            at_least("requests refused as too long", share, "share", REFUSED_SHARE),
            *seen(("requests refused", now.too_long, "")),
        ),
        change="Raise engine.context, with fewer slots (engine.num_slots) or engine.kv_mode=unified where memory is "
        "short; or have clients ask for a smaller max_tokens.",
        effect=f"{share:.0%} of the requests would be served instead of refused.",
        measure="`hitsend plan memory` for what a longer context costs in cells.",
    )


def slow_clients(now: Figures, _: Baseline | None) -> Finding | None:
    """Answers wait for whoever reads them."""
    paused = over(now.paused, now.running)
    by_now = paused is not None and paused >= PAUSED_SHARE.value and (now.paused or 0.0) >= 0.5
    by_time = now.client_share is not None and now.client_share >= CLIENT_SHARE.value
    if not by_now and not by_time:
        return None
    evidence = []
    if by_now and paused is not None:
        evidence.append(at_least("running requests that are paused", paused, "share", PAUSED_SHARE))
    if by_time and now.client_share is not None:
        evidence.append(at_least("time waiting for clients to read", now.client_share, "share", CLIENT_SHARE))
    return Finding(
        name="slow_clients",
        text="Clients read their answers slower than they are computed; paused requests keep their cells and slots.",
        confidence="high" if by_now and by_time else "medium",
        evidence=(*evidence, *seen(("waiting", now.waiting, "requests"), ("busy", now.busy, "share"))),
        change="Lower stream.stall_s, so that clients that read nothing are cut off and their slots become free.",
        effect="Slots held by paused requests go to those that wait; the engine isn't what is slow.",
        measure="`hitsend inspect ID --explain` of a slow request: the share of `slow_client`.",
    )


def upstream_bound(now: Figures, baseline: Baseline | None) -> Finding | None:
    """Time goes by at a server elsewhere."""
    full = over(now.upstream_running, now.upstream_slots)
    ended = now.upstream_share is not None and now.upstream_share >= UPSTREAM_SHARE.value
    stuck = bool(now.upstream_running) and not now.requests
    if not ended and not stuck and (full is None or full < SLOTS_SHARE.value):
        return None
    ttft, tpot = slow_ttft(baseline), slow_tpot(baseline)
    evidence = []
    if now.ttft_s is not None and now.ttft_s >= ttft.value / 2:
        evidence.append(at_least("mean time to first token", now.ttft_s, "s", Threshold(ttft.value / 2, ttft.source)))
    if now.tpot_s is not None and now.tpot_s >= tpot.value:
        evidence.append(at_least("mean time per output token", now.tpot_s, "s", tpot))
    if full is not None and full >= SLOTS_SHARE.value:
        evidence.append(at_least("upstream places in use", full, "share", SLOTS_SHARE))
    if stuck and now.upstream_running:
        evidence.append(at_least("requests at the upstream, none answered", now.upstream_running, "", Threshold(1.0)))
    if not evidence:
        return None  # it is where the time goes, and that is as it should be
    share = now.upstream_share or 0.0
    return Finding(
        name="upstream_bound",
        text="Requests spend their time at an upstream that answers slowly.",
        confidence=sure(share, UPSTREAM_SHARE.value) if ended else "medium",
        evidence=(*seen(("time at upstreams", now.upstream_share, "share")), *evidence),
        change="Look at the upstream itself (`hitsend diagnose --url` of its /metrics), or route to another one.",
        effect=f"At most {share:.0%} of the requests' time: all of it that is spent there.",
        measure="`hitsend load --target direct=UPSTREAM --target here=URL`: what this gateway adds to it.",
    )


def edge_bound(now: Figures, _: Baseline | None) -> Finding | None:
    """The HTTP side can't keep up, while the engine could do more."""
    cores = over((now.edge_cpu or 0.0) + (now.edge_wait or 0.0), now.edges) if now.edge_cpu is not None else None
    if cores is None or cores < EDGE_CORES.value or (now.busy or 0.0) >= SATURATED.value:
        return None
    if now.edge_share is None or now.edge_share < EDGE_SHARE.value:
        return None
    return Finding(
        name="edge_bound",
        text="The gateway process needs a whole core: HTTP, templates, tokenizing and bills are what is slow.",
        confidence=sure(now.edge_share, EDGE_SHARE.value),
        evidence=(
            at_least("cores wanted per gateway process", cores, "cores", EDGE_CORES),
            at_least("time in the gateway", now.edge_share, "share", EDGE_SHARE),
            *seen(("busy", now.busy, "share"), ("gateway processes", now.edges, "")),
        ),
        change="Serve with more gateway processes: `hitsend serve --workers N`, on cores that the engine leaves.",
        effect="Up to N times the requests per second, until cores or the engine are used up.",
        measure='hitsend_process_cpu_seconds_total{process="edge"} per gateway process under the same load.',
    )
