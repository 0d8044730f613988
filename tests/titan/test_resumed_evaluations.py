"""What a run that is resumed still has to evaluate."""

from pathlib import Path

from tests.rollout.conftest import MakeServer
from tests.titan.test_evaluations import Lanes, Rollouts, held, versions
from titan_grpo.config.task import Evaluation
from titan_grpo.observe.recorder import Recorder
from titan_grpo.rollout.messages import RolloutSpec
from titan_grpo.titan.evaluations import Evaluations


def test_an_evaluation_that_a_killed_run_did_not_finish_is_due_when_it_is_resumed(
    tmp_path: Path, completion_server: MakeServer, model_dir: str
) -> None:
    server, found = completion_server(), []
    table = Evaluation(name="digits", task="digits", rows=3, every=4, at_start=False)
    for first, version in ((0, 4), (9, 9), (9, 11), (9, 12)):
        spec = RolloutSpec(model_dir=model_dir, max_completion_tokens=4, base_version=first)
        recorder, lanes = Recorder(tmp_path / "run"), Lanes()
        one = Evaluations([table], spec, Rollouts(), recorder, lanes.keep, lanes.go_on)
        one.set_server(held(server, version))
        lanes.wait_free()
        found.append(versions(recorder))
        one.close()
        recorder.close()
    assert found == [[4], [4, 9], [4, 9], [4, 9, 12]], "8 was due, and 9 stands for it"
