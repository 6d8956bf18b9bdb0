"""Hashes of full blocks: each covers its parent's hash and its own tokens; the first parent covers the extra keys.

A collision would hand one user another's context, so the hash is cryptographic, 128 bits.
"""

from array import array
from hashlib import blake2b

from compilerllm.runtime.sequence import Sequence


def root_hash(cache_salt: str | None, adapter_id: int) -> bytes:
    """The parent of a context's first block. Equal tokens share blocks only under equal roots."""
    salt = b"-" if cache_salt is None else b"+" + cache_salt.encode("utf-8", "surrogatepass")
    return blake2b(adapter_id.to_bytes(8, "little") + salt, digest_size=16).digest()


def extend_hashes(seq: Sequence, block_size: int, length: int) -> None:
    """Make ``seq.hashes[block_size]`` cover the full blocks within the first ``length`` tokens, which are known.

    Tokens never change once known, so hashes stay valid over preemption and rollback.
    """
    hashes = seq.hashes.setdefault(block_size, [])
    parent = hashes[-1] if hashes else root_hash(seq.request.cache_salt, seq.request.adapter_id)
    for start in range(len(hashes) * block_size, length // block_size * block_size, block_size):
        tokens = array("i", seq.tokens[start : start + block_size])
        parent = blake2b(parent + tokens.tobytes(), digest_size=16).digest()
        hashes.append(parent)
