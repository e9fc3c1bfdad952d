"""A completion from its body to its end: validated, predicted, admitted, placed, carried, and written to the ledger.

Decisions come from the dispatcher as records (`controlplane.dispatch.port`), through `OpenRequests`.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import orjson
from msgspec import structs

from controlplane.dispatch.port import ERROR, Asked, Placed, ServedModel, ServedModels, WeightedTargets
from controlplane.gateway.admission.budgets import Admission, Budgets
from controlplane.gateway.admission.keys import Grant, Keys, SloTerms
from controlplane.gateway.admission.limits import Limits, LoopLoad
from controlplane.gateway.admission.marks import Marks, Sessions, marks_of
from controlplane.gateway.admission.validation import SPEECH, Call, Kind, parse, with_prompt
from controlplane.gateway.errors import JSON_TYPE, KEY_ENDED, STANDING_BY, STOPPING, ApiError, not_served, unknown_model
from controlplane.gateway.ledger.accounting import Records
from controlplane.gateway.serving.http import HttpRequest, Responder
from controlplane.gateway.serving.open_requests import Interrupt, OpenRequests, Ticket, TicketState
from controlplane.gateway.serving.prefixes import LeadingBlocks, leading_hashes
from controlplane.gateway.upstream import answers
from controlplane.gateway.upstream.client import Upstream, payload, upstream_priority
from controlplane.gateway.upstream.continuation import Kept, evictable
from controlplane.lengths.length_service import LengthService
from forecasting.lengths import LengthQuery
from scheduling.model_task import Task
from scheduling.queueing.ordering import ORDERINGS
from scheduling.routing.models import ModelRule, target_of
from workers.vllm.tasks import MAY_ANSWER, PATHS

NO_BLOCKS = LeadingBlocks([], 0)


class Catalog:
    def __init__(self) -> None:
        self._models: dict[str, ServedModel] = {}
        self._shared: dict[str, WeightedTargets] = {}

    def update(self, record: ServedModels) -> None:
        self._models = {model.name: model for model in record.models}
        self._shared = {}
        for each in record.targets:
            known = {name: weight for name, weight in each.weights.items() if weight > 0 and self._is_served(name)}
            if known:
                self._shared[each.name] = WeightedTargets(each.name, each.created_at, known)

    def _is_served(self, name: str) -> bool:
        model = self._models.get(name)
        return model is not None and model.has_endpoint and not model.tenant_id

    def shared(self, name: str) -> dict[str, float]:
        """Return the weights of the targets that share the requests for *name*; empty for a model."""
        return self._shared[name].weights if name in self._shared else {}

    def fallback(self, model: ServedModel, kind: Kind, prompt_tokens: int) -> str:
        """Return the fallback of *model* for a request of *kind*; "" if it has none that could serve it."""
        other = self._models.get(model.fallback)
        if other is None or kind.path not in PATHS[Task(other.task)] or prompt_tokens >= other.context_tokens:
            return ""
        return other.name

    def serving(self, name: str, kind: Kind, tenant_id: int) -> ServedModel:
        """Return the model called *name*. Raises ApiError 404 if it is unknown or of another tenant, or serves no *kind*."""
        model = self._models.get(name)
        if model is None or model.tenant_id not in (0, tenant_id):
            raise unknown_model(name)
        task = Task(model.task)
        served = PATHS[task]
        if kind.path not in served and kind.path not in MAY_ANSWER.get(task, ()):
            raise not_served(name, kind.path, served)
        return model

    def page(self, name: str, grant: Grant) -> bytes:
        """Return the answer of `/v1/models/NAME`, or of `/v1/models` without a *name*: what *grant* may ask for.

        Raises ApiError 404.
        """
        shared = {each.name: self._as_model(each) for each in self._shared.values()}
        every = sorted((self._models | shared).items())
        models = {key: model for key, model in every if model.has_endpoint and grant.sees(key, model.tenant_id)}
        if not name:
            return orjson.dumps({"object": "list", "data": [_card(model) for model in models.values()]})
        if name not in models:
            raise unknown_model(name)
        return orjson.dumps(_card(models[name]))

    def _as_model(self, shared: WeightedTargets) -> ServedModel:
        """Return a public name as a model: with the context that all of its targets have."""
        models = [self._models[name] for name in shared.weights]
        context_tokens = min(model.context_tokens for model in models)
        return ServedModel(shared.name, context_tokens, shared.created_at, True, False, models[0].task)


def _card(model: ServedModel) -> dict[str, object]:
    """Return the description of a model in the form of OpenAI and vLLM."""
    return {
        "id": model.name,
        "object": "model",
        "created": model.created_at,
        "owned_by": "pilothouse",
        "root": model.base or model.name,
        "parent": model.base or None,
        "max_model_len": model.context_tokens,
        "permission": [_PERMISSION | {"id": f"modelperm-{model.name}", "created": model.created_at}],
        "task": model.task,
    }


_PERMISSION: dict[str, object] = {
    "id": "",
    "object": "model_permission",
    "created": 0,
    "allow_create_engine": False,
    "allow_sampling": True,
    "allow_logprobs": True,
    "allow_search_indices": False,
    "allow_view": True,
    "allow_fine_tuning": False,
    "organization": "*",
    "group": None,
    "is_blocking": False,
}
"""As vLLM says it of every model."""


ENDS: dict[Interrupt | None, ApiError] = {Interrupt.KEY_ENDED: KEY_ENDED, Interrupt.STANDING_BY: STANDING_BY}
"""Answers to requests that were interrupted."""
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
class Completions:
    keys: Keys
    limits: Limits
    budgets: Budgets
    catalog: Catalog
    lengths: LengthService
    requests: OpenRequests
    upstream: Upstream
    records: Records
    clock: Callable[[], float]
    max_depth: int  # of a body's JSON
    most_body_bytes: int  # without media
    load: LoopLoad = field(default_factory=LoopLoad)
    sessions: Sessions = field(default_factory=Sessions)

    async def complete(
        self, grant: Grant, raw: bytes, request: HttpRequest, responder: Responder, kind: Kind, age_s: float = 0.0
    ) -> None:
        """Answer the body *raw*. Raises the ApiError that is the tenant's answer. *age_s*: since its work was accepted."""
        content_type = request.headers.get(b"content-type", b"") if kind in SPEECH else JSON_TYPE[1]
        call = parse(raw, kind, max_depth=self.max_depth, most_bytes=self.most_body_bytes, content_type=content_type)
        grant.check_model(call.model)
        caller = grant.tenant_id, grant.key_id
        arrived_at = time.time()
        marks = self.sessions.complete(marks_of(request, call.body), call, caller)
        asked_model, rule = call.model, ""
        if weights := self.catalog.shared(asked_model):
            rule = ModelRule.WEIGHTS.value
            # A first request of a conversation is not known to be of a run, and stays where the later ones will be.
            call.rename(target_of(weights, f"{asked_model}\0{grant.key_id}\0{marks.run or call.beginning}"))
        model = self.catalog.serving(call.model, kind, grant.tenant_id)
        terms = grant.choose(request.name(b"x-slo-class"), call.body.get("service_tier"), self.keys.words.classes)
        region = self.keys.words.region(request.name(b"x-region"))
        ticket = await self._ticket(grant, terms, call, region, request, age_s, model, marks, arrived_at)
        if rule:
            ticket.asked_model, ticket.model_rule = asked_model, rule
            ticket.asked = structs.replace(ticket.asked, asked_model=asked_model, model_rule=rule)
            ticket.note_model(f"{asked_model} has weighted targets; this conversation is served by {call.model}.")
        predicted_tokens = ticket.expected_tokens
        entered = ticket.asked.model
        self.records.arrived(entered)
        try:
            admission = self._admit(ticket, predicted_tokens)
        except ApiError as error:
            ticket.fail(error)
            ticket.move(TicketState.REJECTED)
            self.records.close(ticket, error.status)
            raise
        used = 0
        try:
            try:
                responder.more_headers, responder.stream = ticket.wait_headers, call.stream
                if call.stream and kind is Kind.RESPONSE:
                    responder.sequence_number = 0
                unwatch = request.on_disconnect(partial(ticket.interrupt, Interrupt.DISCONNECT))
                try:
                    await self._serve(ticket, responder)
                finally:
                    unwatch()
            finally:
                try:
                    self.requests.leave(ticket)
                finally:
                    used = self.records.close(ticket, responder.status)
        finally:  # whatever is raised, the tenant's slot is released
            if ticket.asked.model != entered:
                admission = self.budgets.move(
                    admission, grant.tenant_id, grant.key_id, ticket.asked.model, predicted_tokens, rates=grant.rates
                )
            admission.settle(used)
            self.limits.leave(
                grant.tenant_id,
                tokens_per_minute=grant.tokens_per_minute,
                predicted=predicted_tokens,
                used=used,
                sequences=call.sequences,
            )

    def _admit(self, ticket: Ticket, predicted_tokens: int) -> Admission:
        """Count *ticket* towards its budgets and its tenant's limits. Raises ApiError 429; then nothing is counted."""
        grant = ticket.grant
        admission = self.budgets.enter(
            grant.tenant_id, grant.key_id, ticket.asked.model, predicted_tokens, rates=grant.rates
        )
        try:
            self.limits.enter(
                grant.tenant_id,
                ticket.asked.arrived_s,
                max_concurrent=grant.max_concurrent_requests,
                tokens_per_minute=grant.tokens_per_minute,
                tokens=predicted_tokens,
                sequences=ticket.call.sequences,
            )
        except ApiError:
            admission.cancel()
            raise
        ticket.budget_warnings = tuple(admission.warnings)
        return admission

    async def _ticket(
        self,
        grant: Grant,
        terms: SloTerms,
        call: Call,
        region: str,
        request: HttpRequest,
        age_s: float,
        served: ServedModel,
        marks: Marks,
        arrived_at: float,
    ) -> Ticket:
        base = served.base or served.name  # an adapter is predicted, counted and queued as its model
        prompt_tokens = call.prompt_tokens if call.kind.computes else 1
        if prompt_tokens is None:
            prompt_tokens = self.lengths.prior.prompt_tokens(base, call.prompt_characters)
        query = LengthQuery(
            text="",
            prompt_tokens=prompt_tokens,
            model=base,
            tenant=grant.tenant,
            slo_class=terms.name,
            max_tokens=call.max_tokens,
            min_tokens=call.min_tokens,
            ignore_eos=call.ignore_eos,
            sequences=call.sequences,
        )
        caller = grant.tenant_id, grant.key_id
        run_due_s = (marks.due_s or terms.end_s) if marks.application and marks.run else None
        arrived_s = self.clock()
        trace_context, span = request.trace_context(), None
        if self.records.tracing is not None:
            span, trace_context = self.records.tracing.begin(trace_context, arrived_at)
        length, token_blocks = None, b""
        if call.kind.generates:
            predicted = self.lengths.predict(query, partial(with_prompt, call), call.prompt_characters)
            if served.tokenizer is None:
                length = await predicted
            else:
                length, token_blocks = await asyncio.gather(predicted, self.upstream.tokens.of(call, served))
        queued_s = self.clock()
        # A sequence without output ends with its prefill, as one that has a single token of output does.
        predicted_tokens = length.tokens if length is not None else call.sequences
        session = marks.run if marks.session else ""
        blocks = leading_hashes(call, prompt_tokens, session) if served.by_prefix else NO_BLOCKS
        if blocks.system_blocks:
            self.upstream.prefixes.note(blocks.hashes[blocks.system_blocks - 1], call)
        fallback = "" if served.base else self.catalog.fallback(served, call.kind, prompt_tokens)
        if fallback and (not grant.may_ask(fallback) or self.budgets.spent(*caller, fallback)):
            fallback = ""
        asked = Asked(
            number=self.requests.next_number(),
            request_id=request.request_id,
            model=base,
            region=region,
            tenant_id=grant.tenant_id,
            priority=terms.priority,
            due_s=terms.due_s,
            end_s=terms.end_s,
            deadline_s=terms.deadline_s,
            max_wait_s=request.seconds(b"x-max-wait"),
            slo_class=terms.name,
            interactive=terms.interactive,
            if_unreachable=terms.if_unreachable,
            fallbacks=grant.fallbacks(terms),
            opportunistic=terms.opportunistic,
            ends_on_reclaim=terms.ends_on_reclaim,
            age_s=age_s,
            evictable=evictable(call),
            arrived_at=arrived_at,
            arrived_s=arrived_s,
            prompt_tokens=prompt_tokens,
            predicted_tokens=predicted_tokens,
            max_tokens=call.max_tokens,
            sequences=call.sequences,
            streamed=call.stream,
            prefix_hashes=tuple(blocks.hashes),
            fingerprint=_fingerprint(call.raw),
            block_tokens=blocks.block_tokens,
            token_blocks=token_blocks,
            token_block_size=served.tokenizer.block_size if served.tokenizer is not None else 0,
            system_blocks=blocks.system_blocks,
            tenant=grant.tenant,
            application=marks.application,
            run=marks.run,
            unit=marks.unit,
            adapter=served.name if served.base else "",
            run_due_s=marks.due_s,
            fallback=fallback,
            fallback_wait_s=served.fallback_wait_s,
        )
        return Ticket(
            asked=asked,
            grant=grant,
            terms=terms,
            call=call,
            query=query,
            length=length,
            application=asked.application,
            run=asked.run,
            unit=asked.unit,
            run_due_s=run_due_s,
            session=session,
            trace_context=trace_context,
            span=span,
            queued_s=queued_s,
            task=asyncio.current_task(),
        )

    async def _serve(self, ticket: Ticket, responder: Responder) -> None:
        """Queue, place and carry *ticket*, on another instance when one is lost, and complete it."""
        asked = ticket.call.priority
        came = failure = ""
        try:
            self.requests.submit(ticket)
            while True:
                placed = await self._placement(ticket, responder)
                ordering = ORDERINGS[placed.ordering]
                priority = upstream_priority(ordering, placed.priority, asked, placed.queue_key_s)
                if placed.keep_tokens and ticket.asked.evictable and ticket.kept is None:
                    ticket.kept = Kept()
                kept = ticket.kept
                if kept is not None and kept.opened:
                    body = kept.payload(ticket.call, priority)
                else:
                    streamed, ids = ticket.asked.streamed, kept is not None
                    body = payload(ticket.call, ticket.call.raw, priority, streamed=streamed, token_ids=ids)
                try:
                    usage = await self.upstream.carry(ticket, placed, body, responder)
                    break
                except answers.Evicted:
                    self.requests.place_again(ticket, evicted=True)
                except answers.InstanceLost as lost:
                    came, failure = lost.came, lost.failure
                    wait_s = 1.0
                    if isinstance(lost, answers.InstanceBusy):
                        ticket.busy, wait_s = lost.error, lost.wait_s
                    self.requests.place_again(ticket, reason=str(lost), failure=lost.failure, wait_s=wait_s)
            self._settle_usage(ticket, usage)
            ticket.move(TicketState.DONE)
        except answers.RefusedByInstance as refused:
            ticket.fail(refused)
            ticket.move(TicketState.FAILED)
        except ApiError as error:
            if came and error.code == "upstream_failed":
                error.message += f" The last one answered with {came}."
            error.by_instance = failure == ERROR
            if isinstance(error, answers.Interrupted):
                self.requests.leave(ticket, error.failure, error.reason)
            ticket.fail(error)
            never_begun = ticket.state <= TicketState.WAITING and not ticket.first_token_s
            ticket.move(TicketState.REJECTED if never_begun else TicketState.FAILED)
            raise
        except asyncio.CancelledError:
            # Not raised again: the request ends here, and the server would log each one as a failure of the application.
            if ticket.task is not None:
                ticket.task.uncancel()
            if ticket.interrupted is Interrupt.DISCONNECT:
                ticket.error_code = "client_disconnected"
                ticket.move(TicketState.CANCELLED)
            else:  # without a reason the server is stopping and has waited long enough
                why = ENDS.get(ticket.interrupted, STOPPING)
                ticket.fail(why)
                ticket.move(TicketState.FAILED)
                with contextlib.suppress(Exception):
                    await responder.error(why)
        except Exception:
            ticket.error_code, ticket.status = "internal_error", 500
            ticket.move(TicketState.FAILED)
            raise

    async def _placement(self, ticket: Ticket, responder: Responder) -> Placed:
        """Wait for an instance."""
        placement = ticket.placement
        assert placement is not None
        while ticket.call.stream and not placement.done():
            await asyncio.wait({placement}, timeout=responder.ping_in_s)
            await responder.ping_if_silent()
        return await placement

    def _settle_usage(self, ticket: Ticket, usage: answers.Usage) -> None:
        if usage.output_tokens is not None:
            ticket.output_tokens = usage.output_tokens
        self.requests.finished(ticket)
        ticket.cached_tokens = usage.cached_tokens
