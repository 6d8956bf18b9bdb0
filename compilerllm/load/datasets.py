"""What requests ask: random prompts, with shared beginnings if wanted, ShareGPT's conversations, or a file of prompts."""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compilerllm.benchmark import DatasetInvalid

_WORDS = "time year people way day man thing woman life child world school state family student group country".split()


@dataclass(frozen=True)
class Ask:
    """prompt: a text, or token ids. max_tokens: to generate."""

    prompt: str | list[int]
    max_tokens: int


def draw(
    dataset: Path | None,
    count: int,
    input_len: tuple[int, int],
    output_len: tuple[int, int],
    prefix_len: int,
    num_prefixes: int,
    vocab_size: int,
    seed: int,
    *,
    chat: bool,
) -> list[Ask]:
    """``count`` requests; those of a dataset repeat where it has fewer. Raises ``DatasetInvalid``."""
    source = random.Random(seed)
    if dataset is not None:
        prompts = read_prompts(dataset)
        source.shuffle(prompts)
        return [
            Ask(text, length or source.randint(*output_len))
            for text, length in (prompts[i % len(prompts)] for i in range(count))
        ]
    low = 100 if vocab_size > 2048 else 0  # special tokens stand first

    def tokens(length: int) -> list[Any]:
        return source.choices(_WORDS, k=length) if chat else source.choices(range(low, vocab_size), k=length)

    prefixes = [tokens(prefix_len) for _ in range(num_prefixes)]
    asks = []
    for number in range(count):
        own = tokens(source.randint(*input_len))
        ids = prefixes[number % num_prefixes] + own
        asks.append(Ask(" ".join(ids) if chat else ids, source.randint(*output_len)))
    return asks


def read_prompts(path: Path) -> list[tuple[str | list[int], int | None]]:
    """Prompts with the tokens to generate, where the file says so. Raises ``DatasetInvalid``.

    A JSON list is read as ShareGPT's: entries with ``conversations``, of which the first turn is the prompt and the second
    gives the length (a token for four characters). Otherwise a prompt a line, as for `bench throughput`.
    """
    if path.suffix != ".json":
        from compilerllm.cli.bench_throughput import read_dataset

        return [(entry["prompt"], entry.get("max_tokens")) for entry in read_dataset(path)]
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DatasetInvalid(f"--dataset {path} cannot be read: {error}") from error
    found: list[tuple[str | list[int], int | None]] = []
    for entry in content if isinstance(content, list) else []:
        turns = entry.get("conversations", entry.get("conversation")) if isinstance(entry, dict) else None
        texts = [_text(turn) for turn in turns] if isinstance(turns, list) else []
        if len(texts) >= 2 and texts[0]:
            found.append((texts[0], max(4, len(texts[1]) // 4)))
    if not found:
        raise DatasetInvalid(
            f'{path} has no conversations: wanted is a JSON list of {{"conversations": [{{"from": "human", "value": "..."}}, '
            '{"from": "gpt", "value": "..."}]}'
        )
    return found


def _text(turn: Any) -> str:
    value = turn.get("value", turn.get("content")) if isinstance(turn, dict) else None
    return value if isinstance(value, str) else ""
