"""The receiver's process, one per epoch: child of the engine's worker, started by ReceiverHandle.

A process of its own, because a communicator can end the process that holds it (gloo aborts when
more bytes come than announced; NCCL's watchdog aborts too), and because an epoch that hangs can be
killed without taking anything else with it.
"""

import argparse
import logging
import os
import socket
import threading
import traceback
from contextlib import suppress
from typing import Any

from titan_grpo.errors import PeerError, TitanGrpoError
from titan_grpo.protocol.messages import Applied, Commit, Hello, Joined
from titan_grpo.receive.receiver import CERTIFICATE, CERTIFICATE_KEY, Place, Receiver
from titan_grpo.runkey import EpochKeys
from titan_grpo.subprocesses import end_with_parent
from titan_grpo.unix_rpc import Channel

REPLY_S = 10.0
"""How long an answer to the engine may block, in seconds."""

RELAY_HOST = "TITAN_GRPO_RELAY_HOST"
"""Environment variable: see receiver.Place.host."""

ZONE = "TITAN_GRPO_ZONE"
"""Environment variable: see receiver.Place.zone."""

LAST_LINE = 0
"""Number of the line that a process leaves for the engine at its end; requests count from 1."""

log = logging.getLogger("titan_grpo.receive")


def leave(code: int) -> None:
    """End without running destructors: a process group's destructor blocks on, or aborts over, an
    unfinished operation."""
    logging.shutdown()
    os._exit(code)


def converse(receiver: Receiver, channel: Channel) -> None:
    """Thread: the epoch with the lane; the process ends with it."""
    code = 0
    try:
        receiver.run()
        log.info("the trainer closed the epoch")
    except TitanGrpoError as error:
        log.warning("epoch ended: %s; the engine keeps its version", error)
        code = 3
    except Exception:  # noqa: BLE001 - top of a thread: the lane would wait for its deadline
        log.error("epoch ended by a bug; the engine keeps its version\n%s", traceback.format_exc())
        code = 4
    with suppress(PeerError):  # the engine has ended too
        channel.send({"id": LAST_LINE, "ok": True, "last_sign_s": receiver.signed_s}, REPLY_S)
    # After the last line: the run whose bye is answered may end, and the next one greet at once.
    with suppress(PeerError):
        receiver.confirm_bye()
    leave(code)


def respond(receiver: Receiver, message: dict[str, Any]) -> dict[str, Any]:
    """Answer one request of the engine."""
    try:
        match message["op"]:
            case "lend" | "place" as op:
                commit = Commit.from_dict(message["commit"]) if op == "lend" else None
                image, manifest = receiver.place() if commit is None else receiver.lend(commit)
                return {
                    "ok": True,
                    "image": image.to_json(),
                    "manifest": manifest.to_json(),
                    "streamed": receiver.streamed,
                    "timeout_s": receiver.timeout_s,
                }
            case "take":
                filled = receiver.take(int(message["consumed"]), float(message["wait_s"]))
                return {"ok": True, "filled": filled}
            case "last_sign":
                return {"ok": True, "last_sign_s": receiver.last_sign_s()}
            case _:
                receiver.applied(Applied.from_dict(message["applied"]))
                return {"ok": True}
    except TitanGrpoError as error:
        return {"ok": False, "error": str(error)}


def serve(channel: Channel) -> None:
    """Main thread: the engine's requests, until the engine ends."""
    first = channel.receive(REPLY_S)
    if first is None:
        return
    keys = EpochKeys.from_hex(first["keys"]) if first["keys"] else None
    hello, joined = Hello.from_dict(first["hello"]), Joined.from_dict(first["joined"])
    env = os.environ
    certificate = env.get(CERTIFICATE, ""), env.get(CERTIFICATE_KEY, "")
    place = Place(env.get(RELAY_HOST, ""), env.get(ZONE, ""), certificate)
    receiver = Receiver(hello, joined, keys, first["device"], place)
    if first["op"] == "answer":
        receiver.answer()
        return
    talk = receiver, channel
    threading.Thread(target=converse, args=talk, name="epoch", daemon=True).start()
    while (message := channel.receive(None)) is not None:
        channel.send({"id": message["id"], **respond(receiver, message)}, REPLY_S)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    args = parser.parse_args()
    end_with_parent()
    if os.getppid() != args.parent:
        leave(0)  # the engine had ended before
    logging.basicConfig(level=logging.INFO, format="titan_grpo receiver %(process)d: %(message)s")
    try:
        # the engine pins its children too, to a core that is busy generating
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    except OSError as error:
        log.info("the receiver keeps the engine's cores: %s", error)
    code = 0
    try:
        serve(Channel(socket.socket(fileno=args.fd)))
    except TitanGrpoError as error:
        log.warning("%s", error)
        code = 3
    leave(code)


if __name__ == "__main__":
    main()
