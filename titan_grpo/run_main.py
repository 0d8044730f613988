"""``python -m titan_grpo.run_main MODULE FD PARENT ARGUMENTS...`` calls ``MODULE.main`` with the
socket, the parent's process id and the arguments: what start_module starts.

With ``python -m MODULE`` the first record of its own that the process reads would load the module
again, under its name: its classes would be there twice.
"""

import importlib
import signal
import socket
import sys

if __name__ == "__main__":
    # Before the module is loaded, which takes seconds: Ctrl-C reaches the whole foreground group,
    # and the process that started this one decides when it ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    name, fd, parent, *arguments = sys.argv[1:]
    module = importlib.import_module(name)
    sys.exit(module.main(socket.socket(fileno=int(fd)), int(parent), *arguments))
