"""The engine's end of a streamed transfer: tensors in manifest order, as their bytes come in."""

from collections.abc import Callable, Iterator
from itertools import chain

import torch

from titan_grpo.errors import TitanGrpoError, TransferFailed
from titan_grpo.layout.manifest import Manifest, TensorSpec
from titan_grpo.receive.window import copy_out
from titan_grpo.receive.workers import Workers

Tensors = Iterator[tuple[str, torch.Tensor]]
Take = Callable[[int], int]
"""(bytes consumed) -> bytes that may be read, or PeerError; rank 0's only."""


class Feed:
    """One version on its way through a window. All workers of an engine walk through it in step."""

    def __init__(self, ring: torch.Tensor, manifest: Manifest, workers: Workers, take: Take) -> None:
        """``ring``: uint8[window bytes], filled by the receiver."""
        self._ring, self._manifest, self._workers, self._take = ring, manifest, workers, take
        self._filled = 0
        self.broken = ""

    def tensors(self) -> Tensors:
        """(HF name, tensor of its own memory), each when its last block is checked; ends when the whole version is.

        Copies and not views: engines keep a layer's tensors until the layer is complete, and the ring goes on.
        TransferFailed, on every worker alike, if the transfer or a worker failed; ``broken`` then says why.
        """
        for spec in self._manifest.tensors:
            yield spec.name, self._tensor(spec)
        while self._filled < self._manifest.total_bytes:
            self._advance()

    def _tensor(self, spec: TensorSpec) -> torch.Tensor:
        flat = torch.empty(spec.nbytes, dtype=torch.uint8)
        done = 0
        while done < spec.nbytes:
            start = spec.offset + done
            if self._filled <= start:
                self._advance()
                continue
            size = min(self._filled - start, spec.nbytes - done)
            copy_out(self._ring, start, flat[done : done + size])
            done += size
        return flat.view(getattr(torch, spec.dtype)).view(spec.shape)

    def _advance(self) -> None:
        """Give back what was read (all there is) and wait for more. Called by every worker at the same bytes."""
        # first: a worker whose load broke off says so in its place of this very exchange (EngineSide)
        failed = [why for why in self._workers.gather("") if why]
        if not failed:
            filled, why = self._workers.share(self._ask())
            self._filled = filled
            failed = [why] if why else []
        if failed:
            self.broken = failed[0]
            raise TransferFailed(self.broken)

    def _ask(self) -> tuple[int, str]:
        if self._workers.rank != 0:
            return 0, ""
        try:
            return self._take(self._filled), ""
        except (TitanGrpoError, OSError, ValueError, KeyError) as error:
            # anything else would leave the other workers in an exchange without us
            return self._filled, f"{type(error).__name__}: {error}"


def begun(tensors: Tensors) -> Tensors:
    """The same tensors, once the first one is there: until then nothing of the engine has to be touched."""
    first = next(tensors)
    return chain([first], tensors)
