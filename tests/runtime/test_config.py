"""Options: every field has help, values out of range name their flag, flat names find their part."""

import dataclasses
from typing import Any

import msgspec
import pytest

from compilerllm.config import CONFIG_PARTS, EngineConfig, flag_of
from compilerllm.errors import InvalidParameter


def test_every_option_has_a_sentence_of_help_and_a_name_of_its_own() -> None:
    names = [f.name for part in CONFIG_PARTS.values() for f in dataclasses.fields(part)]
    assert len(names) == len(set(names))
    for part in CONFIG_PARTS.values():
        for f in dataclasses.fields(part):
            assert f.metadata["help"].endswith(".") and len(f.metadata["help"]) > 10, f.name


def test_flat_names_find_their_part() -> None:
    config = EngineConfig.create(model="m", max_model_len=9, num_blocks=16, max_num_seqs=3)
    assert (config.model.max_model_len, config.cache.num_blocks, config.scheduler.max_num_seqs) == (9, 16, 3)
    assert config.model.display_name == "m" and config.cache.enable_prefix_caching
    assert msgspec.json.decode(msgspec.json.encode(config), type=EngineConfig) == config


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("model", ""),
        ("dtype", "float16"),
        ("max_model_len", 0),
        ("served_model_name", ""),
        ("optimization_level", 4),
        ("kv_cache_bytes", 5),
        ("num_blocks", 0),
        ("num_blocks", True),
        ("memory_utilization", 0.0),
        ("memory_utilization", 1.5),
        ("max_num_seqs", 0),
        ("max_num_seqs", "8"),
        ("max_num_batched_tokens", 0),
        ("max_prefill_chunk", 0),
        ("max_num_waiting", -1),
        ("policy", "sjf"),
    ],
)
def test_a_value_out_of_range_names_its_flag(option: str, value: Any) -> None:
    with pytest.raises(InvalidParameter) as caught:
        EngineConfig.create(**{"model": "m", option: value})
    assert caught.value.param == option
    assert flag_of(option) in str(caught.value) and repr(value) in str(caught.value)


def test_unknown_and_missing_options_are_named() -> None:
    with pytest.raises(InvalidParameter, match=r"no option 'max_seqs'.*max_num_seqs") as caught:
        EngineConfig.create(model="m", max_seqs=3)
    assert caught.value.param == "max_seqs"
    with pytest.raises(InvalidParameter, match="--model is missing"):
        EngineConfig.create(max_num_seqs=3)
