"""Per-tenant limits: concurrent sequences, tokens a minute. Kept in memory; a restart forgets them."""

from dataclasses import dataclass


class Exceeded(Exception):
    """A request exceeds a limit or a budget: what its caller is answered, with HTTP 429."""

    def __init__(
        self,
        message: str,
        *,
        code: str,
        retry_after_s: float | None = None,  # None: a retry makes no sense
        type: str = "",  # the value in OpenAI's error body; "": by the status
        headers: tuple[tuple[bytes, bytes], ...] = (),
    ) -> None:
        super().__init__(message)
        self.message, self.code, self.type = message, code, type
        self.retry_after_s, self.headers = retry_after_s, headers


@dataclass(slots=True)
class TenantUse:
    """Current use of a tenant. The bucket holds one minute's tokens and refills evenly."""

    sequences: int = 0
    tokens: float = 0.0
    refilled_s: float = -1.0


class Limits:
    def __init__(self) -> None:
        self._use: dict[int, TenantUse] = {}

    def enter(
        self,
        tenant_id: int,
        now_s: float,
        *,
        max_concurrent: int,
        tokens_per_minute: int,
        tokens: int,
        sequences: int = 1,
        held: bool = False,
    ) -> None:
        """Admit one request of *sequences* (prompts times `n`) and *tokens* (prompt and predicted output).

        A request of more sequences than the whole limit is admitted alone; one larger than a whole minute's tokens on a
        full bucket, which it leaves in debt; one that is *held* in any case. Raises Exceeded; then nothing is counted.
        """
        use = self._use.get(tenant_id)
        if use is None:
            use = self._use[tenant_id] = TenantUse()
        if not held and use.sequences and use.sequences + sequences > max_concurrent:
            raise Exceeded(
                f"This tenant has {use.sequences} sequences (prompts times n) queued or running; with the {sequences} of"
                f" this request they exceed its limit of {max_concurrent}.",
                code="concurrency_limit_exceeded",
                retry_after_s=1.0,
            )
        if tokens_per_minute:
            self._refill(use, now_s, tokens_per_minute)
            needed = min(tokens, tokens_per_minute)
            if not held and use.tokens < needed:
                wait_s = (needed - use.tokens) * 60.0 / tokens_per_minute
                raise Exceeded(
                    f"This tenant's limit of {tokens_per_minute} tokens a minute is reached; "
                    f"this request needs about {tokens}. Try again in {wait_s:.1f} s.",
                    code="rate_limit_exceeded",
                    retry_after_s=wait_s,
                )
            use.tokens -= tokens
        use.sequences += sequences

    def leave(self, tenant_id: int, *, tokens_per_minute: int, predicted: int, used: int, sequences: int = 1) -> None:
        """Release the request and correct the predicted tokens to the used ones."""
        use = self._use[tenant_id]
        use.sequences -= sequences
        if tokens_per_minute and use.refilled_s >= 0:
            use.tokens = min(use.tokens + predicted - used, float(tokens_per_minute))

    def sequences(self, tenant_id: int) -> int:
        use = self._use.get(tenant_id)
        return use.sequences if use else 0

    @staticmethod
    def _refill(use: TenantUse, now_s: float, tokens_per_minute: int) -> None:
        if use.refilled_s < 0:
            use.tokens = float(tokens_per_minute)
        else:
            use.tokens = min(float(tokens_per_minute), use.tokens + (now_s - use.refilled_s) * tokens_per_minute / 60.0)
        use.refilled_s = now_s
