"""What a lane makes of an answer: the production lane, ledger and settle tables, and the request
that follows."""

from tests.model_check.server import NOW, Move, Request, Server, label_of
from tests.model_check.tables import Tables
from titan_grpo.protocol import lane as lanes
from titan_grpo.protocol.messages import UNUSABLE, Label
from titan_grpo.protocol.recovery import Pause, Relabel, Resume


def advance(s: Server, event: lanes.Event, t: Tables, name: str) -> Move:
    """The lane takes one event: ledger notes, the release of its image, the next request."""
    lane, actions = t.lane(s.lane, event)
    entry, effect = s.entry, ""
    for action in actions[:-1]:
        if isinstance(action, lanes.Release):
            effect = "unpin"
        else:
            entry, _ = t.ledger(entry, action.event)
    s = s._replace(lane=lane, entry=entry, request=None, answer=None, joined=None, plan=())
    return Move(name, _ask(s, actions[-1]), effect)


def _ask(s: Server, work: lanes.Action) -> Server:
    def request(kind: str, version: int = -1, text: str = "") -> Server:
        return s._replace(request=Request(kind, NOW, s.lane.epoch, version, text))

    match work:
        case lanes.Connect(_, term):
            asked = request("greet")
            return asked._replace(request=asked.request._replace(term=term))
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
