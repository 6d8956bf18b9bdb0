"""What crosses between a face (server, ``LLM``) and the engine: requests in, deltas and facts out.

One schema for the in-process engine and for the one behind ZMQ (msgspec, MessagePack). Text never crosses: a face
tokenizes before and detokenizes after, except that stop strings are the face's business too (it aborts).
"""

from typing import Literal

import msgspec

from compilerllm.sampling_params import SamplingParams


class ThinkingMarks(msgspec.Struct, frozen=True, array_like=True):
    """Token ids between which the model thinks. ``begun``: the prompt ends within a thought."""

    start: tuple[int, ...]
    end: tuple[int, ...]
    begun: bool = False


class Pool(msgspec.Struct, frozen=True):
    """What is wanted of a model that pools, for one prompt. ``second``: where the second text of a pair begins.

    each_token: a vector for every token instead of one. activate: normalise a vector, or make scores of labels; None: as
    the model's files say. dimensions: the first so many of a vector, normalised again.
    """

    second: int | None = None
    each_token: bool = False
    activate: bool | None = None
    dimensions: int | None = None


class Request(msgspec.Struct, frozen=True, kw_only=True, tag="request"):
    """One prompt to generate from, or to pool. ``params.n`` > 1 is split by the face into n requests with derived seeds."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival_time: float  # seconds, time.monotonic() of the sender's clock on this machine
    eos_token_ids: tuple[int, ...] = ()  # of the tokenizer and generation config; ignore_eos: no ends
    cache_salt: str | None = None  # prefix blocks are shared only between equal salts
    adapter_id: int = 0  # slot of a low-rank adapter; 0 is the base model
    priority: int = 0  # lower ones run first, where the policy is "priority"
    bad_words: list[list[int]] = []  # ``params.bad_words`` as the tokenizer writes them, each in all its ways
    thinking: ThinkingMarks | None = None  # for ``params.thinking_token_budget``
    pool: Pool | None = None  # nothing is generated: the answer is a vector


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Stop a request and free its blocks; unknown ids are ignored (it may have finished meanwhile)."""

    request_ids: list[str]


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural-log probabilities at one position: the chosen token's, then the most likely ones in order."""

    chosen: float
    rank: int  # 1-based rank of the chosen token
    top_ids: list[int]
    top: list[float]


class Delta(msgspec.Struct, frozen=True, kw_only=True, tag="delta"):
    """What a step added to one request. ``finish_reason`` is None while it runs.

    finish_reason: "stop" (eos, or stop token in ``stop_reason``), "length", "repetition", "abort", "error" (message in
    ``error``; ``refused`` if the request itself was wrong, and names the parameter at fault).
    """

    request_id: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | None = None
    error: str | None = None
    refused: str | None = None
    # Of the prompt's tokens from the second on, where they were asked for; with the first delta that has a token.
    prompt_logprobs: list[TokenLogprobs] | None = None
    num_cached_tokens: int = 0  # prompt tokens found in shared blocks; set on the first delta
    num_preemptions: int = 0
    queue_seconds: float = 0.0  # arrival to first scheduling; set on the first delta
    prefill_seconds: float = 0.0  # first scheduling to first token; set on the first delta
    embedding: bytes | None = None  # of a request that pools: float32 in this machine's order, row after row


class Stats(msgspec.Struct, frozen=True, kw_only=True, tag="stats"):
    """A snapshot of the engine for metrics, sent with deltas and at most every 100 ms when idle."""

    num_running: int = 0
    num_waiting: int = 0
    blocks_total: int = 0
    blocks_used: int = 0
    prefix_queries: int = 0  # prompt tokens looked up since start
    prefix_hits: int = 0  # of them, found
    num_preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    steps: int = 0
    compile_events: dict[str, int] = {}  # by kind, in the engine's process; a warm one has none


class PoolingFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Of a model that gives no tokens. ``width``: of a row: the embedding's size, or the number of labels.

    pooling: which rows of a sequence count. activation: what makes scores of a classifier's row.
    """

    task: Literal["embed", "classify"]
    pooling: Literal["cls", "last", "mean"]
    normalize: bool
    activation: Literal["identity", "sigmoid", "softmax"]
    labels: tuple[str, ...]
    width: int
    vocab_size: int
    token_types: bool


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a loader tells of the model it loaded, for ``Ready`` and the startup card."""

    model: str
    target: str
    card: dict[str, str] = {}  # label -> text, in print order; the engine adds the lines about KV blocks
    tokenizer: str = ""  # folder of the tokenizer, for grammars; "" where there is none
    pooling: PoolingFacts | None = None


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The engine is up. What the startup card and the faces need to know of the model."""

    model: str
    target: str
    max_model_len: int  # tokens; what the model, the configuration and the KV blocks allow
    vocab_size: int
    blocks_total: int
    block_size: int
    max_open_requests: int | None = None  # running and waiting ones it takes; None = no limit
    policy: str = "fcfs"  # in which order requests run
    pid: int = 0  # the engine's process
    compile_events: dict[str, int] = {}  # by kind, in that process so far
    pooling: PoolingFacts | None = None  # of a model that gives no tokens
    card: dict[str, str]  # label -> text, in print order: model, target, buckets, KV blocks, memory, compile


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The engine could not start; ``message`` is meant for the user."""

    message: str


class Batch(msgspec.Struct, frozen=True, kw_only=True, tag="batch"):
    """All deltas of one step, and the stats after it."""

    deltas: list[Delta]
    stats: Stats


Inbound = Request | Abort
Outbound = Batch | Stats | Ready | Failed
