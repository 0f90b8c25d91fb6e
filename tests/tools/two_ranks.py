"""Two gloo processes on this machine, started once a session, that run functions of test modules on request."""

from __future__ import annotations

import functools
import gc
import importlib.util
import inspect
import os
import pathlib
import pickle
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Client, Listener
from types import ModuleType
from typing import Any

WORLD = 2
SECONDS = 60


@functools.cache
def module_at(path: str) -> ModuleType:
    """A module by its file: tests cannot import each other by name."""
    spec = importlib.util.spec_from_file_location(f"fxprec_ranks_{pathlib.Path(path).stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # what they pickle is found by name
    spec.loader.exec_module(module)
    return module


@contextmanager
def two_ranks() -> Iterator[Callable[..., list[Any]]]:
    """``ask(function, *arguments)``: what ``function(tools, rank, *arguments)`` returned in both processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        rendezvous = free.getsockname()[1]
    with Listener(("127.0.0.1", 0), authkey=b"fxprec") as listener:
        command = [sys.executable, __file__]
        rest = [str(listener.address[1]), str(rendezvous)]
        processes = [subprocess.Popen([*command, str(rank), *rest]) for rank in range(WORLD)]
        connections = [listener.accept() for _ in range(WORLD)]

    def ask(function: Callable[..., Any], *arguments: Any) -> list[Any]:
        assert all(process.poll() is None for process in processes), "the processes ended in an earlier test"
        for connection in connections:
            connection.send((inspect.getfile(function), function.__name__, arguments))
        answers = []
        for connection in connections:
            if not connection.poll(SECONDS):
                for process in processes:  # they cannot be asked again
                    process.kill()
                raise AssertionError(f"{function.__name__}{arguments} hangs; of the answers came {answers}")
            answers.append(pickle.loads(connection.recv_bytes()))
        for good, answer in answers:
            assert good, answer
        return [answer for _, answer in answers]

    yield ask
    for connection in connections:
        connection.send(None)
        connection.close()
    for process in processes:
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()


def _serve(rank: int, port: int, rendezvous: int) -> None:
    import torch
    import torch.distributed as dist

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(rendezvous))
    torch.set_num_threads(1)
    conftest = module_at(str(pathlib.Path(__file__).parents[1] / "conftest.py"))
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    with Client(("127.0.0.1", port), authkey=b"fxprec") as parent:
        while (job := parent.recv()) is not None:
            path, name, arguments = job
            try:
                torch.manual_seed(0)
                answer = True, getattr(module_at(path), name)(conftest.Tools, rank, *arguments)
            except BaseException:  # pytest's own are no Exceptions
                answer = False, traceback.format_exc()
            gc.collect()  # a sharded model that lives on changes what the next one does
            gc.freeze()  # what stays is not looked at again
            parent.send_bytes(pickle.dumps(answer))  # send() would pass tensors on as open files of this process
    dist.destroy_process_group()


if __name__ == "__main__":
    _serve(*map(int, sys.argv[1:]))
