"""Start, watch and end subprocesses. Every subprocess of the package is started here.

``main`` is the guard that ``Guarded`` starts between itself and a command."""

import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from titan_grpo.runkey import KEY_VARIABLES

TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables that torchrun sets for each of its processes, all or none."""

TORCHRUN_NAMES = {*TORCHRUN, "GROUP_RANK", "GROUP_WORLD_SIZE", "OMP_NUM_THREADS"}
TORCHRUN_NAMES |= {"ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE"}
TORCHRUN_PREFIXES = ("TORCHELASTIC_", "TORCH_NCCL_", "PET_")

PROXIES = ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")
"""Environment variables that name a proxy for http."""

PR_SET_PDEATHSIG = 1
SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
"""Number of the system call by machine; libc has no function for it."""

KILL_S = 5.0
"""Seconds to wait for a process after SIGKILL."""

STACKS_S = 1.0
"""Seconds for a process that stands still to write the stacks of its threads."""

GUARD_START_S = 30.0
SHARED_MEMORY = Path("/dev/shm")

ENDING = signal.SIGTERM, signal.SIGHUP, signal.SIGINT
"""Signals to a whole process group, or to all processes of a job, that end it."""

SIGNALLED = 128
"""Exit code of a process ended by a signal, minus the signal's number."""

received: list[int] = []
"""The one of ENDING by which this process ends (``stop``), if any. Its SystemExit alone does not
tell: code that catches it may raise another error in its place."""

_unbroken = 0
"""How many ``unbroken`` blocks the main thread is in."""

Output = int | IO[Any] | None
"""Destination of stdout or stderr, as for subprocess.Popen; None: this process's own."""


@contextmanager
def unbroken() -> Iterator[None]:
    """Let a short block of the main thread end before a signal that comes meanwhile ends this
    process. For what a close finds unusable if it was begun and not finished; no waits in it."""
    global _unbroken
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are handled in the main thread alone
        return
    before = len(received)
    _unbroken += 1
    try:
        yield
    finally:
        _unbroken -= 1
        if len(received) > before:
            raise SystemExit(SIGNALLED + received[-1])


def stop(number: int, frame: Any) -> None:
    """Handle one of ENDING: raise SystemExit, and ignore further ones."""
    received.append(number)
    # torchrun repeats its signals, which would interrupt the closing; it kills after its grace.
    for each in ENDING:
        signal.signal(each, signal.SIG_IGN)
    if not _unbroken:
        raise SystemExit(SIGNALLED + number)


def stop_on_signals() -> None:
    """End this rank of torchrun's in the ordinary way at the first of ENDING: lanes, rollouts and
    servers are closed."""
    # If torchrun is killed, its ranks (each in a session of its own) would go on training.
    end_with_parent(signal.SIGTERM)
    # SIGHUP too: torchrun hands a terminal's end on, also under nohup.
    for each in ENDING:
        signal.signal(each, stop)


def without_torchrun(base: Mapping[str, str]) -> dict[str, str]:
    """Return ``base`` without torchrun's variables: a process that inherits them takes itself for
    a rank and hangs in the rendezvous."""
    return {
        name: value
        for name, value in base.items()
        if name not in TORCHRUN_NAMES and not name.startswith(TORCHRUN_PREFIXES)
    }


def past_proxies(base: Mapping[str, str], host: str) -> dict[str, str]:
    """Return the variables that except ``host`` from the proxies that ``base`` names; none if it
    names no proxy, or excepts the host already. A proxy elsewhere takes a loopback address for its
    own. Pure.

    >>> past_proxies({"HTTP_PROXY": "http://proxy:3128", "NO_PROXY": "a.b"}, "127.0.0.1")
    {'no_proxy': 'a.b,127.0.0.1', 'NO_PROXY': 'a.b,127.0.0.1'}
    """
    excepted = base.get("no_proxy") or base.get("NO_PROXY") or ""
    known = {name.strip() for name in excepted.split(",")}
    if not any(base.get(name) for name in PROXIES) or known & {host, "*"}:
        return {}
    # Both: libraries differ in the name that they prefer.
    return dict.fromkeys(("no_proxy", "NO_PROXY"), ",".join(filter(None, (excepted, host))))


def helper_environment(base: Mapping[str, str], *dropped: str) -> dict[str, str]:
    """Return the environment of a helper process: no rank, one thread, no run key (a helper that
    needs a key gets it over its socket), and nothing of ``dropped``. Pure."""
    kept = without_torchrun(base)
    for name in (*KEY_VARIABLES, *dropped):
        kept.pop(name, None)
    # Otherwise each lost connection logs a C++ stack trace.
    few = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    return kept | few | {"TORCH_CPP_LOG_LEVEL": "ERROR"}


def start_module(
    module: str,
    *arguments: str,
    env: Mapping[str, str],
    outputs: tuple[Output, Output] = (None, None),
    new_session: bool = False,
    ignored: Sequence[int] = (signal.SIGINT,),
) -> tuple["subprocess.Popen[bytes]", socket.socket]:
    """Start a process that calls ``main(socket, parent, *arguments)`` of a module, with one end of
    a socket pair and this process's id. Return the process and the other end, which the kernel
    closes when this process ends.

    ``outputs``: its stdout and stderr. ``new_session``: signals to our group or terminal do not
    reach the process. ``ignored``: signals that it ignores, from its start on. Raises OSError.
    """
    # Not inheritable, except by pass_fds: if another child had our end, it would stay open after
    # this process ends, and the new process would wait forever.
    ours, theirs = socket.socketpair()
    ends = str(theirs.fileno()), str(os.getpid())
    numbers = ",".join(str(int(number)) for number in ignored)
    command = [sys.executable, "-m", "titan_grpo.run_main", numbers, module, *ends, *arguments]
    # The new process inherits this mask: until run_main ignores the signals, they would end it.
    # Those that come for this thread meanwhile are delivered afterwards.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ignored)
    try:
        with theirs:  # close our copy: else the child's end would not end the stream
            process = subprocess.Popen(
                command,
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=outputs[0],
                stderr=outputs[1],
                pass_fds=[theirs.fileno()],
                start_new_session=new_session,
            )
    except BaseException:
        ours.close()
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    return process, ours


def run_command(
    command: Sequence[str], env: Mapping[str, str], timeout_s: float, output: Output = None
) -> str:
    """Run a user's command to its end, in a process group of its own. ``output`` gets its stdout
    and stderr (None: they are ours). Return why it failed, or ""."""
    try:
        process = subprocess.Popen(
            list(command),
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    except OSError as error:
        return f"it cannot be started: {error}"
    try:
        status = wait_process(process, timeout_s)
    except subprocess.TimeoutExpired:
        end(process, KILL_S)
        return f"it was ended after {timeout_s:g} s"
    except BaseException:  # Ctrl-C of ours does not reach its session: it would live on
        end(process, KILL_S)
        raise
    return f"it ended with {how_ended(status)}" if status else ""


def how_ended(status: int | None) -> str:
    """Return in words how a process ended. ``status``: its exit status, which is negative after a
    signal, or (of a guard, or a shell) SIGNALLED plus the signal's number; None if unknown. Pure.

    >>> how_ended(2), how_ended(-15), how_ended(SIGNALLED + 9)
    ('exit code 2', 'signal 15', 'signal 9 (out of memory, maybe)')
    """
    if status is None:
        return "an unknown exit status"
    number = -status if status < 0 else status - SIGNALLED
    if number not in list(signal.Signals):
        return f"exit code {status}"
    # What the kernel ends for want of memory says nothing itself.
    return f"signal {number}{' (out of memory, maybe)' if number == signal.SIGKILL else ''}"


def end_with_parent(number: int = signal.SIGKILL) -> None:
    """Have the kernel send ``number`` to this process when the *thread* that started it ends.

    Nothing is sent if the parent ended before this call: compare os.getppid() if that matters.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)


def use_any_memory() -> None:
    """Allocate on all NUMA nodes of the host from here on, whatever policy was inherited. Call it
    before the process has threads."""
    if (number := SET_MEMPOLICY.get(os.uname().machine)) is not None:
        # A refusal (by a container) is harmless: there the parent could set no policy either.
        ctypes.CDLL(None).syscall(number, 0, None, 0)


def exit_with_parent(parent: int) -> None:
    """Start a thread that ends this process alone when its ``parent`` has ended. The end of a
    socket's stream does not show that: a child that the parent forked keeps it open."""

    def watch() -> None:
        if os.getppid() == parent:
            with suppress(ProcessLookupError):
                # no deadline: ends with the parent
                readable(None, os.pidfd_open(parent))
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def when_ended(pid: int, call: Callable[[], object]) -> None:
    """Start a thread that makes a call when a process, of any parent, has ended. Without a free
    thread or descriptor the call is never made."""

    def wait() -> None:
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            pass  # it has ended
        except OSError:
            return
        else:
            try:
                # no deadline: ends with that process
                readable(None, pidfd)
            finally:
                os.close(pidfd)
        call()

    with suppress(RuntimeError):
        threading.Thread(target=wait, name=f"end of {pid}", daemon=True).start()


def wait_process(process: "subprocess.Popen[Any]", timeout_s: float) -> int:
    """Wait without the polling of ``process.wait(timeout_s)``; return the exit status. Raises
    subprocess.TimeoutExpired. Several threads may wait for one process."""
    if process.poll() is None:
        try:
            pidfd = os.pidfd_open(process.pid)
        except ProcessLookupError:  # another thread has reaped it
            # no deadline: the process has ended
            return process.wait()
        except OSError:  # no descriptor is left
            return process.wait(timeout_s)
        try:
            if not readable(timeout_s, pidfd):
                raise subprocess.TimeoutExpired(process.args, timeout_s)
        finally:
            os.close(pidfd)
    # no deadline: the process has ended
    return process.wait()


def write_stacks(process: "subprocess.Popen[Any]") -> None:
    """Have a process of ``start_module`` that stands still write the stacks of its threads to its
    stderr, and wait STACKS_S for that. It must not be stopped: its threads would run again while
    they are read, which may end the process."""
    process.send_signal(signal.SIGUSR1)  # see run_main
    with suppress(subprocess.TimeoutExpired):
        wait_process(process, STACKS_S)


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped, by SIGSTOP or a debugger."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            state = file.read().rpartition(")")[2].split()[0]
    except OSError:  # it has ended
        return False
    return state in "Tt"


def end(process: "subprocess.Popen[Any]", grace_s: float) -> None:
    """End the leader of a process group and all its descendants: SIGTERM to the group, SIGKILL to
    all after the grace. Bounded by the grace and KILL_S. Idempotent."""
    # Find the descendants while their parents live: torchrun starts each rank in its own session,
    # which signals to the group do not reach.
    below = _descendants(process.pid) if process.poll() is None else []
    for number, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, KILL_S)):
        if process.poll() is None:
            signal_group(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                wait_process(process, wait_s)
    # After a clean exit of the leader too: others of its group may still run.
    signal_group(process.pid, signal.SIGKILL)
    for pidfd in below:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        os.close(pidfd)


def signal_group(group: int, number: int) -> None:
    """Signal a process group, if it still exists."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


class Guarded:
    """A command in a process group of its own that ends with this process, even if it is killed.

    PR_SET_PDEATHSIG alone is not enough: it follows the forking thread, and signals the leader
    only. So a guard process has the other end of a socket; when ours closes, the guard ends the
    group and all its descendants.
    """

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        grace_s: float,
        stdout: Output = None,
        stderr: Output = subprocess.STDOUT,
    ) -> None:
        """Start the command. ``grace_s``: seconds between SIGTERM and SIGKILL. A command that
        cannot be started appears as one that has ended."""
        self._grace_s = grace_s
        self.guard, self._owner = start_module(
            "titan_grpo.subprocesses",
            *(str(grace_s), *command),
            env=env,
            outputs=(stdout, stderr),
            new_session=True,
        )
        self._owner.settimeout(GUARD_START_S)
        try:
            # no deadline: the socket has a timeout
            self.group = int(self._owner.makefile("rb").readline() or b"0")
        except (OSError, ValueError):
            self.group = 0
        """Process id of the command, which is its process group; 0 if it did not start."""

    def poll(self) -> int | None:
        """Exit status of the command (128 + number after a signal); None while it runs."""
        return self.guard.poll()

    def signal(self, number: int) -> None:
        """Signal the whole group; SIGSTOP and SIGCONT freeze and thaw it."""
        if self.group and self.guard.poll() is None:
            signal_group(self.group, number)

    def stop(self) -> None:
        """Send SIGTERM, after the grace SIGKILL, and wait for the end (bounded). Idempotent."""
        self._owner.close()
        self.signal(signal.SIGCONT)
        try:
            wait_process(self.guard, self._grace_s + 2 * KILL_S)
        except subprocess.TimeoutExpired:
            self.guard.kill()
            wait_process(self.guard, KILL_S)
        # The end of a killed guard ends the command, not the command's children.
        if self.group and self.guard.poll() == -signal.SIGKILL:
            signal_group(self.group, signal.SIGKILL)


def readable(timeout_s: float | None, *fds: int) -> bool:
    """Wait until a descriptor is readable or closed; return False on timeout. select() would be
    limited to descriptors up to 1023."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else max(0.0, timeout_s) * 1000.0))


def _descendants(pid: int) -> list[int]:
    """Return a pidfd, which is safe from reuse of pids, of each descendant of ``pid``."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            # The name in brackets may hold anything, no text even: another user's process must not
            # keep this one's alive. The parent is the second field after it.
            parent = int(stat.read_bytes().rpartition(b")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    out: list[int] = []
    pending = list(children.get(pid, ()))
    while pending:
        child = pending.pop()
        pending += children.get(child, ())
        with suppress(OSError):
            out.append(os.pidfd_open(child))
    return out


def _shared_memory(in_group: Callable[[int], bool]) -> set[int]:
    """Return the inodes of all files in /dev/shm that are mapped by a process whose process group
    satisfies ``in_group``.

    Inodes and not paths: glibc creates a named semaphore under a temporary name, which the mapping
    keeps, and links it to its own.
    """
    out: set[int] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            if in_group(os.getpgid(int(maps.parent.name))):
                # address, permissions, offset, device, inode, path
                lines = (line.split(None, 5) for line in maps.read_bytes().splitlines())
                out |= {int(f[4]) for f in lines if f[-1].startswith(b"%b/" % bytes(SHARED_MEMORY))}
    return out


def main(owner: socket.socket, _: int, grace_s: str, *command: str) -> int:
    """Run the command until it ends, its owner ends, or SIGTERM comes; then end the rest of its
    group. Return the command's exit status (128 + number after a signal).

    Remove the group's files in /dev/shm: SGLang's schedulers leave 25 MB each at tensor parallel 2
    and a semaphore, and containers often have 64 MB.
    """
    woken, wake = socket.socketpair()
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno())
    signal.signal(signal.SIGTERM, lambda *_: None)
    # run_main ignores SIGINT, and the command would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    child = subprocess.Popen(
        command, process_group=0, preexec_fn=end_with_parent, stdin=subprocess.DEVNULL
    )
    with suppress(OSError):
        owner.sendall(f"{child.pid}\n".encode())
    # no deadline: the owner's end, a signal, or the command's end
    readable(None, owner.fileno(), woken.fileno(), os.pidfd_open(child.pid))
    left = _shared_memory(lambda group: group == child.pid)
    end(child, float(grace_s))
    left -= _shared_memory(lambda group: group != child.pid)
    for path in SHARED_MEMORY.iterdir():
        with suppress(OSError):
            if path.stat().st_ino in left:
                path.unlink()
    status = wait_process(child, KILL_S)
    return status if status >= 0 else 128 - status
