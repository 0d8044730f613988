"""What an engine's module offers: pure functions that turn arguments into Calls. Whoever talks to a server of either kind
asks ``dialect(name)`` for its module.
"""

from collections.abc import Sequence
from typing import Protocol

from titan_grpo.engines import sglang, vllm
from titan_grpo.engines.calls import Call
from titan_grpo.engines.sampling import Sampled, Sampling
from titan_grpo.engines.streamed import StreamedCall
from titan_grpo.errors import ProtocolError


class Dialect(Protocol):
    """One engine's HTTP interface. Modules implement it: engines/vllm.py, engines/sglang.py.

    Weights and pauses are not here: what a lane needs of them is ``engines.control.ServerControl``.
    """

    NAME: str
    """As in ``rollout.engine``."""

    def health(self, timeout_s: float = ...) -> Call[None]:
        """Answered while the server generates; may refuse or hang while it is paused."""

    def alive(self, timeout_s: float = ...) -> Call[None]:
        """Answered at once while the server's front lives: also paused, loading, or behind a long queue."""

    def label(self, timeout_s: float = ...) -> Call[str]:
        """The label of the weights that the server shows."""

    def models(self, timeout_s: float = ...) -> Call[list[str]]:
        """Names of the served models."""

    def world_size(self, timeout_s: float = ...) -> Call[int]:
        """Workers that hold a part of the weights."""

    def generate(self, prompt_ids: Sequence[int], sampling: Sampling, timeout_s: float) -> Call[Sampled]:
        """Sample one continuation of a token-id prompt, with the log-probability of each sampled token under the
        distribution it was drawn from: plain softmax at the temperature, whatever the model's directory recommends."""

    def stream(self, prompt_ids: Sequence[int], sampling: Sampling, timeout_s: float, interval: int = ...) -> StreamedCall:
        """``generate`` with an answer in pieces of ``interval`` tokens, the first and the last of which may be shorter;
        ``timeout_s`` bounds each silence."""

    def score(self, token_ids: Sequence[int], timeout_s: float, cache_salt: str = ...) -> Call[tuple[float, ...]]:
        """Log-probabilities of a given sequence at temperature 1: ``len(token_ids) - 1`` values, of all tokens but the first.

        With a ``cache_salt`` that no other request has, nothing in the answer comes from the prefix cache.
        """

    def abort_all(self, timeout_s: float = ...) -> Call[None]:
        """End all requests in flight; each of them is answered with what it has."""


DIALECTS: dict[str, Dialect] = {vllm.NAME: vllm, sglang.NAME: sglang}


def dialect(name: str) -> Dialect:
    """The module of an engine. ProtocolError for a name that is none: whoever calls has asked the server first."""
    try:
        return DIALECTS[name]
    except KeyError:
        raise ProtocolError(f"an engine must be one of {', '.join(DIALECTS)}, got {name!r}: the server was not asked") from None
