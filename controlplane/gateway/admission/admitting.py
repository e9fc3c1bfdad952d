"""Admission: what a call asks of the dispatcher."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from msgspec import structs

from controlplane.dispatch.port import Asked, ServedModel
from controlplane.gateway.admission.entries import Entries
from controlplane.gateway.admission.keys import Grant, Words
from controlplane.gateway.admission.marks import Sessions, marks_of
from controlplane.gateway.admission.validation import Call, with_prompt
from controlplane.gateway.progress import Progress
from controlplane.gateway.serving.catalog import Catalog
from controlplane.gateway.serving.http import HttpRequest
from controlplane.gateway.serving.prefixes import leading_hashes
from controlplane.gateway.upstream.continuation import evictable
from controlplane.gateway.upstream.prewarming import Prefixes
from controlplane.gateway.upstream.tokenizing import TokenBlocks
from controlplane.lengths.length_service import LengthService
from scheduling.routing.models import ModelRule, target_of

ENDS_BYTES = 2_048
BETWEEN_BYTES = 4_096


def _fingerprint(raw: bytes) -> int:
    """Return a number that the same body has again: a hash of its length, its ends, and bytes evenly spread over it.

    Of a long body it takes a tenth of a checksum's time. A body that differs in a word in the middle may have the same one:
    if the first ended engines, so may the other.
    """
    between = raw[:: 1 + len(raw) // BETWEEN_BYTES] if len(raw) > 2 * ENDS_BYTES else b""
    return hash((len(raw), raw[:ENDS_BYTES], raw[-ENDS_BYTES:], between))


@dataclass(eq=False)
class Admitter:
    """Makes requests of calls. *words* are the names that they may use, *next_number* numbers them."""

    words: Callable[[], Words]
    entries: Entries
    catalog: Catalog
    lengths: LengthService
    tokens: TokenBlocks
    prefixes: Prefixes
    next_number: Callable[[], int]
    zones: Callable[[str, str | None, tuple[str, ...]], tuple[str, ...]]
    clock: Callable[[], float]
    sessions: Sessions = field(default_factory=Sessions)

    async def admit(self, grant: Grant, call: Call, http: HttpRequest, age_s: float = 0.0) -> Progress:
        """Return *call* as a request of *grant*: of a class, to a model, of a predicted length. Raises ApiError.

        *age_s*: since its work was accepted.
        """
        grant.check_model(call.model)
        arrived_at, arrived_s, words = time.time(), self.clock(), self.words()
        marks = self.sessions.complete(marks_of(http, call.body), call, (grant.tenant_id, grant.key_id))
        name, rule = call.model, ""
        if weights := self.catalog.shared(name):
            rule = ModelRule.WEIGHTS.value
            # A first request of a conversation is not known to be of a run, and stays where the later ones will be.
            call.ask_for(target_of(weights, f"{name}\0{grant.key_id}\0{marks.run or call.beginning}"))
        model = self.catalog.serving(call.model, call.kind, grant.tenant_id)
        terms = grant.choose(http.name(b"x-slo-class"), call.body.get("service_tier"), words.classes)
        region = words.region(http.name(b"x-region"))
        base = model.base or model.name  # an adapter is predicted, counted and queued as its model
        prompt_tokens = call.prompt_tokens if call.kind.computes else 1
        if prompt_tokens is None:
            prompt_tokens = self.lengths.prior.prompt_tokens(base, call.prompt_characters)
        session = marks.run if marks.session else ""
        blocks = leading_hashes(call, prompt_tokens, session)
        if blocks.system_blocks and model.by_prefix:
            self.prefixes.note(blocks.hashes[blocks.system_blocks - 1], call)
        asked = Asked(
            number=self.next_number(),
            request_id=http.request_id,
            model=base,
            region=region,
            tenant_id=grant.tenant_id,
            **terms.asked(),
            max_wait_s=http.number(b"x-max-wait"),
            fallbacks=grant.fallbacks(terms),
            age_s=age_s,
            evictable=evictable(call),
            arrived_at=arrived_at,
            arrived_s=arrived_s,
            prompt_tokens=prompt_tokens,
            # A sequence without output ends with its prefill, as one that has a single token of output does.
            predicted_tokens=call.sequences,
            max_tokens=call.max_tokens,
            sequences=call.sequences,
            streamed=call.stream,
            prefix_hashes=tuple(blocks.hashes),
            fingerprint=_fingerprint(call.raw),
            block_tokens=blocks.block_tokens,
            token_block_size=model.tokenizer.block_size if model.tokenizer is not None else 0,
            system_blocks=blocks.system_blocks,
            tenant=grant.tenant,
            application=marks.application,
            run=marks.run,
            unit=marks.unit,
            adapter=model.name if model.base else "",
            run_due_s=(marks.due_s or terms.end_s) if marks.application and marks.run else None,
            fallback=self._fallback(grant, call, model, prompt_tokens),
            fallback_wait_s=model.fallback_wait_s,
            asked_model=name if rule else "",
            model_rule=rule,
            api_key_id=grant.key_id,
            surface=call.kind.value,
            regions=grant.regions,
            zones=self.zones(base, words.regions.get(region), grant.regions),
        )
        progress = Progress(
            asked=asked,
            grant=grant,
            terms=terms,
            call=call,
            run_limits=(marks.max_tokens, marks.max_usd),
            trace_context=http.trace_context(),
            task=asyncio.current_task(),
        )
        if grant.regions:
            progress.steps.append({"within": ", ".join(grant.regions)})
        if rule:
            progress.note_model(f"{name} has weighted targets; this conversation is served by {call.model}.")
        if call.kind.generates:
            await self._predict(progress, model)
        progress.queued_s, progress.predicted_tokens = self.clock(), progress.asked.predicted_tokens
        return progress

    def _fallback(self, grant: Grant, call: Call, model: ServedModel, prompt_tokens: int) -> str:
        """Return the model that may serve *call* where *model* does not; "" for none."""
        fallback = "" if model.base else self.catalog.fallback(model, call.kind, prompt_tokens)
        if fallback and (not grant.may_ask(fallback) or self.entries.spent(grant.tenant_id, grant.key_id, fallback)):
            return ""
        return fallback

    async def _predict(self, progress: Progress, model: ServedModel) -> None:
        """Predict the length of the answer, and meanwhile have the prompt tokenized where its blocks are wanted."""
        asked, call, token_blocks = progress.asked, progress.call, b""
        predicted = self.lengths.predict(call.query(asked), partial(with_prompt, call), call.prompt_characters)
        if model.tokenizer is None:
            length = await predicted
        else:
            length, token_blocks = await asyncio.gather(predicted, self.tokens.of(call, model))
        progress.length = length
        progress.asked = structs.replace(asked, predicted_tokens=length.tokens, token_blocks=token_blocks)
