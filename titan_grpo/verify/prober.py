"""A client that requests log-probabilities of fixed prompts from a server during syncs, and a
reference for given weights: transformers in fp32, independent of the trainer's and the server's
code."""

import random
import threading
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from titan_grpo.engines.http import SyncDriver
from titan_grpo.engines.server import dialect
from titan_grpo.errors import ServerRefused, ServerUnreachable
from titan_grpo.verify.outcome import Probe


class ReferenceModel:
    """Model whose weights are replaced for each computation. ``folder`` has its config.json."""

    def __init__(self, folder: Path, prompts: Sequence[Sequence[int]]) -> None:
        """``prompts`` have equal lengths, [prompts, tokens]."""
        from transformers import AutoConfig, AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(folder), dtype=torch.float32
        ).eval()
        self._tokens = torch.tensor(prompts, dtype=torch.int64)

    def logprobs(self, weights: Path) -> tuple[tuple[float, ...], ...]:
        """Return the log-probability of every token but the first, in nats, [prompts][tokens - 1],
        under a safetensors file's weights.

        Raises ValueError if the file lacks the model's tensors (a tied head may be missing).
        """
        tensors = {name: t.float() for name, t in load_file(weights).items()}
        missing, unexpected = self._model.load_state_dict(tensors, strict=False)
        ties = self._model.config.tie_word_embeddings
        tied = set(self._model._tied_weights_keys or ()) if ties else set()
        if set(missing) - tied or unexpected:
            raise ValueError(
                f"{weights} must hold the model's tensors: missing {missing}, unexpected"
                f" {unexpected}"
            )
        with torch.inference_mode():
            logits = self._model(self._tokens).logits
        values = logits.log_softmax(-1)[:, :-1].gather(2, self._tokens[:, 1:, None])[..., 0]
        return tuple(tuple(float(x) for x in row) for row in values)


REQUEST_S = 60.0
"""Deadline of one request, which may have to wait for a commit."""

JOIN_S = 5.0
"""How long ``__exit__`` waits for the request in flight."""

PACE_S = 0.02
"""Pause between two requests: the server shares its cores with the trainer's ranks."""

START_PACE_S = 0.25
"""The same before anything can be updated, while the ranks start."""

MAX_ERRORS = 3
PROMPTS, TOKENS = 3, 32
FIRST_ID, LAST_ID = 4, 124
"""Ids of ordinary tokens of the tiny models."""


def fixed_prompts() -> list[list[int]]:
    """Return PROMPTS sequences of TOKENS random token ids, always the same."""
    draw = random.Random(0)
    return [[draw.randrange(FIRST_ID, LAST_ID) for _ in range(TOKENS)] for _ in range(PROMPTS)]


class Prober:
    """Thread that sends one request at a time, so that answers come in the order of requests.

    Each prompt fits into one forward pass, and each request has its own cache salt: no answer may
    use prefixes that other weights left in the cache.
    """

    def __init__(
        self,
        url: str,
        prompts: Sequence[Sequence[int]],
        engine: str,
        begun: Callable[[], bool],
    ) -> None:
        """``begun``: whether a commit may come; until then requests are rare."""
        self._begun = begun
        self._url, self._prompts, self._speak = url, prompts, dialect(engine)
        self._changed = threading.Condition()
        self._probes: list[Probe] = []
        self._errors: list[str] = []
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prober", daemon=True)

    def __enter__(self) -> "Prober":
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stopping.set()
        # Bounded: a request to a paused server ends only when the owner stops that server.
        self._thread.join(JOIN_S)

    @property
    def probes(self) -> tuple[Probe, ...]:
        with self._changed:
            return tuple(self._probes)

    @property
    def errors(self) -> tuple[str, ...]:
        """Failed requests; after MAX_ERRORS the thread ends."""
        with self._changed:
            return tuple(self._errors)

    def wait_more(self, count: int, timeout_s: float) -> bool:
        """Wait for ``count`` further answers to requests that start from now on. False if they do
        not come within ``timeout_s`` seconds; True also after MAX_ERRORS failures."""
        with self._changed:
            # Plus one: the request in flight may have been computed before this call.
            goal = len(self._probes) + count + 1
            return self._changed.wait_for(
                lambda: len(self._probes) >= goal or len(self._errors) >= MAX_ERRORS, timeout_s
            )

    def _run(self) -> None:
        with SyncDriver(self._url) as driver:
            number = 0
            while not self._stopping.is_set() and len(self._errors) < MAX_ERRORS:
                try:
                    probe = self._ask(driver, number % len(self._prompts))
                except (ServerUnreachable, ServerRefused) as error:
                    with self._changed:
                        self._errors.append(str(error))
                        self._changed.notify_all()
                    continue
                number += 1
                self._stopping.wait(PACE_S if self._begun() else START_PACE_S)
                with self._changed:
                    self._probes.append(probe)
                    self._changed.notify_all()

    def _ask(self, driver: SyncDriver, prompt: int) -> Probe:
        before = driver.run(self._speak.label())
        logprobs = driver.run(self._speak.score(self._prompts[prompt], REQUEST_S, uuid.uuid4().hex))
        return Probe(prompt, logprobs, before, driver.run(self._speak.label()))
