"""A version in one piece on rank 0's host, for what saves it: the parts of other hosts are fetched
as a server fetches them."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch

from titan_grpo.config import WeightSync
from titan_grpo.errors import ConfigError, TransferFailed
from titan_grpo.layout.image import SharedImage
from titan_grpo.receive.fetch import Content, Fetch, Open
from titan_grpo.sync.part import Hashing, ImagePool
from titan_grpo.sync.process import SyncProcess
from titan_grpo.sync.slots import Published
from titan_grpo.sync.transports.ranges import MemfdReader, TcpReader


@contextmanager
def whole_image(
    pool: ImagePool, hashing: Hashing, published: Published, config: WeightSync
) -> Iterator[torch.Tensor]:
    """Its bytes, uint8[total_bytes]. With one host these are the slot's own; with several, memory
    for all of them. TransferFailed if a host does not serve its part; ConfigError if the memory is
    not there."""
    manifest, mine = pool.manifest, pool.images[published.slot]
    if not published.elsewhere:
        yield mine.tensor()
        return
    total, wait_s = manifest.total_bytes, config.progress_deadline_s
    sources: dict[int, list[Open]] = {
        source.part: [partial(TcpReader, source, hashing.range_key, wait_s)]
        for source in published.elsewhere
    }
    sources[0] = [partial(MemfdReader, mine.address.to_json(), manifest.parts[0])]
    content = Content(manifest, published.digests, hashing.algorithm, hashing.block_key)
    with SharedImage.create(total, "titan_grpo whole image") as image:
        fetch = Fetch(image, content, sources, config.bucket_bytes)
        within_s = config.lane_deadline_s + total / config.min_rate
        fetch.run(config.connections, within_s, (total,), lambda _: None)
        if fetch.error:
            raise TransferFailed(f"version {published.version} is not whole here: {fetch.error}")
        yield image.tensor()


def with_whole_image(
    worker: SyncProcess,
    published: Published,
    config: WeightSync,
    use: Callable[[torch.Tensor], object],
) -> str:
    """Call ``use`` with it. Why it is not there and what to do, else "": other hosts' parts, or
    memory for them, that are missing at its end must not cost a run."""
    with ExitStack() as stack:
        try:
            image = stack.enter_context(whole_image(worker.pool, worker.hashing, published, config))
        except (ConfigError, TransferFailed) as error:
            return f"{error}; titan-grpo export makes it from the last checkpoint"
        use(image)
    return ""
