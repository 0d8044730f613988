"""Serving sockets without looking at a clock: socketserver's own loop wakes twice a second to see whether it shall end."""

import socket
import socketserver
import threading
from contextlib import suppress

END_S = 5.0
"""How long ``end`` waits for the loop, in seconds; it has nothing to finish but the start of one connection's thread."""


SPENT_S = 0.1
"""Rest after a connection could not be taken, in seconds: the process has no descriptor left, which may pass."""


class Serving(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """A stream server that sleeps until somebody connects, with a thread for each connection.

    Put it before another server class: ``class MyServer(Serving, http.server.HTTPServer)``.
    """

    daemon_threads = True
    block_on_close = False  # a caller that says nothing must not hold up the end of the run

    def begin(self, name: str) -> None:
        """Serve in a thread called ``name``, until ``end``."""
        self._ending = threading.Event()
        self._loop = threading.Thread(target=self._serve, name=name, daemon=True)
        self._loop.start()

    def end(self) -> None:
        """Stop listening, at once. Requests under way are not waited for. Idempotent; bounded."""
        self._ending.set()
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)  # ends the loop's accept
        self._loop.join(END_S)
        self.server_close()

    def _serve(self) -> None:
        while not self._ending.is_set():
            try:
                connection, address = self.get_request()
            except OSError:
                self._ending.wait(SPENT_S)
                continue
            try:
                self.process_request(connection, address)
            except RuntimeError:  # no thread is left
                self.shutdown_request(connection)
