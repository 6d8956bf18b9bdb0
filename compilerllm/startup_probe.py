"""One start, timed from within: ``python -m compilerllm.startup_probe OPTIONS``, a JSON object of ``LLM``'s keywords.

Loads the model (and compiles it where the cache misses), generates one token, and prints one last line of JSON: seconds
by part. ``python`` is from the process's start to this module, ``import`` the package's own imports.
"""

import json
import os
import sys
import time


def since_start() -> float:
    """Seconds that this process lives, to a hundredth."""
    with open("/proc/self/stat") as stat, open("/proc/uptime") as uptime:
        ticks = int(stat.read().rpartition(")")[2].split()[19])
        return float(uptime.read().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")


def main() -> None:
    begin = since_start()
    clock = time.perf_counter()

    from compilerllm.benchmark import made_up_prompts, timed_run
    from compilerllm.errors import CompilerLLMError
    from compilerllm.llm import LLM

    imported = time.perf_counter()
    try:
        llm = LLM(**json.loads(sys.argv[1]))
    except CompilerLLMError as error:
        sys.exit(str(error))
    with llm:
        loaded = time.perf_counter()
        length = min(128, llm.max_model_len - 1)
        timed_run(llm.engine, made_up_prompts([length], llm.engine.ready.vocab_size, 0), [1])
        ended = time.perf_counter()
        parts = {"python": begin, **llm.start_seconds, "first_token": ended - loaded}
        parts["import"] += imported - clock
        total = begin + ended - clock
    print(json.dumps({"total": total, "parts": {name: round(s, 3) for name, s in parts.items()}}), flush=True)


if __name__ == "__main__":
    main()
