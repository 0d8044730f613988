"""The completions that a real trainer keeps, on a server without an engine: its log-probabilities
are those of the weights that it had, token by token. And what is shown of that run elsewhere."""

from contextlib import suppress

import httpx
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM

from tests.faults.instances import engineless_launcher
from tests.rigs.sockets import free_port
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
    address, pages = f"127.0.0.1:{free_port()}", []
    arguments.append(f"--dashboards.metrics-address={address}")
    try:
        server.wait_healthy(60.0)
        with runs.start(out, [server.url], *replay.arguments, *arguments, nproc=2) as training:
            while training.process.poll() is None:
                with suppress(httpx.TransportError):
                    pages.append(httpx.get(f"http://{address}/metrics", trust_env=False).text)
                training.run_on(0.05)
            assert training.finish() == 0, training.log
    finally:
        server.stop()
    assert "titan_grpo_step " in pages[-1]
    assert f'titan_grpo_server_lag{{server="{server.url.removeprefix("http://")}"}}' in pages[-1]
    events = EventAccumulator(str(next(out.rglob("events.out*")).parent)).Reload()
    assert [each.step for each in events.Tensors("completions/text_summary")] == [1, 3]
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
