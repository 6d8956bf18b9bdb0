"""The request that is being answered: its id, and what logs and traces tell of it."""

import logging
import re
import time
import uuid
from collections import Counter
from contextvars import ContextVar
from dataclasses import dataclass, field

from compilerllm.sampling_params import SamplingParams

_VALID_ID = re.compile(rb"[\x21-\x7e]{1,128}")


@dataclass
class RequestRecord:
    """Filled in on the way through the server; times are ``time.monotonic``'s, 0 where it did not come so far."""

    request_id: str
    method: str
    path: str
    client: str
    arrived: float = field(default_factory=time.monotonic)
    key: str | None = None  # the fingerprint of the API key it came with
    status: int = 0
    first_byte: float = 0.0
    ended: float = 0.0
    # Of what it generated, if it did.
    params: SamplingParams | None = None
    num_sequences: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    first_token: float = 0.0
    last_token: float = 0.0
    queue_seconds: float = 0.0  # of the first sequence that was scheduled, as the next
    prefill_seconds: float = 0.0
    finish_reasons: Counter[str] = field(default_factory=Counter)


_current: ContextVar[RequestRecord | None] = ContextVar("compilerllm_request", default=None)


def begin_record(record: RequestRecord) -> None:
    """Make ``record`` that of the present task and of those it starts."""
    _current.set(record)


def current_record() -> RequestRecord | None:
    return _current.get()


def choose_request_id(sent: bytes | None) -> str:
    """The id that the client sent, if it is fit for logs and headers (visible ASCII, at most 128); else a new one."""
    if sent is not None and _VALID_ID.fullmatch(sent):
        return sent.decode("ascii")
    return uuid.uuid4().hex


class RequestIdFilter(logging.Filter):
    """Puts the id of the request that a line is about behind it."""

    def filter(self, record: logging.LogRecord) -> bool:
        request = current_record()
        if request is not None and not getattr(record, "has_request_id", False):
            record.msg = f"{record.getMessage()} [{request.request_id}]"
            record.args = None
            record.has_request_id = True
        return True
