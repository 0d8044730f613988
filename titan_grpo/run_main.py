"""``python -m titan_grpo.run_main MODULE FD PARENT ARGUMENTS...`` calls ``MODULE.main`` with the
socket, the parent's process id and the arguments: what start_module starts.

With ``python -m MODULE`` the first record of its own that the process reads would load the module
again, under its name: its classes would be there twice.
"""

import importlib
import socket
import sys

if __name__ == "__main__":
    name, fd, parent, *arguments = sys.argv[1:]
    module = importlib.import_module(name)
    sys.exit(module.main(socket.socket(fileno=int(fd)), int(parent), *arguments))
