"""Shared images: between processes, without /dev/shm, without leaks."""

import json
import os
import resource
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from tests.rigs.interpreter import python
from titan_grpo.errors import ConfigError, ProtocolError, SyncError
from titan_grpo.layout import image as module
from titan_grpo.layout.image import ImageAddress, SharedImage
from titan_grpo.layout.memory import available_memory

WRITER = """
import json, sys
from titan_grpo.layout.image import ImageAddress, SharedImage
with SharedImage.attach(ImageAddress.from_json(json.loads(sys.argv[1]))) as image:
    image.tensor()[7:9] = 5
    print(image.tensor()[0].item())
"""


def test_two_processes_see_the_same_bytes() -> None:
    with SharedImage.create(4096, "test") as image:
        assert not image.tensor().any()
        image.buffer[0] = 42
        other = python("-c", WRITER, json.dumps(image.address.to_json()))
        assert other.stdout == "42\n", other.stderr
        assert image.tensor()[:9].tolist() == [42, 0, 0, 0, 0, 0, 0, 5, 5]


def test_a_tensor_outlives_the_image_that_made_it() -> None:
    image = SharedImage.create(1 << 20, "test")
    tensor, view = image.tensor(), image.buffer
    image.close()
    image.close()
    tensor.fill_(3)
    assert view[-1] == 3
    with pytest.raises(ProtocolError, match="closed"):
        _ = image.buffer


def has_descriptor(image: str) -> bool:
    """Whether this process has a descriptor of an image. Those of other tests come and go."""
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed since
            if image in os.readlink(f"/proc/self/fd/{fd}"):
                return True
    return False


def test_closing_and_dropping_the_views_gives_the_memory_back() -> None:
    image = SharedImage.create(1 << 20, "titan_grpo-leak")
    tensor = image.tensor()
    assert "titan_grpo-leak" in Path("/proc/self/maps").read_text()
    image.close()
    del tensor
    assert "titan_grpo-leak" not in Path("/proc/self/maps").read_text()
    assert not has_descriptor("titan_grpo-leak")


def test_an_image_can_not_be_shrunk_under_the_others() -> None:
    with SharedImage.create(8192, "test") as image, pytest.raises(PermissionError):
        os.ftruncate(image.address.fd, 4096)


def test_the_image_of_a_dead_process_is_a_sync_error() -> None:
    made = python(
        "-c",
        "from titan_grpo.layout.image import *; import json;"
        " print(json.dumps(SharedImage.create(4096, 'x').address.to_json()))",
    )
    address = ImageAddress.from_json(json.loads(made.stdout))
    with pytest.raises(SyncError, match=f"process {address.pid} could not be opened"):
        SharedImage.attach(address)


def test_a_descriptor_that_became_another_file_is_refused() -> None:
    with SharedImage.create(4096, "old") as old, SharedImage.create(4096, "new") as new:
        wrong = ImageAddress(new.address.pid, new.address.fd, 4096, old.address.inode)
        with pytest.raises(SyncError, match="it was replaced"):
            SharedImage.attach(wrong)


def test_an_image_that_the_machine_can_not_hold_is_refused_before_it_is_made() -> None:
    with pytest.raises(ConfigError, match="the weight image huge needs"):
        SharedImage.create(available_memory() * 2, "huge")


def test_memory_that_others_take_meanwhile_ends_the_allocation_before_the_oom_killer_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers that start together on a host each find the same memory free."""
    piece = 1 << 20
    monkeypatch.setattr(module, "PIECE_BYTES", piece)
    monkeypatch.setattr(module, "PIECES_PER_CHECK", 2)
    (tmp_path / "memory.max").write_text(str(8 * piece))
    usage = tmp_path / "memory.current"
    usage.write_text("0")
    # The cgroup of a container, as the kernel shows it.
    monkeypatch.setattr(available_memory, "__defaults__", (Path("/proc"), tmp_path))
    made: list[int] = []

    def others_take(nbytes: int) -> None:
        made.append(nbytes)
        usage.write_text(str(nbytes + 2 * piece))

    SharedImage.create(6 * piece, "fits", made=others_take).close()
    made.clear()
    usage.write_text("0")
    said = f"the rest of the weight image late needs {6 * piece} bytes .* available are {4 * piece}"
    with pytest.raises(ConfigError, match=said):
        SharedImage.create(8 * piece, "late", made=others_take)
    assert made == [piece, 2 * piece]
    # One that still allocated could write to the descriptor's next file.
    assert not [t for t in threading.enumerate() if t.name.startswith("memory")]
    assert not has_descriptor("late")


def test_an_image_that_a_limit_of_the_process_forbids_is_refused_with_the_remedy() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(ConfigError, match=r"image too-large must have 8192 bytes .*ulimit"):
            SharedImage.create(8192, "too-large")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not has_descriptor("too-large")


NO_THREAD = """
import json, os, resource, sys
from titan_grpo.layout.image import ImageAddress, SharedImage
before = os.listdir("/proc/self/fd")
pages = int(open("/proc/self/statm").read().split()[0])
limit = pages * os.sysconf("SC_PAGESIZE") + (4 << 20)  # less than a thread's stack
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    SharedImage.attach(ImageAddress.from_json(json.loads(sys.argv[1])), serve=True)
except RuntimeError as error:
    print(error)
print(len(os.listdir("/proc/self/fd")) - len(before))
"""


def test_an_image_that_is_not_attached_after_all_leaves_no_descriptor_open() -> None:
    with SharedImage.create(4096, "test") as image:
        other = python("-c", NO_THREAD, json.dumps(image.address.to_json()))
    assert other.stdout == "can't start new thread\n0\n", other.stderr


def test_an_image_that_no_other_process_could_find_is_refused_when_it_is_made() -> None:
    """In a new pid namespace, where /proc is still the one outside."""

    def apart(*command: str) -> subprocess.CompletedProcess[str]:
        inside = ["unshare", "--pid", "--fork", *command]
        return subprocess.run(inside, capture_output=True, text=True, timeout=120, check=False)

    if (probe := apart("true")).returncode != 0:
        pytest.skip(f"no pid namespace can be made here: {probe.stderr.strip()}")
    code = "from titan_grpo.layout.image import *; SharedImage.create(4096, 'x')"
    assert "start it with the /proc of its own" in apart(sys.executable, "-c", code).stderr


SMALL_SHM = """
import os
from titan_grpo.layout.image import SharedImage
shm = os.statvfs("/dev/shm")
assert shm.f_blocks * shm.f_frsize == 64 << 20, shm
with SharedImage.create(256 << 20, "big") as image, SharedImage.attach(image.address) as other:
    image.tensor().fill_(9)
    print(int((other.tensor() == 9).sum()))
"""


def in_a_small_shm(*command: str) -> list[str]:
    script = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"'
    return ["unshare", "--mount", "sh", "-c", script, "sh", *command]


def test_an_image_of_256_mib_works_where_dev_shm_has_64_mb() -> None:
    probe = subprocess.run(
        in_a_small_shm("true"), capture_output=True, text=True, timeout=60, check=False
    )
    if probe.returncode != 0:
        pytest.skip(
            f"no mount namespace with its own /dev/shm can be made here: {probe.stderr.strip()}"
        )
    command = in_a_small_shm(sys.executable, "-c", SMALL_SHM)
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.stdout == f"{256 << 20}\n", done.stderr
