"""Models in processes of their own: one that hangs or dies costs itself alone."""

from __future__ import annotations

import dataclasses
import multiprocessing
import multiprocessing.connection
import os
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

from . import runner
from .models import Model
from .outcome import NOT_BUILT, UNCLEAR, Outcome

Results = dict[str, dict[str, Any]]


@dataclasses.dataclass
class Worker:
    process: Any
    pipe: Any
    model: Model | None = None
    since: float = 0.0
    found: dict[str, Any] = dataclasses.field(default_factory=dict)
    mode: str = "load"


def _work(pipe: Any, device: str, inherited: list[Any]) -> None:
    for other in inherited:
        other.close()
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, sys.stdout.fileno())
    os.dup2(silence, sys.stderr.fileno())
    runner.register()  # a process that was not forked has none of its parent's names
    while True:
        try:
            model, wanted = pipe.recv()
        except EOFError:
            return
        for mode, outcome in runner.run(model, wanted, device):
            pipe.send((mode, dataclasses.asdict(outcome)))
        pipe.send(None)


def run_all(
    work: Iterable[tuple[Model, list[str] | None]],
    done: Callable[[Model, dict[str, Any]], None],
    *,
    device: str,
    jobs: int,
    seconds: float,
) -> None:
    """Calls `done` with the outcomes of each model. A mode that has no outcome after `seconds` is unclear."""
    queue = list(work)[::-1]
    context = multiprocessing.get_context("fork" if device == "cpu" else "spawn")
    workers: list[Worker] = []

    def start() -> Worker:
        ours, theirs = context.Pipe()
        inherited = [w.pipe for w in workers] + [ours] if device == "cpu" else []
        process = context.Process(target=_work, args=(theirs, device, inherited), daemon=False)
        process.start()
        theirs.close()
        return Worker(process, ours)

    def give(worker: Worker) -> bool:
        if not queue:
            return False
        worker.model, wanted = queue.pop()
        worker.since, worker.found, worker.mode = time.monotonic(), {}, "load"
        worker.pipe.send((worker.model, wanted))
        return True

    def end(worker: Worker, why: str) -> None:
        worker.process.kill()
        worker.process.join()
        worker.pipe.close()
        workers.remove(worker)
        assert worker.model is not None
        if worker.mode == "load":  # no mode has been run: the recipe is too large, or finds no inputs in time
            worker.found["load"] = dataclasses.asdict(Outcome(NOT_BUILT, text=why))
        else:
            worker.found[f"after {worker.mode}"] = dataclasses.asdict(Outcome(UNCLEAR, text=why))
        done(worker.model, worker.found)

    while queue or workers:
        while queue and len(workers) < jobs:
            workers.append(start())
            give(workers[-1])
        ready = multiprocessing.connection.wait([w.pipe for w in workers], timeout=1)
        for worker in list(workers):
            if worker.pipe in ready:
                try:
                    message = worker.pipe.recv()
                except EOFError:
                    end(worker, f"the process died, exit status {worker.process.exitcode}")
                    continue
                worker.since = time.monotonic()
                if message is not None:
                    worker.mode, outcome = message
                    worker.found[worker.mode] = outcome
                    continue
                assert worker.model is not None
                done(worker.model, worker.found)
                if not give(worker):
                    worker.pipe.close()
                    worker.process.join()
                    workers.remove(worker)
            elif time.monotonic() - worker.since > seconds:
                end(worker, f"no answer after {seconds:.0f} seconds")
