"""Sizes as users write them."""

import pytest

from compilerllm.config import CacheConfig, parse_size
from compilerllm.errors import InvalidParameter


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("24GiB", 24 * 2**30), ("24GB", 24 * 10**9), ("25769803776", 25769803776), (25769803776, 25769803776), ("1.5 GiB", 3 * 2**29),
        ("0.1GB", 10**8), (" 512MiB ", 512 * 2**20), ("2097152B", 2**21), ("1TiB", 2**40), ("4096KiB", 2**22),
    ],
)  # fmt: skip
def test_sizes(text: str | int, nbytes: int) -> None:
    assert parse_size(text) == nbytes
    assert CacheConfig(memory=text).memory_bytes == nbytes


@pytest.mark.parametrize(
    "text",
    [
        "",
        "24",
        "24G",
        "24gib",
        "GiB",
        "-1GiB",
        "1e9",
        "1,000MiB",
        "1.5",
        "0GiB",
        "1023KiB",
        "24 GiB please",
        True,
        "nan",
    ],
)
def test_nonsense_is_refused_by_the_flags_name(text: str) -> None:
    with pytest.raises(
        InvalidParameter, match=r"^--memory must be .*(such as 24GiB|at least 1MiB)"
    ) as refused:
        CacheConfig(memory=text)
    assert refused.value.param == "memory"


def test_no_memory_is_no_limit() -> None:
    assert CacheConfig().memory_bytes is None
