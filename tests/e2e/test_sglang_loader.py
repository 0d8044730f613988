"""An exception in SGLang's custom weight loader ends the whole server: ours never lets one out,
wherever it comes from."""

import pytest

from tests.conformance.commits import NUMBER, STEP_S, difference, sender
from tests.conformance.engine import MAX_DIFFERENCE, EngineUnderTest, remake
from titan_grpo.engines.launch import Server, ServerSpec

pytestmark = [pytest.mark.e2e, pytest.mark.long, pytest.mark.timeout(300)]

BREAKING = """
from titan_grpo.receive import sglang_plugin
from titan_grpo.receive.commit import EngineSide


class Breaking:
    config = {}
    def __init__(self, engine):
        self.engine, self.broken = engine, False

    def refuses(self, manifest):
        return self.engine.refuses(manifest)

    def load(self, tensors):
        def some():
            for number, pair in enumerate(tensors):
                if number == 5 and not self.broken:
                    self.broken = True
                    raise RuntimeError("planted in the middle of a load")
                yield pair

        return self.engine.load(some())


def start():
    sglang_plugin.plugin.make_side = lambda engine, *rest: EngineSide(Breaking(engine), *rest)
"""


def test_a_load_that_raises_half_way_is_reported_and_the_next_version_is_whole(
    sglang_python, tmp_path
):
    info = tmp_path / "plugins" / "breaking-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: breaking\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nbreaking = breaking:start\n")
    (tmp_path / "plugins" / "breaking.py").write_text(BREAKING)
    model = remake(100, tmp_path / "model")
    env = {"PYTHONPATH": str(tmp_path / "plugins")}
    with Server(
        ServerSpec(sglang_python, str(model), str(tmp_path / "server.log"), "sglang", env=env)
    ) as server:
        server.wait_healthy(200.0)
        e = EngineUnderTest.of(server, tmp_path)
        with sender(e) as trainer:
            weights, _ = trainer.make(1)
            with trainer.link(weights) as link:
                staged = trainer.stage(link, weights, 1)
                trainer.control.pause()
                trainer.control.load(link.commit(staged).to_dict())
                applied = link.wait_applied(NUMBER, STEP_S)
            assert not applied.ok
            assert not applied.intact
            assert "planted in the middle of a load" in applied.error
            e.require_alive()
            assert trainer.control.paused()
            assert difference(e, trainer.sync(1, 2)) <= MAX_DIFFERENCE
            assert not trainer.control.paused()
        assert server.alive()
