"""What ``make demo`` runs: the real model, served by the real command, asked by OpenAI's SDK."""

import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow  # CI runs `make demo` itself
@pytest.mark.weights
def test_the_demo_knows_the_capital_of_france(smollm2_gguf: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "compilerllm.demo"], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout.split("> What is the capital of France?")[1]
    assert re.search(r"start [\d.]+ s, first token [\d.]+ s, then \d+ tokens/s", done.stdout)
    assert "Traceback" not in done.stderr
