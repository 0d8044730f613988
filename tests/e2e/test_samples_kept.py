"""The completions that a real trainer keeps, on a server without an engine: its log-probabilities
are those of the weights that it had, token by token."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.faults.instances import engineless_launcher
from titan_grpo.commands import report
from titan_grpo.observe import names
from titan_grpo.views.run import read_run

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


@pytest.mark.parametrize("pack", [False, pytest.param(True, marks=pytest.mark.long)])
def test_kept_completions_have_the_trainers_log_probabilities(runs, make_replay, tmp_path, pack):
    replay = make_replay(tmp_path / "replay.jsonl", 4, 4, 16).write(4)
    server = engineless_launcher(runs.model)(tmp_path / "server")
    out = tmp_path / "run"
    packed = "--grpo.pack_sequences" if pack else "--grpo.no-pack_sequences"
    arguments = ["--training.steps=4", "--rollout.sample_every=3", packed]
    try:
        server.wait_healthy(60.0)
        runs.complete(out, [server.url], *replay.arguments, *arguments, nproc=2)
    finally:
        server.stop()
    run = read_run(out)
    assert [(kept.step, kept.version) for kept in run.samples] == [(1, 0), (3, 2)]
    first = run.samples[0].completions
    assert len(first) == 4
    model = AutoModelForCausalLM.from_pretrained(runs.model, dtype=torch.float32)
    for kept in first:
        ids = torch.tensor([[*kept.prompt, *kept.tokens]])
        with torch.no_grad():
            logprobs = model(ids).logits[0, :-1].log_softmax(-1)
        own = logprobs.gather(1, ids[0, 1:, None])[len(kept.prompt) - 1 :, 0]
        assert torch.allclose(own, torch.tensor(kept.trainer), atol=2e-3)
        assert kept.engine == [-4.85] * len(kept.tokens)
    row = run.rows[0]
    assert row[names.LAG_MAX] == 0
    low_and_high = row[names.CLIPPED_LOW] + row[names.CLIPPED_HIGH]
    assert low_and_high == pytest.approx(row[names.CLIP_FRACTION])
    assert row[names.POLICY_LOSS] == pytest.approx(row[names.LOSS])
    assert {names.RATIO_MAX, names.IMPORTANCE_MAX, names.LOGPROB} <= row.keys()
    assert report.run([str(out)], {}) == 0
    assert "<main" in (out / "report.html").read_text()
