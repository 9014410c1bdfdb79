"""Models in processes of their own: one that hangs or dies costs itself alone."""

from __future__ import annotations

import dataclasses
import math
import multiprocessing
import multiprocessing.connection
import os
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

from . import runner
from .models import Model
from .outcome import NO_ANSWER, NOT_BUILT, UNCLEAR, Outcome

BROKEN = "broken"  # what a process says that ends, since its device fails every call
STARTING = 60  # seconds that a process may take to import everything, beside those of its first mode


@dataclasses.dataclass
class Worker:
    process: Any
    pipe: Any
    task: Task
    since: float
    is_loaded: bool = False


@dataclasses.dataclass
class Task:
    """A model, the modes that are left to run, and what was found."""

    model: Model
    left: list[str]
    found: dict[str, Any] = dataclasses.field(default_factory=dict)
    is_again: bool = False


def _work(pipe: Any, device: str, half: bool, inherited: list[Any]) -> None:
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
        for mode, outcome in runner.run(model, wanted, device, half):
            pipe.send((mode, dataclasses.asdict(outcome)))
            if not _is_usable(device):
                pipe.send(BROKEN)
                return
        pipe.send(None)


def _is_usable(device: str) -> bool:
    """Whether the process can compute there: after a device-side assert, of eager's model too, every call fails."""
    if device == "cpu":
        return True
    import torch

    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def run_all(
    work: Iterable[tuple[Model, list[str]]],
    done: Callable[[Model, dict[str, Any]], None],
    *,
    device: str,
    jobs: int,
    seconds: float,
    half: bool = False,
    until: float = math.inf,
) -> list[tuple[Model, list[str]]]:
    """Calls `done` with the outcomes of each model, and returns what was not run before `until`, of time.monotonic().

    A mode that has no outcome after `seconds` is given up; the model's other modes are run without it.
    """
    queue = [Task(model, list(wanted)) for model, wanted in work][::-1]
    context = multiprocessing.get_context("fork" if device == "cpu" else "spawn")
    workers: list[Worker] = []

    def start() -> None:
        ours, theirs = context.Pipe()
        inherited = [w.pipe for w in workers] + [ours] if device == "cpu" else []
        process = context.Process(target=_work, args=(theirs, device, half, inherited), daemon=False)
        process.start()
        theirs.close()
        worker = Worker(process, ours, queue[-1], 0.0)
        give(worker)
        worker.since += STARTING
        workers.append(worker)

    def give(worker: Worker) -> None:
        worker.task, worker.since, worker.is_loaded = queue.pop(), time.monotonic(), False
        worker.pipe.send((worker.task.model, worker.task.left))

    def end(worker: Worker) -> Task:
        worker.process.kill()
        worker.process.join()
        worker.pipe.close()
        workers.remove(worker)
        return worker.task

    def give_up(worker: Worker, result: str, why: str) -> None:
        task = end(worker)
        if not worker.is_loaded and not task.is_again:
            # No mode has been run: the recipe is too large, or finds no inputs in time.
            task.found["load"] = dataclasses.asdict(Outcome(NOT_BUILT, text=why))
            task.left = []
        else:
            task.found[task.left.pop(0)] = dataclasses.asdict(Outcome(result, text=why))
        if task.left:
            queue.append(dataclasses.replace(task, is_again=True))
        else:
            done(task.model, task.found)

    def receive(worker: Worker) -> None:
        try:
            message = worker.pipe.recv()
        except EOFError:
            worker.process.join()
            give_up(worker, UNCLEAR, f"the process died, exit status {worker.process.exitcode}")
            return
        worker.since, worker.is_loaded = time.monotonic(), True
        if message == BROKEN:
            task = end(worker)
            if task.left and "load" not in task.found:
                queue.append(dataclasses.replace(task, is_again=True))
            else:
                done(task.model, task.found)
            return
        if message is not None:
            mode, outcome = message
            worker.task.found[mode] = outcome
            worker.task.left = [m for m in worker.task.left if m != mode]
            return
        done(worker.task.model, worker.task.found)
        if queue:
            give(worker)
        else:
            end(worker)

    try:
        while (queue or workers) and time.monotonic() < until:
            while queue and len(workers) < jobs:
                start()
            ready = multiprocessing.connection.wait([w.pipe for w in workers], timeout=min(1, seconds / 4))
            for worker in list(workers):
                if worker.pipe in ready:
                    receive(worker)
                elif time.monotonic() - worker.since > seconds:
                    give_up(worker, NO_ANSWER, f"no answer after {seconds:.0f} seconds")
    finally:
        cut = [end(w) for w in list(workers)] + queue
        for task in cut:
            if task.found:
                done(task.model, task.found)
    return [(task.model, task.left) for task in cut]
