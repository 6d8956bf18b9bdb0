"""Serve a model over HTTP with OpenAI's API, and /health, /ready, /metrics, /version for whoever runs it. Where the
cache has no artifact for the model, it is compiled first, unless one is named.

    compilerllm serve                                the demo model on 127.0.0.1:8000
    compilerllm serve model.gguf --port 9000         a GGUF file
    compilerllm serve org/name --max-model-len 4096  a model of the hub
    compilerllm serve --config server.yaml           flags from a file: `max-num-seqs: 64` a line

For others to reach it, and nobody else:

    compilerllm serve model.gguf --host 0.0.0.0 --api-key-file keys.txt --ssl-certfile cert.pem --ssl-keyfile key.pem

SIGTERM lets open requests finish and takes no new ones; SIGHUP reads keys and certificate anew and reopens the
request log. docs/server.md has all of it.
"""

import argparse
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from compilerllm.cli.flags import (
    add_config,
    add_config_file,
    add_engine_flags,
    read_config,
    read_engine_config,
)
from compilerllm.server.config import SERVER_PARTS, ServerConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "%(prog)s [MODEL] [FLAGS]"
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="A folder, a hub id or a .gguf file; by default the demo's."
    )
    add_config_file(parser)
    for part, title in SERVER_PARTS.items():
        add_config(parser, title, part)
    add_engine_flags(parser, starts=True)


def run(args: argparse.Namespace) -> int:
    from compilerllm.server.records import RequestIdFilter
    from compilerllm.server.run import bind, check_files, exit_on_sigterm

    server = read_config(args, ServerConfig)
    logging.basicConfig(level=server.log_level.upper(), format="%(levelname)s: %(message)s")
    for handler in logging.getLogger().handlers:
        handler.addFilter(RequestIdFilter())
    config = read_engine_config(args)
    check_files(server)
    with bind(server) as listener:  # before the compile: a port in use is told at once
        exit_on_sigterm()
        _serve(config, server, listener)
    return 0


def _serve(config: Any, server: ServerConfig, listener: Any) -> None:
    from compilerllm import compile_watch
    from compilerllm.cli import local
    from compilerllm.cli.terminal import print_card, startup_card
    from compilerllm.runtime.client import ProcessEngine
    from compilerllm.server.run import address_of, listen, run
    from compilerllm.serving_artifact import settle

    compile_watch.watch()
    with compile_watch.asked_for_by("the server's start"):
        found = local.compile_model(config)
    config = settle(config, found)
    engine = ProcessEngine(config)
    try:
        with ThreadPoolExecutor(1) as thread:  # while the engine loads the weights
            face = thread.submit(_load_face, found.path / "tokenizer")
            ready = engine.start()
            build_app, tokenizer = face.result()
        events = compile_watch.add(ready.compile_events, compile_watch.counts())
        card = {**startup_card(ready.card, found), "compile events": compile_watch.text(events)}
        listen(listener, server)  # from the moment the card says so, whoever connects is answered
        print_card({**card, "listening": _shown(server, address_of(listener, server))})
        run(build_app(engine, tokenizer, server, config.model.display_name), listener, server)
    finally:
        engine.close()


def _shown(server: ServerConfig, address: str) -> str:
    return address if server.uds is not None else address + "/v1"


def _load_face(folder: Path) -> Any:
    from compilerllm.server.app import build_app
    from compilerllm.text.absent import open_tokenizer

    return build_app, open_tokenizer(folder)
