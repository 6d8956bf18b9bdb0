"""What a step takes in: one schema for every program, and the only part of ``ir`` that serving imports.

T tokens of a step, S sequences, R rows to sample and the longest query are independent of each other: speculation
verifies several tokens a sequence, prompt logprobs sample every row, a prefill chunk samples none.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeGuard

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Int32 = npt.NDArray[np.int32]
    Float32 = npt.NDArray[np.float32]
else:
    Int32 = Float32 = Any


@dataclass(frozen=True)
class Bucket:
    """Upper bounds of a step: tokens, sequences, rows to sample, longest query. One program each."""

    tokens: int
    sequences: int
    rows: int
    max_query: int

    def holds(self, step: "StepInputs") -> bool:
        """Whether the step is within all bounds."""
        return self.fits(len(step.token_ids), len(step.seq_lens), len(step.sample_rows), step.max_query)

    def fits(self, tokens: int, sequences: int, rows: int, max_query: int) -> bool:
        """Whether a step of these sizes is within all bounds."""
        return (
            tokens <= self.tokens
            and sequences <= self.sequences
            and rows <= self.rows
            and max_query <= self.max_query
        )


@dataclass(frozen=True, eq=False)
class StepInputs:
    """One step's metadata, int32 and C-contiguous.

    Tokens of one sequence are adjacent: sequence s owns tokens [query_start[s], query_start[s+1]), its context after
    the step is [0, seq_lens[s]), and its last token stands at position seq_lens[s] - 1.
    ``token_ids[t]`` < 0 means: the token that the sampling program last wrote for slot ``-1 - token_ids[t]``, which
    stays on the device (the host may not know it yet).
    """

    token_ids: Int32  # [T]
    positions: Int32  # [T]
    query_start: Int32  # [S+1]
    seq_lens: Int32  # [S]
    # [G, S, blocks]: for each paged state group, block ids in context order; -1 = freed. Nobody writes into it, and it
    # is the very array of the step before where nothing has changed, so that a device need not be sent it again.
    block_tables: Int32
    slots: Int32  # [S]: the sequence's row in device tables and slot states
    sample_rows: Int32  # [R]: indices into T whose logits are wanted
    adapter_id: Int32  # [T]: 0 is the base model
    token_types: "Int32 | None" = (
        None  # [T]: which text of a pair; only encoders that tell them apart ask for it
    )

    @property
    def max_query(self) -> int:
        """Tokens of the sequence with the most of them in this step."""
        return int((self.query_start[1:] - self.query_start[:-1]).max()) if len(self.seq_lens) else 0


@dataclass(frozen=True)
class StateGroup:
    """States that share one addressing and so one block table. The pool knows nothing else of a model.

    paged: ``block_size`` tokens a block, any block may be shared. A ``window`` lets blocks that lie wholly before it
    be freed. slot: ``bytes_per_block`` a sequence, addressed by slot, never shared.
    """

    name: str
    addressing: Literal["paged", "slot"]
    block_size: int  # tokens; 0 for slot states
    bytes_per_block: int  # bytes over all layers of the group
    window: int | None = None  # tokens; None = the whole context
    rollback: Literal["truncate", "none"] = "truncate"


@dataclass(eq=False)
class SamplingTables:
    """Per-request sampling parameters by slot, kept where the sampling program runs. [N] = slots unless said.

    An executable whose device has memory of its own uploads the rows that ``changed`` names, and empties it; other rows
    of ``draws``, ``last_token`` and ``output_counts`` are newer there than here.
    """

    temperature: Float32
    top_k: Int32  # 0 = off
    top_p: Float32
    min_p: Float32
    repetition_penalty: Float32
    presence_penalty: Float32
    frequency_penalty: Float32
    seed: Any  # uint64 [N]
    draws: Any  # int64 [N]: random numbers drawn so far = output tokens; Philox counter
    last_token: Int32  # the token last sampled for the slot
    prompt_counts: (
        Any  # uint16 [N, V] or None until a request needs penalties (repetition counts the prompt too)
    )
    output_counts: Any  # uint16 [N, V] or None
    changed: set[int] = field(default_factory=set)  # slots whose row the host has filled (not ``last_token``)


@dataclass(frozen=True, eq=False)
class SampleRows:
    """Which rows of the last forward's logits are sampled, and what is particular to them.

    A row with a target is scored only, so its slot is always -1: nobody goes on from it.
    """

    slots: Int32  # [R]: slot of each sampled row, in sample_rows order; -1 = score only
    bias_start: Int32  # [R+1]: row r's entries in bias_token and bias_value
    bias_token: Int32  # [B]
    bias_value: Float32  # [B]: added to the logit; -inf bans the token
    num_logprobs: int  # 0 = none; n = the chosen token's and the n most likely ones (at least 1 computed)
    penalties: bool  # any row needs the counts
    random: bool  # any row has temperature > 0
    # uint32 [R, ceil(V / 32)]: bit t % 32 of word t // 32 says that token t may be chosen; None = every token of every row
    mask: Any = None
    # [R]: a token to report on in place of choosing one, -1 = choose; None = choose in all rows
    target: "Int32 | None" = None

    def __post_init__(self) -> None:
        scored = None if self.target is None else self.slots[self.target >= 0]
        assert scored is None or bool((scored == -1).all()), "a row with a target has another slot than -1"


@dataclass(frozen=True, eq=False)
class Sampled:
    """The result, row for row. Log-probabilities are natural, of the raw logits, before temperature and penalties."""

    token_ids: Int32  # [R]
    logprob: Float32  # [R]; empty when not asked for
    rank: Int32  # [R]; 1 = most likely
    top_ids: Int32  # [R, n]
    top_logprobs: Float32  # [R, n]


class Executable(Protocol):
    """What the runtime needs of a compiled model. ``compilerllm.compiled.CompiledModel`` is one; tests have others."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def groups(self) -> tuple[StateGroup, ...]: ...

    @property
    def buckets(self) -> tuple[Bucket, ...]: ...

    @property
    def leaves_host_free(self) -> bool:
        """Whether a running step leaves the host a core of its own, so that scheduling ahead costs nothing."""
        ...

    def allocate(self, num_blocks: int, max_num_seqs: int) -> SamplingTables:
        """Make the states (``num_blocks`` blocks in each paged group) and the sampling tables. Once."""
        ...

    def forward(self, step: StepInputs) -> None:
        """Run one step; logits of ``sample_rows`` stay inside. Blocks until done; releases the GIL meanwhile."""
        ...

    def sample(self, rows: SampleRows) -> Sampled:
        """Choose tokens from the last forward's logits, write ``last_token`` and advance ``draws`` and counts."""
        ...

    def logits(self) -> Float32:
        """The last forward's logits [R, V], for tests and scoring."""
        ...


class Pending(Protocol):
    """A step on its way."""

    def result(self) -> Sampled | None:
        """Wait for the step to end. Asked once. Raises what went wrong in it, be it at launch or on the device."""
        ...


class AsyncExecutable(Executable, Protocol):
    """An executable whose device runs steps in the order in which they were enqueued, without the host.

    The host enqueues step n+1 before it asks for the result of step n, and never has more than two on their way: when
    step n+2 is enqueued, the result of step n has been asked for. Two sets of staging buffers are enough.
    """

    @property
    def asynchronous(self) -> Literal[True]: ...

    def count_blocks(
        self,
        utilization: float,
        max_num_seqs: int,
        max_model_len: int,
        *,
        kv_cache_bytes: int | None = None,
        num_blocks: int | None = None,
        memory_bytes: int | None = None,
    ) -> int:
        """Blocks of each paged group that the device's memory has room for, no more than all sequences could ever use.

        ``utilization`` is the share of the device's memory that may be taken in all, weights included, unless
        ``memory_bytes`` says how many bytes; ``kv_cache_bytes`` or ``num_blocks`` are the user's wish. Raises an error
        that names the bytes and the flag.
        """
        ...

    def enqueue(self, step: StepInputs, rows: SampleRows | None) -> Pending:
        """Start forward and, with ``rows``, sampling; return at once.

        Step, rows and the changed rows of the tables are read before this returns: the host goes on to write the tables.
        Tokens of the step before are read on the device (``token_ids`` < 0).
        """
        ...

    def enqueue_forward(self, step: StepInputs, slots: Int32) -> None:
        """The first half of ``enqueue``, where the host does not know yet what may be sampled: ``enqueue_sample`` follows,
        before the next step. slots [R]: as ``SampleRows`` will have them."""
        ...

    def enqueue_sample(self, rows: SampleRows) -> Pending:
        """The second half: sample the rows of the forward enqueued last."""
        ...


def is_asynchronous(model: Executable) -> TypeGuard[AsyncExecutable]:
    """Whether the executable says that it is an ``AsyncExecutable``. Most have no such attribute."""
    return bool(getattr(model, "asynchronous", False))
