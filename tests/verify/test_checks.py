"""The verification's judgements over made-up evidence: a clean run passes, and each way of being
wrong is named."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from titan_grpo.verify import outcome
from titan_grpo.verify.outcome import START, Committed, Made, Probe, Reference, Run

TOLERANCE = 0.05
RUN_ID = "02-new"
PROMPTS = 2


def label(version: int, run_id: str = RUN_ID) -> str:
    return f"{run_id}:{version}:{print_(version)}" if version != START else "default"


def print_(version: int) -> str:
    return f"{version:032x}"


def values(version: int, prompt: int) -> tuple[float, ...]:
    return tuple(-1.0 - 0.5 * version - 0.1 * prompt - 0.01 * i for i in range(4))


def tensors(version: int) -> dict[str, str]:
    return {"a": f"a{version}", "b": f"b{version}", "fixed": "same"}


def probe(version: int, before: int, after: int, prompt: int = 0) -> Probe:
    return Probe(
        prompt, tuple(x + 0.01 for x in values(version, prompt)), label(before), label(after)
    )


def good(name: str = "a run") -> Run:
    versions = range(4)
    seen = [
        (START, START, START),
        (START, START, 0),
        (0, 0, 0),
        (0, 0, 1),
        (1, 0, 1),
        (3, 1, 3),
        (3, 3, 3),
        (3, 3, 3),
    ]
    return Run(
        name=name,
        made=tuple(Made(v, f"digest {v}", print_(v), tensors(v)) for v in versions),
        claimed=(0, 1, 3),
        commits=tuple(Committed(RUN_ID, 0, v, True, print_(v), tensors(v)) for v in (0, 1, 3)),
        probes=tuple(probe(*s, prompt=i % PROMPTS) for i, s in enumerate(seen)),
        references=tuple(
            Reference(v, f"digest {v}", tuple(values(v, p) for p in range(PROMPTS)))
            for v in (START, *versions)
        ),
        final_file="sha",
    )


def other_commit(run: Run, index: int, **changes: Any) -> Run:
    commits = list(run.commits)
    commits[index] = replace(commits[index], **changes)
    return replace(run, commits=tuple(commits))


def with_probe(run: Run, *more: Probe) -> Run:
    return replace(run, probes=(*run.probes, *more))


def test_a_clean_run_and_its_replays_pass() -> None:
    assert outcome.check_all([good("live"), good("replay"), good("sync")], TOLERANCE) == []


HALF = tuple((a + b) / 2 for a, b in zip(values(2, 0), values(3, 0), strict=True))


def commit(version: int, run_id: str = RUN_ID) -> Committed:
    return Committed(run_id, 0, version, True, print_(version), tensors(version))


def probed(version: int, low: int, high: int, **changes: Any) -> Callable[[Run], Run]:
    return lambda r: with_probe(r, replace(probe(version, low, high), **changes))


def committed(index: int, **changes: Any) -> Callable[[Run], Run]:
    return lambda r: other_commit(r, index, **changes)


def changed(**changes: Any) -> Callable[[Run], Run]:
    return lambda r: replace(r, **changes)


ONE_OTHER = (*values(3, 0)[:3], values(2, 0)[3])
WRONG: dict[str, tuple[str, Callable[[Run], Run], str]] = {
    "one tensor of a commit differs": (
        "bytes",
        committed(1, tensors={**tensors(1), "b": "torn"}),
        "version 1 on worker 0: 1 of 3 tensors are not the trainer's (b)",
    ),
    "a tensor never reached the server": (
        "bytes",
        committed(2, tensors={"a": "a3", "fixed": "same"}),
        "1 of 3 tensors are not the trainer's (b)",
    ),
    "the server took a tensor that the trainer has not": (
        "bytes",
        committed(2, tensors={**tensors(3), "c": "x"}),
        "(c)",
    ),
    "a fingerprint is not that of the trainer's image": (
        "bytes",
        committed(0, fingerprint="ff"),
        "fingerprint ff",
    ),
    "a claimed commit left no trace": (
        "bytes",
        changed(claimed=(0, 1, 2, 3)),
        "version 2 is called committed",
    ),
    "a version was committed that was never made": (
        "bytes",
        lambda r: replace(r, commits=(*r.commits, commit(9))),
        "never made",
    ),
    "a label shows another fingerprint": (
        "bytes",
        probed(3, 3, 3, after=f"{RUN_ID}:3:00"),
        "label",
    ),
    "another run committed": (
        "foreign",
        lambda r: replace(r, commits=(*r.commits, commit(3, "03-other"))),
        "03-other",
    ),
    "an answer lies between two versions": (
        "mixed",
        probed(3, 3, 3, logprobs=HALF),
        "fits no version",
    ),
    "one token is another version's": (
        "mixed",
        probed(3, 3, 3, logprobs=ONE_OTHER),
        "0.500 nats off",
    ),
    "an answer holds no number": (
        "mixed",
        probed(3, 3, 3, logprobs=(math.nan,) * 4),
        "fits no version",
    ),
    "an answer is too short": ("mixed", probed(3, 3, 3, logprobs=(-1.0,)), "fits no version"),
    "the start weights came back": ("mixed", probed(START, 3, 3), "fits no version"),
    "an older version answered later": ("backwards", probed(1, 3, 3), "version 1 after version 3"),
    "the label went back": ("backwards", probed(3, 3, 1), "3 before, 1 after"),
    "the label names what is not served": (
        "label",
        lambda r: with_probe(r, probe(3, 3, 3), probe(3, 2, 2)),
        "the label said 2",
    ),
    "a probe got no answer": ("evidence", changed(probe_errors=("refused",)), "refused"),
    "too few probes": ("evidence", lambda r: replace(r, probes=r.probes[:5]), "only 5 probes"),
    "probes of one version only": (
        "evidence",
        changed(probes=(probe(3, 3, 3),) * 8),
        "fewer than two versions",
    ),
    "the last version was not committed": (
        "evidence",
        lambda r: replace(r, claimed=(0, 1), commits=r.commits[:2]),
        "version 3 was trained last, version 1",
    ),
    "a version without a reference": (
        "evidence",
        lambda r: replace(r, references=r.references[:-2]),
        "[2, 3]",
    ),
    "nothing was recorded": (
        "evidence",
        changed(made=(), commits=(), claimed=()),
        "0 versions were made",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_violation_is_named_with_its_kind_when(what: str) -> None:
    kind, spoil, words = WRONG[what]
    found = outcome.check_all([spoil(good())], TOLERANCE)
    assert any(v.kind == kind and words in v.message for v in found), found
    if kind in ("mixed", "backwards", "label", "foreign"):
        assert "bytes" not in {v.kind for v in found}, "only the prober or the log can see it"


def test_versions_that_are_too_close_to_tell_a_mixture_are_no_evidence() -> None:
    run = good()
    close = replace(
        run.references[2],
        logprobs=tuple(tuple(x - 0.06 for x in row) for row in run.references[1].logprobs),
    )
    spoilt = replace(run, references=(*run.references[:2], close, *run.references[3:]))
    assert outcome.separation(spoilt.references) == pytest.approx(0.06)
    assert "evidence" in {v.kind for v in outcome.check_all([spoilt], TOLERANCE)}


def test_two_versions_of_the_same_weights_count_as_one() -> None:
    run = good()
    same = replace(run.references[1], version=1)
    made = (run.made[0], replace(run.made[0], version=1), *run.made[2:])
    unchanged = replace(run, references=(*run.references[:2], same, *run.references[3:]), made=made)
    unchanged = replace(
        unchanged, probes=tuple(p for p in run.probes if p.logprobs[0] != values(1, 0)[0] + 0.01)
    )
    assert [v for v in outcome.check_probes(unchanged, TOLERANCE) if v.kind == "mixed"] == []


def test_start_weights_that_equal_a_later_version_are_told_apart_by_the_label() -> None:
    run = good()
    start = replace(run.references[0], logprobs=run.references[-1].logprobs)
    same_start = replace(run, references=(start, *run.references[1:]))
    first = [
        replace(p, logprobs=tuple(x + 0.01 for x in values(3, p.prompt))) for p in run.probes[:2]
    ]
    assert (
        outcome.check_probes(replace(same_start, probes=(*first, *run.probes[2:])), TOLERANCE) == []
    )


def test_a_flood_of_like_answers_is_one_violation_with_their_number() -> None:
    found = outcome.check_probes(
        with_probe(good(), *[replace(probe(3, 3, 3), logprobs=HALF)] * 5), TOLERANCE
    )
    assert len(found) == 1
    assert "(and 4 more probes)" in found[0].message


def test_runs_that_must_agree_and_do_not_are_named_with_versions_and_tensors() -> None:
    other = good("sync")
    changed = replace(other.made[2], digest="other", tensors={**tensors(2), "a": "x"})
    found = outcome.check_all(
        [good("live"), replace(other, made=(*other.made[:2], changed, other.made[3]))], TOLERANCE
    )
    assert [v.kind for v in found if v.run == "live and sync"] == ["modes"]
    assert any("versions [2] differ" in v.message and "(a)" in v.message for v in found)


@pytest.mark.parametrize("file", ["", "other"])
def test_other_or_missing_files_of_trained_weights_are_a_violation(file: str) -> None:
    found = outcome.check_same(good(), replace(good(), final_file=file))
    assert [v.message for v in found] == ["the files of the trained weights differ"]


def test_a_version_that_only_one_run_made_is_a_violation() -> None:
    found = outcome.check_same(good(), replace(good(), made=good().made[:-1]))
    assert "the versions made are [0, 1, 2, 3] and [0, 1, 2]" in found[0].message
