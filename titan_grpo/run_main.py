"""Entry point for subprocesses.start_module: ``python -m titan_grpo.run_main SIGNALS MODULE FD
PARENT ARGUMENTS...`` ignores the signals, then calls ``MODULE.main`` with the socket, the parent's
process id and the arguments. SIGUSR1 makes it write the stacks of its threads to stderr.

``python -m MODULE`` would load the module as ``__main__``, and again under its own name at the
first import or unpickling: its classes would exist twice.
"""

import faulthandler
import gc
import importlib
import signal
import socket
import sys

if __name__ == "__main__":
    numbers, name, fd, parent, *arguments = sys.argv[1:]
    # Before loading the module, which takes seconds: Ctrl-C reaches the whole foreground group, and
    # the parent decides when this process ends.
    ignored = [int(number) for number in numbers.split(",")]
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    # Its handler is C code, which runs whatever holds the interpreter: rank 0 asks its rollout
    # process where it stands still.
    faulthandler.register(signal.SIGUSR1)
    # start_module blocked them: a child of this process would inherit that.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ignored)
    # Imports make no garbage: without the collector, those of torch take a quarter less time. What
    # they made is left out of later collections, the last one of the interpreter included.
    gc.disable()
    module = importlib.import_module(name)
    gc.freeze()
    gc.enable()
    sys.exit(module.main(socket.socket(fileno=int(fd)), int(parent), *arguments))
