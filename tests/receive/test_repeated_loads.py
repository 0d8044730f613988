"""Commits of an engine whose loads are plain copies: its loader runs once for each lane, and what
it loads is right every time."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from tests.receive.site import SHAPES, DictEngine, Site, Weights
from titan_grpo.receive.replay import OWN_LOADER
from titan_grpo.receive.window import Tensors


class ModuleEngine(DictEngine):
    """Its tensors are the parameters of a module. ``scale``: what its loader computes."""

    def __init__(self) -> None:
        super().__init__()
        self.module: nn.ParameterDict | None = nn.ParameterDict(
            {n: nn.Parameter(t, requires_grad=False) for n, t in self.tensors.items()}
        )
        self.scale = 1.0

    def filled(self) -> nn.Module | None:
        return self.module

    def load(self, tensors: Tensors) -> None:
        def scaled() -> Tensors:
            for name, tensor in tensors:
                yield name, tensor if self.scale == 1.0 else tensor * self.scale

        super().load(scaled())


class WritingEngine(ModuleEngine):
    """Its loader adds to the tensors that it loads, as SGLang's of Gemma does to norms."""

    def load(self, tensors: Tensors) -> None:
        def increased() -> Tensors:
            for name, tensor in tensors:
                tensor += 1.0
                yield name, tensor

        super().load(increased())


@pytest.fixture
def engine() -> ModuleEngine:
    return ModuleEngine()


@pytest.fixture
def site(engine: ModuleEngine) -> Iterator[Site]:
    made = Site(engine=engine)
    yield made
    made.close()


def deliver(site: Site, *values: float) -> list[float]:
    """What the engine holds after each version, each called by its value, of a new lane."""
    link = site.connect(Weights(values[0]))
    held = []
    for number, value in enumerate(values, 1):
        applied = site.deliver(link, number, int(value), Weights(value))
        assert applied.ok, applied.error
        assert applied.loaded == len(SHAPES)
        held.append(site.engine.value())
    return held


def test_a_lanes_first_version_is_loaded_and_the_next_ones_are_copied(
    site: Site, engine: ModuleEngine
) -> None:
    seen = list[str]()
    site.side.taken = lambda name, tensor: seen.append(name)  # type: ignore[method-assign]
    assert deliver(site, 1.0, 2.0, 3.0) == [1.0, 2.0, 3.0]
    assert engine.loads == 1
    assert seen == [*SHAPES] * 3
    assert deliver(site, 4.0, 5.0) == [4.0, 5.0]
    assert engine.loads == 2


def computes(engine: ModuleEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """aten.mul.Tensor computes with weights"""
    engine.scale = 2.0


def says_nothing(engine: ModuleEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """what it fills is not known"""
    engine.module = None


def is_told_to(engine: ModuleEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """TITAN_GRPO_OWN_LOADER is 1"""
    monkeypatch.setenv(OWN_LOADER, "1")


@pytest.mark.parametrize("why", [computes, says_nothing, is_told_to])
def test_an_engine_loads_every_version_itself_if_it(
    why: Callable[[ModuleEngine, pytest.MonkeyPatch], None],
    engine: ModuleEngine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It says why, once: only the first load is watched."""
    caplog.set_level("INFO")
    why(engine, monkeypatch)
    site = Site(engine=engine)
    try:
        held = deliver(site, 1.0, 2.0, 3.0)
    finally:
        site.close()
    assert held == [engine.scale * value for value in (1.0, 2.0, 3.0)]
    assert engine.loads == 3
    [said] = [text for text in caplog.messages if "the next versions are loaded by" in text]
    assert str(why.__doc__) in said


def test_parameters_that_have_moved_are_loaded_by_the_engine(
    site: Site, engine: ModuleEngine
) -> None:
    link = site.connect(Weights(1.0))
    assert site.deliver(link, 1, 1, Weights(1.0)).ok
    assert engine.module is not None
    engine.tensors["b"] = torch.zeros_like(engine.tensors["b"])
    engine.module["b"] = nn.Parameter(engine.tensors["b"], requires_grad=False)
    for number, value in ((2, 2.0), (3, 3.0)):
        assert site.deliver(link, number, number, Weights(value)).ok
        assert engine.value() == value
    assert engine.loads == 2


@pytest.mark.parametrize("told", ["0", "1"])
def test_a_loader_that_writes_to_what_it_loads_gets_copies(
    told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the other workers, and receivers that read from this one, would get what it wrote."""
    monkeypatch.setenv(OWN_LOADER, told)
    site, staged = Site(engine=WritingEngine()), list[float]()

    def taken(name: str, tensor: torch.Tensor) -> None:
        staged.append(float(tensor.flatten()[0]))

    site.side.taken = taken  # type: ignore[method-assign]
    try:
        assert deliver(site, 1.0, 2.0, 3.0) == [2.0, 3.0, 4.0]
        assert deliver(site, 4.0, 5.0) == [5.0, 6.0]
    finally:
        site.close()
    assert set(staged) == {1.0, 2.0, 3.0, 4.0, 5.0}
