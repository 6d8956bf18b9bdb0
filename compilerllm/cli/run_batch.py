"""Answer a file of requests in OpenAI's batch format, a JSON object a line; a run that was stopped goes on where it was.

    compilerllm run-batch -i requests.jsonl -o answers.jsonl --url http://127.0.0.1:8000/v1
    compilerllm run-batch -i requests.jsonl -o answers.jsonl model.gguf      a server for as long as it takes

A request:  {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...], "max_tokens": 50}}
An answer:  {"id": "...", "custom_id": "a", "response": {"status_code": 200, "request_id": "...", "body": {...}}, "error": null}

Routes are those of the server: chat completions, completions, embeddings, responses and more. A body without "model" gets
the server's. Answers are appended as they come; what OUTPUT answers already is not asked again. A line that is no request
gets an error and stops nothing.
"""

import argparse
import asyncio
import sys
from pathlib import Path

from compilerllm.cli.bench_flags import whole_number
from compilerllm.cli.flags import add_engine_flags
from compilerllm.cli.server_flags import add_server_flags, server_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="?", metavar="MODEL",
        help="A folder, a hub id or a .gguf file, without --url; by default the demo's.",
    )  # fmt: skip
    parser.add_argument("-i", "--input", type=Path, required=True, metavar="FILE", help="The requests.")
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="FILE", help="Where answers are appended."
    )
    parser.add_argument(
        "--concurrency", type=whole_number, default=64, metavar="N", help="Most requests open at once."
    )
    add_server_flags(parser)
    add_engine_flags(parser, starts=True)


def run(args: argparse.Namespace) -> int:
    from compilerllm.batch_file import Task, read_answered, read_tasks

    lines = read_tasks(args.input)  # before a model is loaded: mistakes are told at once
    answered = read_answered(args.output)
    left = [line for line in lines if line.custom_id not in answered]
    if any(isinstance(line, Task) for line in left):
        with server_of(args) as url:
            return asyncio.run(_answer(args, url, left, len(lines) - len(left)))
    return asyncio.run(_answer(args, None, left, len(lines) - len(left)))


async def _answer(args: argparse.Namespace, url: str | None, lines: list, kept: int) -> int:  # type: ignore[type-arg]
    from compilerllm.batch_file import AnswerFile, BadLine, Tally, Task, run_tasks
    from compilerllm.benchmark import progress
    from compilerllm.remote.server import RemoteServer

    tally, answers = Tally(kept=kept), AnswerFile(args.output)
    try:
        with progress("batch", len(lines)) as advance:
            for line in lines:
                if isinstance(line, BadLine):
                    answers.write(line.custom_id, None, {"code": line.code, "message": line.message})
                    tally.bad_lines += 1
                    advance()
            if url is not None:
                server = RemoteServer(url, args.api_key)
                tasks = [line for line in lines if isinstance(line, Task)]
                try:
                    model = await server.find_model(args.model if args.url else None)
                    await run_tasks(server, tasks, answers, args.concurrency, tally, model, advance)
                finally:
                    await server.close()
    finally:
        answers.close()
        print(
            f"{tally.answered} answered, {tally.refused} refused by the server, {tally.bad_lines} bad lines, "
            f"{tally.kept} kept from before: {args.output}",
            file=sys.stderr,
        )
    return 0
