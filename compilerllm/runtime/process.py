"""The engine's own process: ``python -m compilerllm.runtime.process DIRECTORY PARENT_PID``.

DIRECTORY is private to parent and child and holds ``start.json`` (what to load) and two sockets, bound by the parent:
``in`` (requests, aborts) and ``out`` (ready or failed, then batches, and stats as a heartbeat). The process ends when
its parent does, however that ended.
"""

import gc
import importlib
import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import msgspec
import zmq

from compilerllm import compile_watch
from compilerllm.config import EngineConfig
from compilerllm.errors import OUT_OF_MEMORY, CompilerLLMError
from compilerllm.ir.step import Executable
from compilerllm.runtime.engine import InProcessEngine
from compilerllm.runtime.grammars import make_grammars
from compilerllm.runtime.messages import Batch, Delta, Failed, Inbound, ModelFacts, Request
from compilerllm.runtime.pooling import PoolingEngine

HEARTBEAT_SECONDS = 1.0
START_FILE = "start.json"
Factory = Callable[[EngineConfig], tuple[Executable, ModelFacts]]

log = logging.getLogger(__name__)
_encode = msgspec.msgpack.Encoder().encode


class Start(msgspec.Struct, frozen=True):
    """What the child is to load: ``factory`` is ``module:function``, called with ``config``."""

    factory: str
    config: EngineConfig


def main() -> None:
    """Load, say ready, serve. Exit status 0 after a failure that was told to the parent."""
    logging.basicConfig(level=logging.INFO, format="engine: %(message)s", stream=sys.stderr)
    for ending in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # Ctrl-C and service managers reach the whole group; the parent ends us once open requests have finished.
        signal.signal(ending, signal.SIG_IGN)
    compile_watch.watch()
    directory, parent = Path(sys.argv[1]), int(sys.argv[2])
    life = _Lifeline(directory, parent)
    life.start()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    outbox = context.socket(zmq.PUSH)
    outbox.set_hwm(
        0
    )  # never block the loop on a slow reader: open requests are bounded, and so is what they say
    outbox.connect(f"ipc://{directory}/out")
    try:
        engine = load(msgspec.json.decode((directory / START_FILE).read_bytes(), type=Start))
    except MemoryError as error:
        outbox.send(_encode(Failed(f"{OUT_OF_MEMORY} ({error})")))
    except (CompilerLLMError, OSError) as error:
        outbox.send(_encode(Failed(str(error) or type(error).__name__)))
    except Exception as error:
        log.exception("The engine could not start.")
        outbox.send(_encode(Failed(f"The engine could not start: {type(error).__name__}: {error}")))
    else:
        inbox = context.socket(zmq.PULL)
        inbox.set_hwm(0)
        inbox.connect(f"ipc://{directory}/in")
        gc.collect()
        gc.freeze()  # the model's objects live for ever; later collections need not look at them
        sys.setswitchinterval(
            0.0005
        )  # the thread that comes back from a step shall not wait 5 ms for the GIL
        outbox.send(_encode(engine.ready))
        life.engine = engine
        serve(engine, inbox, outbox)
    outbox.close(linger=2000)
    context.term()


def load(start: Start) -> InProcessEngine | PoolingEngine:
    """Call the factory and put an engine around its model."""
    module, _, name = start.factory.partition(":")
    factory: Factory = getattr(importlib.import_module(module), name)
    model, facts = factory(start.config)
    config = start.config
    if facts.pooling is not None:
        return PoolingEngine(model, config.scheduler, facts=facts, max_model_len=config.model.max_model_len)
    return InProcessEngine(
        model,
        config.scheduler,
        config.cache,
        max_model_len=config.model.max_model_len,
        facts=facts,
        grammars=make_grammars(facts, model.vocab_size, config.structured),
        max_stream_rate=_stream_rate(config.scheduler.max_stream_rate, model),
    )


def _stream_rate(wanted: int | None, model: Executable) -> int:
    """Deltas a second. A face and a client spend some 50 to 100 us on one: of a core that the model wants too, no more
    than a tenth or two is taken from it; a core of its own is not to be overrun."""
    return wanted if wanted is not None else 10_000 if model.leaves_host_free else 2_000


def serve(
    engine: InProcessEngine | PoolingEngine, inbox: "zmq.Socket[bytes]", outbox: "zmq.Socket[bytes]"
) -> NoReturn:
    """The loop: take in what has come, step, send what it says; sleep on the socket when there is nothing to do."""
    decode = msgspec.msgpack.Decoder(Inbound).decode
    while True:
        while inbox.poll(0 if engine.has_unfinished() else None):
            message = decode(inbox.recv())
            if not isinstance(message, Request):
                engine.abort(message.request_ids)
                continue
            try:
                engine.submit(message)
            except CompilerLLMError as error:  # the parent checks too, so this is rare
                refusal = Delta(
                    request_id=message.request_id, token_ids=[], finish_reason="error", error=str(error)
                )
                outbox.send(_encode(Batch(deltas=[refusal], stats=engine.stats())))
        batch = engine.step()
        if batch.deltas:
            outbox.send(_encode(batch))


class _Lifeline(threading.Thread):
    """Tells the parent that this process lives, and ends the process when the parent is gone.

    Not PR_SET_PDEATHSIG: that fires when the parent's *thread* ends, and a restart may come from any thread.
    """

    def __init__(self, directory: Path, parent: int) -> None:
        super().__init__(daemon=True, name="lifeline")
        self.engine: InProcessEngine | PoolingEngine | None = None  # set when it is ready
        self._directory = directory
        self._parent = parent

    def run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        outbox = context.socket(zmq.PUSH)
        outbox.connect(f"ipc://{self._directory}/out")
        while os.getppid() == self._parent:
            if self.engine is not None:
                outbox.send(_encode(self.engine.last_stats))
            time.sleep(HEARTBEAT_SECONDS)
        shutil.rmtree(self._directory, ignore_errors=True)  # the parent cannot any more
        os._exit(1)


if __name__ == "__main__":
    main()
