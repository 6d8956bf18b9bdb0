"""Outputs that go round in circles, found at their end."""

from collections.abc import Sequence as Tokens

from compilerllm.sampling_params import RepetitionDetection


def repeats(tokens: Tokens[int], rule: RepetitionDetection) -> bool:
    """Whether the tokens end with ``min_count`` equal pieces of ``min_pattern_size`` to ``max_pattern_size`` tokens."""
    count = len(tokens)
    for size in range(rule.min_pattern_size, rule.max_pattern_size + 1):
        need = size * rule.min_count
        if need > count:
            return False
        if tokens[-1] != tokens[-1 - size]:
            continue
        if all(tokens[-1 - i] == tokens[-1 - i - size] for i in range(need - size)):
            return True
    return False
