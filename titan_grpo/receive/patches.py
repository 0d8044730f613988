"""Apply patches (layout.delta) that turn a receiver's staged version into a newer one."""

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

from titan_grpo.errors import PeerError, TransferFailed
from titan_grpo.layout.image import SharedImage
from titan_grpo.layout.manifest import Manifest, Part
from titan_grpo.protocol.messages import Patch
from titan_grpo.receive.fetch import TcpReader
from titan_grpo.runkey import Key

logger = logging.getLogger(__name__)


def apply_patches(
    image: SharedImage,
    manifest: Manifest,
    patches: Sequence[Patch],
    key: Key | None,
    wait_s: float,
    threads: int,
) -> tuple[frozenset[int], int]:
    """Read patches of the staged version, and apply them to the image: the parts at the same time,
    each from its own host, on ``threads`` threads at most. If a patch is lost or bad, its part
    keeps the earlier ones; the fetch reads the blocks that still differ.

    Return the patched parts, and the bytes read; none if the patches are larger than the image.
    ``key``: Hashing.range_key. ``wait_s``: seconds to wait for a source's next bytes.
    """
    parts = sorted({patch.part for patch in patches if patch.part < len(manifest.parts)})
    if not parts or sum(patch.nbytes for patch in patches) > image.buffer.nbytes:
        return frozenset(), 0

    def change(part: int) -> int:
        chain = [patch for patch in patches if patch.part == part]
        return _change(image, manifest.parts[part], chain, key, wait_s)

    with ThreadPoolExecutor(min(threads, len(parts)), thread_name_prefix="patch") as pool:
        return frozenset(parts), sum(pool.map(change, parts))


def _change(
    image: SharedImage, part: Part, chain: Sequence[Patch], key: Key | None, wait_s: float
) -> int:
    # Imported here: without patches a receiver needs no numpy.
    import numpy as np

    from titan_grpo.layout import delta

    read = 0
    try:
        for patch in chain:
            data = bytearray(patch.nbytes)
            with closing(TcpReader(patch.source, key, wait_s)) as reader:
                reader.read_into(0, memoryview(data))
            read += patch.nbytes
            delta.apply(memoryview(data), np.frombuffer(image.buffer, np.uint8), part)
    except (TransferFailed, PeerError) as error:
        logger.info("part %d is read from the version, without a patch: %s", chain[0].part, error)
    return read
