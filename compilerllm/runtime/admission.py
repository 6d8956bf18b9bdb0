"""What a request must satisfy to be taken at all. The same check in the face's process and in the engine's."""

from dataclasses import dataclass

from compilerllm.errors import ContextLengthExceeded, InvalidParameter, QueueFull
from compilerllm.runtime.messages import Ready, Request


@dataclass(frozen=True)
class Limits:
    """Bounds of an engine. ``max_model_len`` is what the model, the user and the KV blocks allow, in tokens."""

    max_model_len: int
    vocab_size: int
    max_open_requests: int | None  # running and waiting; None = no limit
    pools: bool = False  # whether the model gives vectors instead of tokens

    @staticmethod
    def of(ready: Ready) -> "Limits":
        return Limits(
            ready.max_model_len, ready.vocab_size, ready.max_open_requests, ready.pooling is not None
        )

    def check(self, request: Request, num_open: int) -> None:
        """Raise an ``InvalidParameter`` or ``QueueFull`` if ``request`` cannot be taken beside ``num_open`` others.

        A prompt that leaves room for one token (or ``min_tokens``) is taken, and ends with "length" at the limit;
        a face that wants ``max_tokens`` to fit entirely checks that itself.
        """
        prompt, params = request.prompt_token_ids, request.params
        if not prompt:
            raise InvalidParameter("The prompt is empty: it needs at least one token.", "prompt")
        if min(prompt) < 0 or max(prompt) >= self.vocab_size:
            bad = next(t for t in prompt if not 0 <= t < self.vocab_size)
            raise InvalidParameter(
                f"The prompt has the token id {bad}, but the model's ids run from 0 to {self.vocab_size - 1}.",
                "prompt",
            )
        if (request.pool is None) == self.pools:
            raise InvalidParameter(
                "This model gives embeddings or labels, and no text."
                if self.pools
                else "This model gives text, no embeddings."
            )
        least = 0 if self.pools else max(1, params.min_tokens)
        if len(prompt) + least > self.max_model_len:
            raise ContextLengthExceeded(len(prompt), least, self.max_model_len)
        for name, ids in (
            ("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids),
            ("allowed_token_ids", params.allowed_token_ids or ()),
        ):  # fmt: skip
            for token in ids:
                if not 0 <= token < self.vocab_size:
                    raise InvalidParameter(
                        f"{name} has the token id {token}, but the model's ids run from 0 to {self.vocab_size - 1}.",
                        name,
                    )
        if self.max_open_requests is not None and num_open >= self.max_open_requests:
            raise QueueFull(
                f"{num_open} requests are running or waiting, and no more than {self.max_open_requests} may. "
                "Try again later, or serve with a larger --max-num-waiting."
            )
