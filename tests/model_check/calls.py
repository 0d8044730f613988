"""What a server does with a request: the production fence and staging tables around an engine of
two halves."""

from typing import Any

from tests.model_check.server import BEFORE, HARMLESS, LONG_AGO, NOW, Request, Server, label_of
from tests.model_check.tables import Tables, Violation
from titan_grpo.protocol import fence, staging
from titan_grpo.protocol import lane as lanes


def execute(s: Server, r: Request, t: Tables, mine: bool) -> Server:
    """What the server does with a request, and its answer if it is the present lane's
    (``mine``)."""

    def answer(after: Server, *values: Any) -> Server:
        return after._replace(answer=values) if mine else after

    match r.kind:
        case "greet":
            engine, actions = t.fence(s.engine, fence.OpenEpoch(r.run, r.epoch, r.term))
            run_in_force = s.engine.in_force[0]
            if not isinstance(actions[0], fence.Serve):
                if run_in_force == r.run:
                    return answer(s._replace(engine=engine), "no")
                return answer(s._replace(engine=engine), "outranked", engine.term)
            if (run_in_force, r.run) == (NOW, BEFORE):
                raise Violation("a trainer that was replaced takes the server back")
            s = s._replace(engine=engine, receiver=(r.run, r.epoch), memory=staging.Staging())
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
    memory, actions = t.staging(s.memory, staging.Begin(r.version, r.version))
    if not isinstance(actions[0], staging.Write):
        return s._replace(memory=memory, answer=("no",))
    return s._replace(memory=memory, request=r._replace(kind="sending"))


def _load(s: Server, r: Request, t: Tables, mine: bool) -> Server:
    s = s._replace(session=True)
    engine, actions = t.fence(s.engine, fence.CommitRequested(r.run, r.epoch, r.version))
    if not isinstance(actions[0], fence.Grant):
        # it is not reported to a lane that is not in force
        told = (
            ("applied", r.version, False, engine.intact)
            if s.receiver == (r.run, r.epoch)
            else ("no",)
        )
        return s._replace(engine=engine, answer=told) if mine else s._replace(engine=engine)
    memory, lent = s.memory, False
    if s.receiver is not None:
        # whichever epoch it serves: number, version and fingerprint (here: the run) must be those
        # of what is staged
        memory, did = t.staging(s.memory, staging.LendRequested(r.version, r.version, r.run))
        lent = isinstance(did[0], fence.Grant)
    if not lent:
        engine, _ = t.fence(engine, fence.Loaded(r.run, r.version, "", ok=False, intact=True))
        told = (
            ("applied", r.version, False, engine.intact)
            if s.receiver == (r.run, r.epoch)
            else ("no",)
        )
        after = s._replace(engine=engine, memory=memory)
        return after._replace(answer=told) if mine else after
    half = (r.run, r.version)
    return s._replace(engine=engine, memory=memory, loading=r, weights=(half, s.weights[1]))


def load_ends(s: Server, t: Tables) -> Server:
    """The second half comes out of the staging memory as it is now."""
    r = s.loading
    assert r is not None
    found = (
        s.memory.version
        if s.receiver is not None and s.memory.phase is not staging.Phase.LENT
        else r.version
    )
    was, now = s.weights[1], (r.run, found)
    if was is not None and was[0] == r.run != LONG_AGO and r.version < was[1]:
        raise Violation(
            f"version {was[1]} of a run is followed by version {r.version} on one server"
        )
    engine, _ = t.fence(s.engine, fence.Loaded(r.run, r.version, "", ok=True, intact=True))
    return _report(
        s._replace(engine=engine, weights=(s.weights[0], now)),
        t,
        ("applied", r.version, True, True),
    )


def load_breaks(s: Server, t: Tables) -> Server:
    """The engine met an error in the middle of a load: half of the weights are new."""
    r = s.loading
    assert r is not None
    engine, _ = t.fence(s.engine, fence.Loaded(r.run, r.version, "", ok=False, intact=False))
    return _report(s._replace(engine=engine), t, ("applied", r.version, False, False))


def _report(s: Server, t: Tables, told: tuple[Any, ...]) -> Server:
    """The engine's report, to a lane that still waits for it."""
    r = s.loading
    assert r is not None
    alive = s.receiver == (r.run, r.epoch)
    memory, _ = (
        t.staging(s.memory, staging.Returned()) if s.receiver is not None else (s.memory, ())
    )
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
    refused = r.kind == "load" and not isinstance(
        t.fence(s.engine, fence.CommitRequested(r.run, r.epoch, r.version))[1][0], fence.Grant
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
