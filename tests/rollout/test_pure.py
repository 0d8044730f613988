"""The room's bookkeeping: cursor, pool, group checks, seeds, tasks, records."""

import asyncio
import json
import math
import resource
import time
import tracemalloc
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.rigs.present import present
from tests.rollout.sampling import Letters
from titan_grpo.algorithm.batch import BatchOptions, plan
from titan_grpo.engines.generation import Sampled, VersionSpan
from titan_grpo.errors import DataError, ServerUnreachable, StorageError
from titan_grpo.rollout import atropos, external
from titan_grpo.rollout.client import RolloutClient
from titan_grpo.rollout.messages import Cursor, RolloutSpec, RolloutStopped
from titan_grpo.rollout.records import SCANNED_BYTES, GroupRecorder, ReplayClient
from titan_grpo.rollout.remote import RemoteTransport
from titan_grpo.rollout.sampler import GroupDropped, completion_fault, request_seed, versioned
from titan_grpo.rollout.task_runner import TaskOptions
from titan_grpo.rollout.tasks.built_in import Digits
from titan_grpo.rollout.tasks.functions import load_task
from titan_grpo.samples import (
    LARGEST_LOGPROB,
    LARGEST_REWARD,
    Completion,
    Group,
    Prompt,
    Span,
    defect,
)

GOOD = Completion((5, 6), (-0.5, -1.25), "stop", 3, 4, "http://a", 0.5)
finite = st.floats(allow_nan=False, allow_infinity=False)


@given(st.permutations(range(12)), st.integers(0, 12))
def test_a_cursor_resumes_with_exactly_the_unused_indices(order: list[int], used: int) -> None:
    cursor = Cursor()
    for index in order[:used]:
        cursor.use(index)
    restored = Cursor.from_state(json.loads(json.dumps(cursor.state())))
    rest = restored.unused()
    expected = sorted(order[used:]) + [12, 13]
    assert [next(rest) for _ in expected] == expected


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": (), "logprobs": ()},
        {"logprobs": (-1.0,)},
        {"sampled": (True,)},
        {"sampled": (False, False)},
        {"spans": ((3, 1),)},
        {"reward": math.nan},
        *({"logprobs": (-1.0, value)} for value in (-math.inf, -1e31, -1e29, math.nan, 1.0)),
    ],
)
def test_rollouts_and_batch_leave_out_the_same_completions_under_the_same_name(
    change: dict[str, Any],
) -> None:
    completion, other = replace(GOOD, **change), Group(Prompt(0, (1,)), (GOOD, GOOD))
    groups = [Group(Prompt(1, (1,)), (GOOD, completion)), other]
    fault = completion_fault(Prompt(1, (1,)), completion, 2)
    dropped = {fault: 1, "group_of_defective": 1} if fault else {}
    assert plan(groups, 1, BatchOptions(token_budget=64, max_len=64)).dropped == dropped


@pytest.mark.parametrize(
    ("logprob", "reward", "sound"),
    [
        (LARGEST_LOGPROB, LARGEST_REWARD, True),
        (1.01 * LARGEST_LOGPROB, 0.5, False),
        (-0.5, -1.01 * LARGEST_REWARD, False),
    ],
)
def test_rollouts_and_sources_from_outside_have_the_same_bounds(
    logprob: float, reward: float, sound: bool
) -> None:
    completion = replace(GOOD, logprobs=(-1.0, logprob), reward=reward)
    pushed = {"tokens": [5, 6], "logprobs": [-1.0, logprob], "reward": reward}
    group = {"policy_version": 0, "prompt_tokens": [1], "completions": [pushed]}
    item = {"tokens": [[1, 6]], "masks": [[-100, 6]], "scores": [reward]}
    assert (defect(Prompt(0, (1,)), completion) == "") == sound
    for error, read in (
        (DataError, lambda: external.parse(json.dumps({"groups": [group]}).encode())),
        (
            atropos.Rejected,
            lambda: atropos.group_of(item | {"inference_logprobs": [[1.0, logprob]]}, 0),
        ),
    ):
        with nullcontext() if sound else pytest.raises(error):
            read()


def test_a_cursor_before_an_index_has_used_none_from_there_on() -> None:
    cursor = Cursor(low=1, above=(2, 3, 5))
    assert [cursor.before(end).state()["above"] for end in (2, 3, 6)] == [[], [2], [2, 3, 5]]
    assert Cursor(low=4, above=(6,)).before(2).state() == {"low": 2, "above": []}


def test_a_completion_has_the_room_that_its_prompt_leaves_in_a_row() -> None:
    spec = RolloutSpec(model_dir="", max_completion_tokens=8, row_tokens=10)
    assert [spec.room((1,) * length) for length in (1, 2, 3, 9, 10)] == [8, 8, 7, 1, 0]


def test_an_index_used_twice_is_refused() -> None:
    cursor = Cursor(low=2, above=(4,))
    for index in (1, 4):
        with pytest.raises(DataError, match="came twice"):
            cursor.use(index)


@pytest.mark.parametrize(
    "state", [{"low": -1}, {"low": 3, "above": [1]}, {"low": "0"}, {"low": 0, "above": None}]
)
def test_a_broken_cursor_state_is_refused(state: dict[str, object]) -> None:
    with pytest.raises(DataError, match="rollout state"):
        Cursor.from_state(state)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({}, ""),
        ({"token_ids": (1, 2, 3), "logprobs": (-1.0,) * 3}, "over_budget"),
        ({"finish_reason": "abort"}, "unfinished"),
    ],
)
def test_rollouts_alone_know_of_a_budget_and_of_an_end(change: dict[str, Any], fault: str) -> None:
    assert completion_fault(Prompt(0, (1,)), replace(GOOD, **change), 2) == fault


def test_request_seeds_are_stable_and_fit_int64() -> None:
    requests = list(product(range(3), range(9), range(5), range(2), range(3)))
    seeds = [request_seed(*request) for request in requests]
    assert len({*seeds}) == len(requests)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert [request_seed(*request) for request in requests] == seeds


SPANS = (("r:7:f", 0, 3), ("r:8:f", 3, 5))


def sampled(versions: tuple[VersionSpan, ...]) -> Sampled:
    return Sampled((1,) * 5, (-1.0,) * 5, "stop", versions)


def versions(label: str, *spans: VersionSpan, **how: bool) -> tuple[int, int, tuple[Span, ...]]:
    """First, last and all versions of an answer of a server that held 6 at first and 9 at the end,
    whose engine names ``spans``."""
    found = present(versioned(sampled(spans), label, 6, 9, **how))
    return found.version_first, found.version_last, found.token_spans


def test_versions_of_tokens_are_the_engines_where_it_names_them_and_the_ledgers_elsewhere() -> None:
    assert versions("r:6:f", *SPANS) == (6, 8, ((7, 3), (8, 2)))
    assert versions("r:6:f") == (6, 9, ((6, 5),))
    # One that is older than what the ledger knew makes the answer so old.
    assert versions("r:6:f", ("r:5:f", 0, 5)) == (5, 5, ((5, 5),))


def test_a_request_that_waited_over_a_commit_is_as_old_as_its_admission() -> None:
    waited = "r:8:f", 0, 5
    assert versions("r:6:f", waited) == (6, 8, ((8, 5),))
    assert versions("r:6:f", waited, kv_recomputed=True) == (8, 8, ((8, 5),))


def test_versions_that_are_not_named_for_every_token_only_bound_them() -> None:
    assert versions("r:7:f", SPANS[0]) == (6, 7, ((6, 5),))


@pytest.mark.parametrize("label", ["default", "unusable", "other:7:f", ""])
def test_tokens_of_weights_that_are_not_of_this_run_have_no_version(label: str) -> None:
    assert versioned(sampled((SPANS[0], (label, 3, 5))), "r:6:f", 6, 9) is None
    assert versioned(sampled(SPANS), label, 6, 9) is None


def test_digits_rewards_the_share_of_digits() -> None:
    task, codec = load_task("digits", TaskOptions(seed=1)), Letters()
    assert isinstance(task, Digits)
    prompt = task.prompt(3, codec)
    assert prompt == load_task("digits", TaskOptions(seed=1)).prompt(3, codec)
    assert prompt != load_task("digits", TaskOptions(seed=2)).prompt(3, codec)
    assert asyncio.run(task.reward(prompt, "1a2b", (1, 2, 3, 4))) == 0.5
    assert asyncio.run(task.reward(prompt, "12", (1, 2, 3))) == pytest.approx(2 / 3)
    assert asyncio.run(task.reward(prompt, "", (2,))) == 0


def record(path: Path, *batches: list[Group], base: int = 0) -> None:
    """Each batch as the step after the one before; the first makes version ``base`` + 1."""
    recorder = GroupRecorder(str(path), base)
    for version, groups in enumerate(batches, base):
        recorder.write(version, groups)
    recorder.close()


def test_a_resumed_recording_keeps_what_was_before_and_drops_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    group = Group(Prompt(0, (1,)), (GOOD, GOOD))
    record(path, [group], [group])
    with path.open("a") as file:
        file.write('{"version": 2, "gro')
    record(path, [group, group], base=1)
    replay = ReplayClient(str(path))
    assert len(replay.next_batch(0, 1, 1)) == 1
    state = replay.state()
    assert len(replay.next_batch(1, 2, 1)) == 2
    # A step that made no version moves the batches and not the version.
    assert len(ReplayClient(str(path), state).next_batch(0, 2, 1)) == 2
    with pytest.raises(DataError, match="no batch for version 2"):
        replay.next_batch(2, 1, 1)
    with pytest.raises(DataError, match="prompts_per_step is 5"):
        ReplayClient(str(path)).next_batch(1, 5, 1)


def test_a_resumed_run_keeps_the_record_of_a_step_that_made_no_version(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    recorder = GroupRecorder(str(path), 0)
    # The step of prompt 1 changed no weight. The run goes on from before the step of prompt 2.
    for version, index in ((0, 0), (1, 1), (1, 2)):
        recorder.write(version, [Group(Prompt(index, (1,)), (GOOD,))])
    recorder.close()
    state = {"cursor": {"low": 2, "above": []}}
    RolloutClient(RolloutSpec(model_dir="", base_version=1, state=state), str(path)).close()
    lines = map(json.loads, path.read_text().splitlines())
    assert [line["groups"][0]["prompt"]["index"] for line in lines] == [0, 1]


def test_a_resumed_run_makes_a_step_again_whose_record_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    group = Group(Prompt(0, (1,), {"text": "\u00e9"}), (GOOD,))
    record(path, [group])
    path.write_bytes(path.read_bytes().replace("\u00e9".encode(), b"\xe9"))
    GroupRecorder(str(path), 0, {0}).close()
    assert path.read_bytes() == b""


def test_a_record_is_read_whatever_characters_are_in_it_and_wherever_it_is_torn(
    tmp_path: Path,
) -> None:
    path = tmp_path / "r.jsonl"
    group = Group(Prompt(0, (1,), {"text": "a\u2028b\u2029c\x85d\x0be\u00e9"}), (GOOD,))
    record(path, [group])
    whole = path.read_bytes()
    path.write_bytes(whole + whole[: whole.index("\u00e9".encode()) + 1])
    assert ReplayClient(str(path)).next_batch(0, 1, 1) == [group]
    record(path, base=1)
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    "line", ['{"version": ', '{"version": 1, "groups": ' + "[" * 100_000], ids=["torn", "deep"]
)
def test_a_bad_line_inside_a_record_is_refused_by_its_number(tmp_path: Path, line: str) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(f'{{"version": 0}}\n{line}\n{{"version": 2}}\n')
    for read in (lambda: ReplayClient(str(path)), lambda: GroupRecorder(str(path), 1)):
        with pytest.raises(DataError, match=r"r\.jsonl:2 is not a recorded batch"):
            read()
    assert list(tmp_path.iterdir()) == [path]


def test_a_recorded_batch_that_cannot_be_trained_on_is_refused_by_its_version(
    tmp_path: Path,
) -> None:
    path = tmp_path / "r.jsonl"
    record(path, [Group(Prompt(0, (1,)), (GOOD,))])
    whole = path.read_bytes()
    without = json.loads(whole)
    without["groups"][0]["completions"] = []
    server = json.dumps(GOOD.server).encode()
    for line in (json.dumps(without).encode(), whole.replace(server, b'"caf\xe9"')):
        assert line != whole
        path.write_bytes(line)
        with pytest.raises(DataError, match=r"r\.jsonl: the batch of version 0 must have the fie"):
            ReplayClient(str(path)).next_batch(0, 1, 1)


def test_a_recorded_step_that_dynamic_sampling_left_short_is_replayed_as_it_was(
    tmp_path: Path,
) -> None:
    path, group = tmp_path / "r.jsonl", Group(Prompt(0, (1,)), (GOOD, GOOD))
    recorder = GroupRecorder(str(path), 0)
    recorder.write(0, [group], whole=False)
    recorder.write(1, [group])
    recorder.write(2, [group] * 3, whole=False)
    recorder.close()
    replay = ReplayClient(str(path))
    assert replay.next_batch(0, 2, 1) == [group]
    for version in (1, 2):
        with pytest.raises(DataError, match="prompts_per_step is 2"):
            ReplayClient(str(path), {"next_batch": version}).next_batch(version, 2, 1)


def test_a_recording_keeps_the_spans_of_versions_and_one_without_them_can_be_read(
    tmp_path: Path,
) -> None:
    path, spans = tmp_path / "r.jsonl", ((3, 1), (4, 1))
    record(path, [Group(Prompt(0, (1,)), (replace(GOOD, spans=spans),))])
    old = json.loads(path.read_text()) | {"version": 1}
    del old["groups"][0]["completions"][0]["spans"]
    with path.open("a") as file:
        file.write(json.dumps(old) + "\n")
    replay = ReplayClient(str(path))
    read = [replay.next_batch(version, 1, 1)[0].completions[0] for version in (0, 1)]
    assert [completion.token_spans for completion in read] == [spans, ((3, 2),)]


def test_a_batch_that_a_trainer_takes_at_an_earlier_version_keeps_its_staleness(
    tmp_path: Path,
) -> None:
    """After a step that made no version; before, its tokens were newer than the trainer."""
    path = tmp_path / "r.jsonl"
    spread = replace(GOOD, version_first=1, version_last=2, spans=((1, 1), (2, 1)))
    record(path, *[[Group(Prompt(0, (1,)), (spread,))]] * 3)
    replay = ReplayClient(str(path))
    at = [replay.next_batch(version, 1, 1)[0].completions[0] for version in (0, 1, 1)]
    assert at[:2] == [spread, spread]
    assert (at[2].version_first, at[2].version_last) == (0, 1)
    assert at[2].token_spans == ((0, 1), (1, 1))


def test_a_replay_keeps_no_recorded_group_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    text = {"text": "x" * (1 << 20)}
    record(path, *[[Group(Prompt(version, (1,), text), (GOOD,))] for version in range(8)])
    tracemalloc.start()
    try:
        replay = ReplayClient(str(path))
        for version in range(8):
            assert replay.next_batch(version, 1, 1)[0].prompt.index == version
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 1 << 20  # of 8 MiB


@pytest.mark.parametrize("base", [0, 1, 2, 30, 89, 90, 99])
def test_a_resume_of_a_long_recording_reads_a_part_of_it_and_writes_nothing(
    tmp_path: Path, base: int
) -> None:
    path = tmp_path / "r.jsonl"
    # Steps that made no version repeat it; a line is longer than what is scanned.
    versions = [*range(30), *[30] * 3, *range(31, 90)]
    text = "x" * (SCANNED_BYTES // 8)
    lines = [
        json.dumps({"version": v, "groups": [], "x": text * (10 if v in (1, 30) else 1)}) + "\n"
        for v in versions
    ]
    path.write_text("".join(lines))
    before = path.stat()
    read = _read_bytes()
    # No groups: all of a line's prompts are used, so the lines of the base itself stay.
    GroupRecorder(str(path), base).close()
    assert _read_bytes() - read < before.st_size
    assert path.stat().st_ino == before.st_ino
    assert path.read_text() == "".join(
        line for line, v in zip(lines, versions, strict=True) if v <= base
    )


def _read_bytes() -> int:
    """Bytes that this process has read so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_a_recorded_line_without_its_end_stays_and_gets_it(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    group = Group(Prompt(0, (1,)), (GOOD,))
    record(path, [group])
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    record(path, base=1)
    assert path.read_bytes() == whole


def test_a_resume_cuts_the_recording_on_a_full_disk_too(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    record(path, *[[Group(Prompt(0, (1,)), (GOOD, GOOD))]] * 3)
    lines = path.read_bytes().splitlines(keepends=True)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Python ignores SIGXFSZ: a write over the limit fails as on a full disk.
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        recorder = GroupRecorder(str(path), 2)
        with pytest.raises(StorageError, match=r"rollout\.record_path .* cannot be written"):
            recorder.write(2, [])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_bytes() == b"".join(lines[:2])
    assert list(tmp_path.iterdir()) == [path]


def test_a_resumed_recording_behind_a_link_is_cut_in_its_place(tmp_path: Path) -> None:
    path, link = tmp_path / "scratch" / "r.jsonl", tmp_path / "r.jsonl"
    link.symlink_to(path)
    for _ in range(2):
        record(link, [Group(Prompt(0, (1,)), (GOOD, GOOD))])
    assert link.is_symlink()
    assert len(path.read_bytes().splitlines()) == 1


def test_a_dropped_group_says_what_its_reason_means() -> None:
    assert str(GroupDropped("bad_reward")) == "bad_reward (a reward that is nan, or beyond 3e38)"


def test_an_outage_ends_with_the_next_answer() -> None:
    transport = RemoteTransport("http://127.0.0.1:1", "", deadline_s=30.0)

    def away() -> None:
        raise ServerUnreachable("http://127.0.0.1:1: away")

    transport._silent_since = time.monotonic() - 60.0
    transport._attempt(lambda: None)
    transport._attempt(away)  # counts from now
    transport._silent_since = time.monotonic() - 60.0
    with pytest.raises(RolloutStopped, match="was not there for 30 s"):
        transport._attempt(away)
