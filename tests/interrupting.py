"""An interrupt while a program is compiled."""

import contextlib
import os
import signal
import threading
import time

import jax
import pytest


@contextlib.contextmanager
def interrupted_compilation(monkeypatch):
    """A context whose body must compile a program, and which the interrupt of that ends. The compiler has not ended its work by then, but
    does so soon after: cut short, it would read a program that nobody holds any more, and crash the process."""
    real, told, ended = jax.stages.Lowered.compile, threading.Event(), threading.Event()

    def compile(lowered, *args, **options):
        time.sleep(0.1)  # until whoever asked for the program waits for it
        os.kill(os.getpid(), signal.SIGINT)
        told.wait(60)
        ended.set()
        return real(lowered, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(jax.stages.Lowered, "compile", compile)
        with pytest.raises(KeyboardInterrupt):
            yield
        assert not ended.is_set()
        told.set()
        assert ended.wait(60)
