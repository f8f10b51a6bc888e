"""The second limit check, now in tokens, and the sampling values that will really be used.

Enters: a `Request`, the number of its prompt's tokens, the context that one sequence can have, the model's defaults.
Leaves: a `Fitted`, or ContextLengthExceeded with both counts. Always true: nothing is cut to fit; prompt plus allowed
output never exceeds the context; every sampling field has a value and a named source; the same seed and request give
the same `Fitted`. Pure: randomness comes in as a function. Next: `presets.py`.

    The rule of the exact fit: prompt + max_tokens <= context.
      prompt >= context                      refused: there is no room for one token of output
      prompt + max_tokens > context          refused when the client set max_tokens: it is never lowered in silence
      max_tokens not set                     context - prompt, at most `ceiling` and what the caller's levels can hold
"""

from collections.abc import Callable
from typing import Any

import msgspec

from hitsend.core.errors import ContextLengthExceeded, InvalidRequest
from hitsend.core.events import Fitted, LimitCheck
from hitsend.core.request import Request, SamplingAsked, SamplingParams
from hitsend.serve.chat.completion import Prompts
from hitsend.serve.chat.presets import Defaults
from hitsend.serve.chat.prompt import Prompt
from hitsend.serve.loop.messages import EngineFacts

_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
_UNPRESET = tuple(field for field in SamplingAsked.__struct_fields__ if field not in {*_FIELDS, "seed"})
"""Only clients ask for these; no model's makers recommend them."""

CONTEXT_IS = "This model's maximum context length is"
"""OpenAI's words: clients know a prompt that is too long by them, and shorten it or go to another model."""

SEED_BITS = 32


class Budget(msgspec.Struct, frozen=True):
    """The second check for one model. `ceiling`: most output where the client set no max_tokens.

    `draw` gives a seed where the client sent none. `max_prompt_logprobs`: see `_check_scores`.
    """

    defaults: Defaults
    draw: Callable[[], int]
    ceiling: int | None = None
    max_prompt_logprobs: int = 16_384

    def fit(
        self, request: Request, prompt: Prompt | Prompts, facts: EngineFacts, most_output: int | None = None
    ) -> Fitted:
        """Check the limits and resolve every value. Raises ContextLengthExceeded, InvalidRequest.

        `most_output`: tokens per choice that the caller's levels can ever hold; None: no limit.
        """
        context, num_tokens = facts.cells_per_slot, prompt.num_tokens
        param, asked = "prompt" if request.prompts else "messages", request.max_tokens
        ceilings = [most for most in (self.ceiling, most_output) if most is not None]
        ceiling = min(ceilings, default=None)
        max_tokens = allowed_output(asked, num_prompt_tokens=num_tokens, context=context, ceiling=ceiling, param=param)
        _check_tokens(request, facts.vocab_size)
        if request.min_tokens > max_tokens:
            text = f"min_tokens is {request.min_tokens}, but the answer may have {max_tokens} tokens at most"
            raise InvalidRequest(text, param="min_tokens")
        sampling, sources = resolve_sampling(request, self.defaults, self.draw)
        checks: tuple[LimitCheck, ...] = (
            LimitCheck("prompt_tokens", num_tokens, context - 1),
            LimitCheck("prompt_and_max_tokens", num_tokens + max_tokens, context),
            *(() if most_output is None else (LimitCheck("max_tokens_of_levels", max_tokens, most_output),)),
        )
        checks += self._check_scores(request, prompt)
        return Fitted(max_tokens=max_tokens, limits=checks, sampling=sampling, sources=sources)

    def _check_scores(self, request: Request, prompt: Prompt | Prompts) -> tuple[LimitCheck, ...]:
        """How many log-probabilities of prompt tokens the answer would have. Raises InvalidRequest."""
        if request.prompt_logprobs is None:
            return ()
        per_token, limit = max(1, request.prompt_logprobs), self.max_prompt_logprobs
        if isinstance(prompt, Prompts):
            num_tokens, times = sum(map(len, prompt.every)), request.n
        else:
            num_tokens, times = prompt.num_tokens, 1
        count = num_tokens * times * per_token
        if count > limit:
            raise InvalidRequest(
                f"prompt_logprobs: {num_tokens * times} prompt tokens with {per_token} each are {count}, limit {limit} "
                "(access.max_prompt_logprobs)",
                param="prompt_logprobs",
            )
        return (LimitCheck("max_prompt_logprobs", count, limit),)


def allowed_output(
    max_tokens: int | None, *, num_prompt_tokens: int, context: int, ceiling: int | None = None, param: str = "messages"
) -> int:
    """How many tokens each choice may have. Raises ContextLengthExceeded, which names `param`."""
    left = context - num_prompt_tokens
    if left < 1:
        raise ContextLengthExceeded(
            f"{CONTEXT_IS} {context} tokens, of which at least one must stay free for the answer; there are "
            f"{num_prompt_tokens} tokens of {param}. Shorten the {param}; nothing is cut off.",
            param=param,
        )
    if max_tokens is None:
        return left if ceiling is None else min(left, ceiling)
    if max_tokens > left:
        raise ContextLengthExceeded(
            f"{CONTEXT_IS} {context} tokens; there are {num_prompt_tokens} tokens of {param} and {max_tokens} are "
            f"asked for the answer, {num_prompt_tokens + max_tokens} together. "
            f"At most {left} tokens of answer fit behind the {param}.",
            param=param,
        )
    return max_tokens


def is_thinking(request: Request, defaults: Defaults) -> bool:
    """Whether the model will think: the client's `enable_thinking`, else what the template does by itself."""
    asked = request.template_kwargs.get("enable_thinking")
    return asked if isinstance(asked, bool) else defaults.thinking_by_default


def resolve_sampling(
    request: Request, defaults: Defaults, draw: Callable[[], int]
) -> tuple[SamplingParams, dict[str, str]]:
    """Every sampling value and where it came from: client, settings, model_card, gguf, generation_config, default."""
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    presets = defaults.presets(is_thinking=is_thinking(request, defaults))
    for field in _FIELDS:
        candidates = (("client", request.sampling), *presets)
        found = next(((s, v) for s, p in candidates if (v := getattr(p, field)) is not None), None)
        if found is not None:
            sources[field], values[field] = found
        else:
            sources[field] = "default"
    for field in _UNPRESET:
        asked = getattr(request.sampling, field)
        sources[field] = "default" if asked is None else "client"
        if asked is not None:
            values[field] = asked
    seed = request.sampling.seed
    sources["seed"] = "drawn" if seed is None else "client"
    sampling = SamplingParams(
        **values,
        seed=draw() % 2**SEED_BITS if seed is None else seed,
        min_tokens=request.min_tokens,
        ignore_eos=request.ignore_eos,
        stop_token_ids=request.stop_token_ids,
        logit_bias=request.logit_bias,
        logprobs=request.logprobs,
        top_logprobs=request.top_logprobs,
        prompt_logprobs=request.prompt_logprobs,
    )
    return sampling, sources


def _check_tokens(request: Request, vocab_size: int) -> None:
    named = {"logit_bias": [token for token, _ in request.logit_bias], "stop_token_ids": request.stop_token_ids}
    for field, tokens in named.items():
        for token in tokens:
            if not 0 <= token < vocab_size:
                text = f"{field}: {token} is no token id of this model (0 to {vocab_size - 1})"
                raise InvalidRequest(text, param=field)
