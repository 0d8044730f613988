"""What every engine must do with weights: a version whole or not at all, no request lost, no older
prefix reused."""

import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.conformance.crowd import REQUEST_S, prompt
from tests.conformance.engine import (
    MAX_DIFFERENCE,
    EngineUnderTest,
    assert_aborted,
    assert_sound,
    furthest,
    refusal,
    remake,
)
from tests.conformance.reference import Reference, Weights, renamed
from tests.rigs.paced_source import PacedSource
from titan_grpo.config import WeightSync
from titan_grpo.engines import sglang, vllm
from titan_grpo.engines.generation import Sampling
from titan_grpo.engines.http import Call, ignore
from titan_grpo.engines.server import ServerControl
from titan_grpo.errors import PeerError, ServerRefused
from titan_grpo.protocol import pause_guard
from titan_grpo.protocol.messages import Applied, Joined, Label, ServerState, Staged, new_run_id
from titan_grpo.rollout.client import RolloutClient
from titan_grpo.rollout.messages import RolloutSpec
from titan_grpo.runkey import Key
from titan_grpo.sync import pause_guard_main
from titan_grpo.sync.link import LaneLink, LinkOptions, Moved

BUCKET_BYTES = 256 << 10
PREFIX = 140
"""Tokens of a prompt that an engine keeps: more than a block of its cache (vLLM on a CPU: 128)."""

CANDIDATES = 300
"""Sequences among which the clearest are looked for (Reference.clearest)."""

STEP_S = 60.0
"""Deadline of each step of a transfer, in seconds."""


KEY_VARIABLE = "TITAN_GRPO_CONFORMANCE_API_KEY"

ROLLOUTS = RolloutSpec(
    model_dir="",
    base_version=20,
    prompts_per_step=2,
    group_size=8,
    max_completion_tokens=100,
    max_staleness=1,
    api_key_env=KEY_VARIABLE,
)
"""Two batches of long completions in flight."""


class _Broken(Exception):
    """The sender dies here."""


class Sender:
    """A trainer's side of one server: versions 1, 2, ... of a run of its own, made by ``remake``
    with other seeds in folders of ``folder``."""

    def __init__(
        self,
        control: ServerControl,
        run_key: Key | None,
        folder: Path = Path(),
        remake: Callable[[int, Path], Path] = remake,
    ) -> None:
        self.control, self._remake = control, remake
        self.run_id = new_run_id(time.time())
        config = WeightSync(bucket_bytes=BUCKET_BYTES, lane_deadline_s=STEP_S)
        self.options = LinkOptions(config, "tcp", "127.0.0.1", run_key=run_key)
        self.folder = folder / self.run_id
        self.joined: Joined | None = None
        self.epoch = self.number = 0

    def make(self, seed: int, rename: Callable[[str], str] = str) -> tuple[Weights, Path]:
        """Weights to send, and the directory that says what they compute."""
        path = self.folder / f"{seed}"
        if not path.exists():
            self._remake(seed, path)
        return self.weights(renamed(path, rename)), path

    def weights(self, tensors: Mapping[str, torch.Tensor]) -> Weights:
        return Weights(tensors, self.options, self.run_id)

    @contextmanager
    def link(self, weights: Weights) -> Iterator[LaneLink]:
        """A lane of the next epoch that has joined."""
        self.epoch, self.number = self.epoch + 2, 0  # the odd ones are the pause guard's
        link = LaneLink(self.run_id, self.epoch, weights.manifest, self.options)
        try:
            self.joined = link.join(self.control, STEP_S)
            accepted = link.send_manifest()
            assert accepted.ok, accepted.error
            yield link
        finally:
            link.close()

    def stage(
        self, link: LaneLink, weights: Weights, version: int, moved: Moved | None = None
    ) -> Staged:
        """The transfer alone: the receiver has the version, and the server still serves what it
        served. ``moved``: see LaneLink.send."""
        content = weights.image, weights.digests, weights.fingerprint
        self.number += 1
        staged = link.send(self.number, version, *content, moved)
        assert staged.ok, staged.error
        return staged

    def load(self, link: LaneLink, staged: Staged, paused: Callable[[], object] = bool) -> Applied:
        """The first half of the commit of what ``stage`` brought: the server has it, or refused,
        and stays paused. ``paused`` is called between pause and load."""
        self.control.pause()
        paused()
        self.control.load(link.commit(staged).to_dict())
        return link.wait_applied(staged.number, STEP_S)

    def apply(
        self, link: LaneLink, staged: Staged, label: str, paused: Callable[[], object] = bool
    ) -> Applied:
        """The whole commit; the label is ``label`` if the load went well, else what it was."""
        before = self.control.label()
        try:
            applied = self.load(link, staged, paused)
            self.control.finish(label if applied.ok else before)
        finally:
            self.control.resume()
        return applied

    def commit(self, link: LaneLink, weights: Weights, version: int) -> Applied:
        """One transfer and its commit, as a lane does it."""
        return self.apply(link, self.stage(link, weights, version), self.label(version))

    def label(self, version: int) -> str:
        """What the server shows for a version."""
        return f"{self.run_id}:{version}:conformance"

    def sync(self, seed: int, version: int) -> Path:
        """Commit other weights; the directory that says what they compute."""
        weights, path = self.make(seed)
        with self.link(weights) as link:
            applied = self.commit(link, weights, version)
        assert applied.ok, applied.error
        assert applied.fingerprint == weights.fingerprint
        return path

    def sync_each(self, seeds: Sequence[int]) -> Iterator[Path]:
        """Commit weights of these seeds, as versions 1, 2, ... over one lane; after each the
        directory that says what they compute."""
        made = [self.make(seed) for seed in seeds]
        with self.link(made[0][0]) as link:
            for version, (weights, path) in enumerate(made, 1):
                applied = self.commit(link, weights, version)
                assert applied.ok, applied.error
                assert applied.fingerprint == weights.fingerprint
                yield path


@contextmanager
def sender(e: EngineUnderTest) -> Iterator[Sender]:
    """A new run on the server."""
    with e.control() as control:
        yield Sender(control, e.run_key, e.folder, e.remake)


def bring_back(e: EngineUnderTest) -> None:
    """Have the server serve the weights of ``e.model`` again, whoever used it before."""
    with sender(e) as trainer:
        weights = trainer.weights(renamed(e.model))
        with trainer.link(weights) as link:
            applied = trainer.commit(link, weights, 0)
    assert applied.ok, applied.error


def difference(e: EngineUnderTest, folder: Path) -> float:
    """Largest difference between what the server computes and a model directory, over three
    sequences."""
    reference = Reference(folder)
    rows = reference.clearest([prompt(seed, 16) for seed in range(CANDIDATES)], 3)
    apart = []
    for number, ids in enumerate(rows):
        said = e.run(e.speak.score(ids, REQUEST_S, f"{folder}{number}"))
        apart.append(furthest(said, reference.logprobs(ids)))
    return max(apart)


def the_server_computes_what_was_committed_also_the_second_time(e: EngineUnderTest) -> None:
    with sender(e) as trainer:
        for version in (1, 2):
            path = trainer.make(version)[1]
            assert difference(e, path) > 4 * MAX_DIFFERENCE, (
                "other weights must show for this to prove anything"
            )
            assert trainer.sync(version, version) == path
            assert trainer.control.label() == trainer.label(version)
            assert difference(e, path) <= MAX_DIFFERENCE


def the_server_computes_each_version_of_one_lane(e: EngineUnderTest) -> None:
    """The plugin learns what the first load does, and may repeat it without the engine's loader."""
    with sender(e) as trainer:
        for path in trainer.sync_each((5, 6, 7)):
            assert difference(e, path) <= MAX_DIFFERENCE


def requests_are_answered_between_any_two_buckets_of_a_transfer(e: EngineUnderTest) -> None:
    """The engine does not stand still while weights arrive, however slowly: each bucket waits for
    an answer here."""
    source = PacedSource()
    with sender(e) as trainer:
        trainer.sync(16, 16)
        config = replace(trainer.options.config, connections=1, progress_deadline_s=REQUEST_S)
        trainer.options = replace(trainer.options, config=config, source=source)
        weights, _ = trainer.make(17)
        asked: list[int] = []

        def answered(offset: int) -> None:
            sampled = e.run(
                e.speak.generate(prompt(len(asked)), Sampling(4, cache_salt="during"), REQUEST_S)
            )
            assert_sound(e, sampled, [trainer.label(16)])
            asked.append(offset)
            source.go()

        with trainer.link(weights) as link:
            trainer.stage(link, weights, 17, answered)
        assert len(asked) == -(-weights.manifest.total_bytes // BUCKET_BYTES) > 2
        assert trainer.control.label() == trainer.label(16), (
            "a version that is staged only is not served"
        )
    source.close()


def a_new_version_reuses_nothing_of_the_prefixes_of_an_older_one(e: EngineUnderTest) -> None:
    """A commit on an idle server keeps the cache, so requests are kept apart by the label they are
    admitted under. One that names no label of its own meets the old prefix: otherwise this would
    prove nothing."""
    ids = prompt(77, PREFIX)
    with sender(e) as trainer:

        def off(folder: Path, salt: str) -> float:
            sampled = e.run(e.speak.generate(ids, Sampling(8, cache_salt=salt), REQUEST_S))
            return furthest(
                sampled.logprobs,
                Reference(folder).logprobs([*ids, *sampled.token_ids])[PREFIX - 1 :],
            )

        before, after = trainer.label(5), trainer.label(6)
        first = trainer.sync(5, 5)
        assert [off(first, salt) <= MAX_DIFFERENCE for salt in ("shared", before, before)] == [
            True
        ] * 3
        second = trainer.sync(6, 6)
        assert off(second, "shared") > MAX_DIFFERENCE, "the cache must be kept for this"
        assert [off(second, salt) <= MAX_DIFFERENCE for salt in (after, after)] == [True] * 2


def a_request_without_a_salt_is_answered_by_the_new_weights_alone(e: EngineUnderTest) -> None:
    """Requests of environments name none; the same prompt was asked under the weights before."""
    ids = prompt(78, PREFIX)
    with sender(e) as trainer:
        for version in (18, 19):
            folder = trainer.sync(version, version)
            for _ in range(2):
                sampled = e.run(e.speak.generate(ids, Sampling(8), REQUEST_S))
                computed = Reference(folder).logprobs([*ids, *sampled.token_ids])[PREFIX - 1 :]
                assert furthest(sampled.logprobs, computed) <= MAX_DIFFERENCE


def a_version_with_a_tensor_that_the_model_has_not_is_refused_whole(e: EngineUnderTest) -> None:
    """Whether the engine itself would have noticed or not; the old weights stay, under their
    label."""
    with sender(e) as trainer:
        path = trainer.sync(7, 7)
        wrong, _ = trainer.make(8, lambda name: name.replace("q_proj", "q_projx"))
        with trainer.link(wrong) as link:
            applied = trainer.commit(link, wrong, 8)
        assert not applied.ok
        assert applied.intact, applied
        assert "q_proj" in applied.error, applied
        assert trainer.control.label() == trainer.label(7)
        assert difference(e, path) <= MAX_DIFFERENCE


def a_sender_that_dies_in_the_middle_leaves_the_old_version_and_another_one_goes_on(
    e: EngineUnderTest,
) -> None:
    """Requests meanwhile are answered as if nothing had been."""
    with sender(e) as trainer:
        path = trainer.sync(9, 9)
        weights, _ = trainer.make(10)

        def half(offset: int) -> None:
            if offset > weights.manifest.total_bytes // 2:
                raise _Broken

        with e.crowd(trainer.label(9)) as crowd:
            with suppress(_Broken), trainer.link(weights) as link:
                trainer.stage(link, weights, 10, half)
                raise AssertionError("the transfer must be longer than one bucket")
            assert_aborted(e, crowd.end(), [trainer.label(9)])
        assert trainer.control.label() == trainer.label(9)
        assert difference(e, path) <= MAX_DIFFERENCE
        assert difference(e, trainer.sync(10, 10)) <= MAX_DIFFERENCE


def garbage_is_refused_and_ends_nothing(e: EngineUnderTest) -> None:
    """A hello and a commit that mean nothing, as another program could send them."""
    before = e.run(e.speak.label())
    with e.control() as control:
        with suppress(ServerRefused):
            control.greet({"nonsense": 1})
        control.pause()
        try:
            with suppress(ServerRefused):
                control.load({"nonsense": 1})
            control.finish(before)
        finally:
            control.resume()
        assert control.label() == before
    e.run(e.speak.generate(prompt(1), Sampling(2), REQUEST_S))


def an_update_that_a_dead_trainer_left_open_is_taken_over(e: EngineUnderTest) -> None:
    """It died between load and finish: the next one finds the server paused, with an open
    update."""
    with sender(e) as dead:
        weights, _ = dead.make(11)
        with dead.link(weights) as link:
            assert dead.load(link, dead.stage(link, weights, 11)).ok
    with sender(e) as trainer:
        assert trainer.control.paused()
        assert difference(e, trainer.sync(12, 12)) <= MAX_DIFFERENCE
        held = trainer.joined
        assert held is not None
        assert (held.held_run, held.held_version) == (dead.run_id, 11), held


def a_server_whose_trainer_died_in_a_pause_goes_on(e: EngineUnderTest) -> None:
    """The pause guard reads from the receiver what it holds, has it show that, and lets it go on; a
    request in flight ends."""
    key = e.run_key.hex() if e.run_key is not None else ""
    access = pause_guard_main.Access("127.0.0.1", STEP_S, STEP_S, key)
    with sender(e) as trainer:
        path = trainer.sync(16, 16)
        with e.crowd(trainer.label(16)) as crowd:
            trainer.control.pause()
            trainer.control.relabel("half-way")
            run_id, epoch = trainer.run_id, trainer.epoch
            ask = pause_guard.Recover(e.access.url, run_id, epoch, doubtful=False, number=1)
            pause_guard_main.recover(trainer.control, access, ask, threading.Event())
            answers = crowd.end()
        assert not trainer.control.paused()
        held = Label.parse(trainer.control.label())
        assert held is not None
        assert (held.run_id, held.version) == (trainer.run_id, 16), held
        assert_aborted(e, answers, [trainer.label(16), "half-way", str(held)])
        assert difference(e, path) <= MAX_DIFFERENCE


def rollouts_name_the_versions_that_made_them(e: EngineUnderTest) -> None:
    """The rollout process over a commit: every completion is of the version before, of the one
    after, or of both in turn."""
    with sender(e) as trainer, _rollouts(e) as client:
        trainer.sync(20, 20)
        weights, _ = trainer.make(21)
        with trainer.link(weights) as link:
            client.set_server(ServerState(e.access.url, 20, True, trainer.label(20), e.engine))
            deadline = time.monotonic() + REQUEST_S
            while not client.in_flight().get(e.access.url):
                assert time.monotonic() < deadline, "no request was made"
            assert trainer.commit(link, weights, 21).ok
            client.set_server(ServerState(e.access.url, 21, True, trainer.label(21), e.engine))
            batches = [
                client.next_batch(version, ROLLOUTS.prompts_per_step, REQUEST_S)
                for version in (20, 21)
            ]
    completions = [c for batch in batches for group in batch for c in group.completions]
    bounds = {(c.version_first, c.version_last) for c in completions}
    assert bounds <= {(20, 20), (20, 21), (21, 21)}, bounds
    assert all(-math.inf < value <= 0.0 for c in completions for value in c.logprobs)
    assert client.counters().get("outages", 0) == 0


@contextmanager
def _rollouts(e: EngineUnderTest) -> Iterator[RolloutClient]:
    """The rollout process, which reads the API key from its environment."""
    os.environ[KEY_VARIABLE] = e.access.api_key
    client = RolloutClient(replace(ROLLOUTS, model_dir=str(e.model)))
    try:
        client.start(REQUEST_S)
        yield client
    finally:
        client.close()
        del os.environ[KEY_VARIABLE]


def nobody_without_the_run_key_writes_weights(e: EngineUnderTest) -> None:
    """However good its keys for the engine's routes are."""
    assert e.run_key is not None, "start the server with a run key"
    before = e.run(e.speak.label())
    with sender(e) as thief:
        thief.options = replace(thief.options, run_key=None)
        weights, _ = thief.make(13)
        refused: Any = None
        try:
            with thief.link(weights):
                pass
        except PeerError as error:
            refused = error
        assert refused is not None, "a lane without the run key joined"
        assert thief.control.label() == before


GIVE_UP = {
    vllm.NAME: Call("POST", "/sleep", STEP_S, ignore, params={"level": "2"}),
    sglang.NAME: Call("POST", "/release_memory_occupation", STEP_S, ignore, json={}, admin=True),
}
"""Engine -> the call that takes its weights away, and leaves their label."""


def a_server_whose_versions_come_from_a_trainer_gives_no_memory_up(e: EngineUnderTest) -> None:
    assert "pause generation" in str(refusal(lambda: e.run(GIVE_UP[e.engine])))
    with e.control() as control:
        assert not control.paused()


def a_restarted_server_is_seen_as_one(e: EngineUnderTest) -> None:
    """It holds the weights that it started with, whatever was committed, and takes no end of an
    update from before."""
    assert e.restart is not None
    with sender(e) as trainer:
        weights, _ = trainer.make(14)
        with trainer.link(weights) as link:
            assert trainer.load(link, trainer.stage(link, weights, 14)).ok
            e.restart()
            try:
                trainer.control.finish(trainer.label(14))
            except PeerError:
                pass
            else:
                raise AssertionError(
                    "a restarted server took the label of a version that it does not hold"
                )
        assert trainer.control.label() != trainer.label(14)
        assert not trainer.control.paused()
        assert difference(e, e.model) <= MAX_DIFFERENCE
        assert difference(e, trainer.sync(15, 15)) <= MAX_DIFFERENCE
        assert trainer.joined is not None
        assert trainer.joined.held_run == "", trainer.joined


CHECKS: tuple[Callable[[EngineUnderTest], None], ...] = (
    the_server_computes_what_was_committed_also_the_second_time,
    the_server_computes_each_version_of_one_lane,
    requests_are_answered_between_any_two_buckets_of_a_transfer,
    a_new_version_reuses_nothing_of_the_prefixes_of_an_older_one,
    a_request_without_a_salt_is_answered_by_the_new_weights_alone,
    a_version_with_a_tensor_that_the_model_has_not_is_refused_whole,
    a_sender_that_dies_in_the_middle_leaves_the_old_version_and_another_one_goes_on,
    garbage_is_refused_and_ends_nothing,
    an_update_that_a_dead_trainer_left_open_is_taken_over,
    a_server_whose_trainer_died_in_a_pause_goes_on,
    a_server_whose_versions_come_from_a_trainer_gives_no_memory_up,
    rollouts_name_the_versions_that_made_them,
)
"""They leave the server with weights of their own."""

KEYED_CHECKS = (nobody_without_the_run_key_writes_weights,)
"""For a server with a run key."""

RESTART_CHECKS = (a_restarted_server_is_seen_as_one,)
"""For a server that may be restarted."""
