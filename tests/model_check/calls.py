"""What a server does with a request: the production fence and staging tables around an engine of
two halves. And what a lane makes of the answer: the production lane and settle tables, and
the request that follows."""

from typing import Any

from tests.model_check.server import (
    BEFORE,
    HARMLESS,
    LONG_AGO,
    NOW,
    Move,
    Request,
    Server,
    label_of,
)
from tests.model_check.tables import Tables, Violation
from titan_grpo.protocol import lane as lanes
from titan_grpo.protocol import server
from titan_grpo.protocol.messages import UNUSABLE, Label
from titan_grpo.protocol.recovery import Pause, Relabel, Resume


def execute(s: Server, r: Request, t: Tables, mine: bool) -> Server:
    """What the server does with a request, and its answer if it is the present lane's
    (``mine``)."""

    def answer(after: Server, *values: Any) -> Server:
        return after._replace(answer=values) if mine else after

    match r.kind:
        case "greet":
            engine, refused = t.fence(s.engine, server.OpenEpoch(r.run, r.epoch, r.term))
            run_in_force = s.engine.in_force[0]
            if refused:
                if run_in_force == r.run:
                    return answer(s._replace(engine=engine), "no")
                return answer(s._replace(engine=engine), "outranked", engine.term)
            if (run_in_force, r.run) == (NOW, BEFORE):
                raise Violation("a trainer that was replaced takes the server back")
            s = s._replace(engine=engine, receiver=(r.run, r.epoch), memory=server.Staging())
            return answer(
                s,
                "joined",
                label_of(engine.run, engine.version) if engine.run else "",
                engine.intact,
            )
        case "look":
            return answer(s, "looked", s.label, s.paused)
        case "send":
            return _begin(s, r, t)
        case "pause":
            return answer(s._replace(paused=True, meddled=False), "did" if s.plan else "ok")
        case "resume":
            return answer(
                s._replace(paused=False, meddled=s.meddled or not mine), "did" if s.plan else "ok"
            )
        case "label" if s.plan and mine:
            return answer(s._replace(label=r.text), "did")
        case "label":
            # the end of an update, which a server that was restarted meanwhile knows nothing of
            return (
                answer(s._replace(label=r.text, session=False), "ok")
                if s.session
                else answer(s, "no")
            )
        case "manifest":
            return answer(s, "accepted" if s.receiver == (r.run, r.epoch) else "no")
        case "read":
            return answer(s, "shows", s.label)
        case "ping":
            return answer(s, "alive") if s.receiver == (r.run, r.epoch) else answer(s, "no")
    return _load(s, r, t, mine)


def _begin(s: Server, r: Request, t: Tables) -> Server:
    if s.receiver != (r.run, r.epoch):
        return s._replace(answer=("no",))
    memory, refused = t.staging(s.memory, server.Begin(r.version, r.version))
    if refused:
        return s._replace(memory=memory, answer=("no",))
    return s._replace(memory=memory, request=r._replace(kind="sending"))


def _load(s: Server, r: Request, t: Tables, mine: bool) -> Server:
    s = s._replace(session=True)
    engine, refused = t.fence(s.engine, server.CommitRequested(r.run, r.epoch, r.version))
    granted = not refused
    memory, lent = s.memory, False
    if granted and s.receiver is not None:
        # whichever epoch it serves: number, version and fingerprint (here: the run) must be those
        # of what is staged
        memory, refused = t.staging(s.memory, server.LendRequested(r.version, r.version, r.run))
        lent = not refused
    if lent:
        half = (r.run, r.version)
        return s._replace(engine=engine, memory=memory, loading=r, weights=(half, s.weights[1]))
    if granted:
        engine, _ = t.fence(engine, server.Loaded(r.run, r.version, "", ok=False, intact=True))
    after = s._replace(engine=engine, memory=memory)
    if not mine:
        return after
    # it is not reported to a lane that is not in force
    in_force = s.receiver == (r.run, r.epoch)
    told = ("applied", r.version, False, engine.intact) if in_force else ("no",)
    return after._replace(answer=told)


def load_ends(s: Server, t: Tables) -> Server:
    """The second half comes out of the staging memory as it is now."""
    r = s.loading
    assert r is not None
    found = (
        s.memory.version
        if s.receiver is not None and s.memory.phase is not server.Phase.LENT
        else r.version
    )
    was, now = s.weights[1], (r.run, found)
    if was is not None and was[0] == r.run != LONG_AGO and r.version < was[1]:
        raise Violation(
            f"version {was[1]} of a run is followed by version {r.version} on one server"
        )
    engine, _ = t.fence(s.engine, server.Loaded(r.run, r.version, "", ok=True, intact=True))
    return _report(
        s._replace(engine=engine, weights=(s.weights[0], now)),
        t,
        ("applied", r.version, True, True),
    )


def load_breaks(s: Server, t: Tables) -> Server:
    """The engine met an error in the middle of a load: half of the weights are new."""
    r = s.loading
    assert r is not None
    engine, _ = t.fence(s.engine, server.Loaded(r.run, r.version, "", ok=False, intact=False))
    return _report(s._replace(engine=engine), t, ("applied", r.version, False, False))


def _report(s: Server, t: Tables, told: tuple[Any, ...]) -> Server:
    """The engine's report, to a lane that still waits for it."""
    r = s.loading
    assert r is not None
    alive = s.receiver == (r.run, r.epoch)
    memory, _ = t.staging(s.memory, server.Returned()) if s.receiver is not None else (s.memory, ())
    waits = (
        s.lane.phase is lanes.Phase.LOADING
        and (r.run, r.epoch) == (NOW, s.lane.epoch)
        and s.request is None
    )
    answer = (told if alive else ("no",)) if waits and s.answer is None else s.answer
    return s._replace(loading=None, memory=memory, answer=answer)


def stray_executed(s: Server, t: Tables) -> Server:
    """A late or repeated request; a trainer that froze in a commit goes on from there as its table
    says."""
    r = s.stray
    assert r is not None
    refused = (
        r.kind == "load" and t.fence(s.engine, server.CommitRequested(r.run, r.epoch, r.version))[1]
    )
    after = execute(s._replace(stray=None), r, t, mine=False) if r.kind not in HARMLESS else s
    if r.run == NOW or after is s:
        return after._replace(stray=None)
    follow = {"pause": r._replace(kind="load"), "label": r._replace(kind="resume", text="")}.get(
        r.kind
    )
    if refused and r.text:
        follow = r._replace(kind="label")
    if r.kind == "greet" and r.admitted and after.engine.in_force != (r.run, r.epoch):
        zombie = lanes.Lane(lanes.Phase.CONNECTING, r.epoch, term=r.term, admitted=True)
        work = t.lane(zombie, lanes.Outranked(after.engine.term, t.clocks_behind))[1][-1]
        if isinstance(work, lanes.Connect):
            follow = r._replace(epoch=work.epoch, term=work.term)
    return after._replace(stray=follow)


def advance(s: Server, event: lanes.Event, t: Tables, name: str) -> Move:
    """The lane takes one event: the release of its image, the next request."""
    lane, actions = t.lane(s.lane, event)
    effect = "unpin" if lanes.Release() in actions else ""
    s = s._replace(lane=lane, request=None, answer=None, joined=None, plan=())
    return Move(name, _ask(s, actions[-1]), effect)


def _ask(s: Server, work: lanes.Action) -> Server:
    def request(kind: str, version: int = -1, text: str = "", term: int = 0) -> Server:
        return s._replace(request=Request(kind, NOW, s.lane.epoch, version, text, term))

    match work:
        case lanes.Connect(_, term):
            return request("greet", term=term)
        case lanes.Send(version):
            return request("send", version)
        case lanes.Pause():
            return request("pause")._replace(before=s.label if s.up else "")
        case lanes.Load(version):
            return request("load", version)
        case lanes.SetLabel(outcome, version):
            new, broken_ = lanes.Outcome.NEW, lanes.Outcome.BROKEN
            text = (
                label_of(NOW, version)
                if outcome is new
                else UNUSABLE
                if outcome is broken_
                else s.before
            )
            return request("label", text=text)._replace(before="")
        case lanes.Resume():
            return request("resume")
        case lanes.ReadLabel():
            return request("read")
        case lanes.Rest():
            return s._replace(before="")
    return s


def take_answer(s: Server, t: Tables) -> Move:
    """The lane reads the answer to its request."""
    assert s.answer is not None
    kind, *values = s.answer
    s = s._replace(answer=None)
    match kind:
        case "joined":
            held, intact = values
            asked = Request("look", NOW, s.lane.epoch)
            return Move("joined", s._replace(joined=(held, intact), request=asked))
        case "looked":
            assert s.joined is not None
            steps = t.settle(Label.parse(s.joined[0]), s.joined[1], *values)
            return _settle_on(s._replace(plan=steps), t)
        case "did":
            return _settle_on(s._replace(plan=s.plan[1:]), t)
        case "accepted":
            return _accepted(s, t)
        case "outranked":
            return advance(
                s, lanes.Outranked(values[0], t.clocks_behind), t, "another run is in force"
            )
        case "staged":
            return advance(s, lanes.Staged(values[0]), t, "staged")
        case "ok":
            done: dict[lanes.Phase, lanes.Event] = {
                lanes.Phase.PAUSING: lanes.Paused(),
                lanes.Phase.LABELLING: lanes.Labelled(),
            }
            return advance(s, done.get(s.lane.phase, lanes.Resumed()), t, "done")
        case "applied":
            return advance(s, lanes.Loaded(*values), t, "applied")
        case "shows":
            return _shows(s, values[0], t)
        case "alive":
            return advance(s, lanes.ReadBack(s.lane.version), t, "read back")
    return advance(s, lanes.Failed(), t, "refused")


def _settle_on(s: Server, t: Tables) -> Move:
    if s.plan:
        match s.plan[0]:
            case Pause():
                kind, text = "pause", ""
            case Relabel(text):
                kind = "label"
            case Resume():
                kind, text = "resume", ""
        return Move("settling", s._replace(request=Request(kind, NOW, s.lane.epoch, text=text)))
    return Move("settled", s._replace(request=Request("manifest", NOW, s.lane.epoch)))


def _shows(s: Server, text: str, t: Tables) -> Move:
    """A server that was restarted meanwhile can have taken the label; its receiver is not the one
    of this epoch any more."""
    shown = Label.parse(text)
    version = shown.version if shown is not None and shown.run_id == NOW else None
    if t.ping and version is not None and version == s.lane.version:
        return Move("it shows the version", s._replace(request=Request("ping", NOW, s.lane.epoch)))
    return advance(s, lanes.ReadBack(version), t, "read back")


def _accepted(s: Server, t: Tables) -> Move:
    """The receiver is still the one that joined, so the server was not restarted while it was
    settled."""
    assert s.joined is not None
    held = Label.parse(s.joined[0])
    version = held.version if held is not None and held.run_id == NOW else None
    return advance(s, lanes.Connected(version, s.joined[1]), t, "connected")
