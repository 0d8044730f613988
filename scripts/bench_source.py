#!/usr/bin/env python
"""What a range source sends over the loopback, and what each of its threads takes for it.

    python scripts/bench_source.py [--mib 256] [--readers 1] [--connections 1] [--gb 8]
        [--range-kib 64 1024 8192] [--senders N] [--tls] [--json PATH]

The source is this process, each reader a process that only receives: no hash, no engine. For each
length of a range every reader reads the image again and again over its connections, until ``--gb``
have come to all. ``rate_gb_s``: over the wall clock. ``thread_gb_s``: bytes over the processor time
of the threads that sent them, which is what one thread can send where nothing but its core bounds
it; ``user_share`` of that time was Python's (with TLS, the encryption's too), the rest the
kernel's. Where the readers' cores are the same ones, ``rate_gb_s`` is the machine's.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout, for tests and scripts

from scripts.common import Table, options_of, write_json
from tests.rigs.sockets import certificate
from titan_grpo.layout.image import SharedImage
from titan_grpo.protocol.messages import RangeSource
from titan_grpo.receive.fetch import TcpReader
from titan_grpo.sync.transports.range_server import RangeServer
from titan_grpo.sync.transports.tls import Certificate

HOST = "127.0.0.1"
WAIT_S = 120.0
GB = 10**9
READER = "--read"
"""First argument of a reader's process."""


def parse(argv: list[str]) -> argparse.Namespace:
    parser = options_of(__doc__)
    add = parser.add_argument
    add("--mib", type=int, default=256, help="bytes of the image, in MiB")
    add("--readers", type=int, default=1, help="reading processes")
    add("--connections", type=int, default=1, help="of each reader, each with a thread")
    add("--gb", type=float, default=8.0, help="bytes to all readers for each length")
    add("--range-kib", type=int, nargs="+", default=[64, 1024, 8192], help="bytes of a range")
    add("--senders", type=int, help="most sending threads (default: as the machine has cores)")
    add("--tls", action="store_true", help="encrypt")
    return parser.parse_args(argv)


def read(argv: list[str]) -> None:
    """A reader's process: connect, say so, and read when a line comes."""
    port, ticket, pin, nbytes, each, count, connections = argv
    source = RangeSource(HOST, int(port), ticket, pin=pin)
    readers = [TcpReader(source, None, WAIT_S) for _ in range(int(connections))]

    def work(reader: TcpReader) -> None:
        buffer = memoryview(bytearray(int(each)))
        for number in range(int(count)):
            reader.read_into(number * int(each) % int(nbytes), buffer)

    threads = [threading.Thread(target=work, args=(reader,)) for reader in readers]
    print("connected", flush=True)
    # no deadline: the source's process writes a line or ends
    sys.stdin.readline()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    print("read", flush=True)


def thread_times() -> dict[str, tuple[float, float]]:
    """User and system seconds of each thread of this process."""
    out, tick = {}, os.sysconf("SC_CLK_TCK")
    for task in Path("/proc/self/task").iterdir():
        fields = (task / "stat").read_text().rpartition(")")[2].split()
        out[task.name] = int(fields[11]) / tick, int(fields[12]) / tick
    return out


def one(options: argparse.Namespace, server: RangeServer, image: SharedImage, each: int) -> Any:
    """Read so many bytes in ranges of ``each``: the figures."""
    ticket = server.grant(image.buffer, image.address.fd, None)
    lines = options.readers * options.connections
    count = max(1, int(options.gb * GB / each / lines))
    port = server.listen(HOST)
    given = [port, ticket, server.pin, image.buffer.nbytes, each, count, options.connections]
    command = [sys.executable, __file__, READER, *map(str, given)]
    pipe = subprocess.PIPE
    readers = [
        subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        for _ in range(options.readers)
    ]
    for reader in readers:
        assert reader.stdout is not None
        # no deadline: it writes a line or ends
        reader.stdout.readline()
    before, start = thread_times(), time.perf_counter()
    for reader in readers:
        assert reader.stdin is not None
        reader.stdin.write("\n")
        reader.stdin.flush()
    for reader in readers:
        assert reader.stdout is not None
        # no deadline: it writes a line or ends
        if not reader.stdout.readline():
            raise SystemExit("a reader ended before it had read everything")
    seconds, after = time.perf_counter() - start, thread_times()
    for reader in readers:
        reader.communicate(timeout=WAIT_S)
    server.revoke(ticket)
    me = str(threading.get_native_id())
    spent = [(t[0] - before[n][0], t[1] - before[n][1]) for n, t in after.items() if n != me]
    user, system = (sum(each) for each in zip(*spent, strict=True))
    nbytes = count * lines * each
    return {
        "range_kib": each >> 10,
        "rate_gb_s": nbytes / seconds / GB,
        "thread_gb_s": nbytes / (user + system) / GB,
        "user_share": user / (user + system),
        "threads": sum(sum(each) > 0.02 * seconds for each in spent),
    }


def main(argv: list[str]) -> None:
    """All lengths, a line each."""
    if argv[:1] == [READER]:
        read(argv[1:])
        return
    options = parse(argv)
    with tempfile.TemporaryDirectory() as folder:
        names = ("certificate", "key")
        paths = certificate(Path(folder), "source") if options.tls else ("", "")
        server = RangeServer(False, Certificate.load(*paths, names), options.senders)
    table = Table()
    with SharedImage.create(options.mib << 20, "bench source") as image:
        image.tensor().fill_(1)
        for kib in options.range_kib:
            table.add(one(options, server, image, kib << 10))
    server.close()
    write_json(options.json, {"options": vars(options), "rows": table.rows})


if __name__ == "__main__":
    main(sys.argv[1:])
