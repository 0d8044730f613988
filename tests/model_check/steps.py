"""Every step that one server, its receiver, its lane or the environment can take by itself: how
they die too, and what is lost with them."""

from dataclasses import replace

from tests.model_check.calls import (
    advance,
    execute,
    load_breaks,
    load_ends,
    stray_executed,
    take_answer,
)
from tests.model_check.server import (
    BEFORE,
    HARMLESS,
    NOW,
    OLDER,
    Half,
    Move,
    Request,
    Server,
    canonical,
    label_of,
    receiving,
)
from tests.model_check.tables import Tables
from titan_grpo.protocol import lane as lanes
from titan_grpo.protocol import server
from titan_grpo.protocol.messages import Label, Standing


def moves(s: Server, t: Tables) -> list[Move]:
    """Every step that server, receiver, lane or environment can take by itself."""
    out = _faults(s, t)
    if not s.up:
        out.append(Move("server restarts", s._replace(up=True)))
    if s.lane.phase is lanes.Phase.IDLE:
        out.append(advance(s, lanes.Started(), t, "lane starts"))
    if s.lane.phase is lanes.Phase.BACKOFF:
        out.append(advance(s, lanes.Rested(), t, "lane rested"))
    if s.answer is not None:
        out.append(take_answer(s, t))
    if s.request is not None:
        out += _execute_current(s, t)
    if s.loading is not None:
        out.append(Move("load ends", load_ends(s, t)))
    if s.stray is not None and s.up and s.loading is None:
        out.append(Move(f"stray {s.stray.kind} is executed", stray_executed(s, t)))
    if s.receiver is not None and s.receiver != (NOW, s.lane.epoch) and s.loading is None:
        out.append(Move("abandoned receiver ends", _receiver_ends(s)))
    if s.lane.phase is lanes.Phase.READY and _strayed(s):
        out.append(advance(s, lanes.Failed(), t, "idle check finds something else"))
    return [m._replace(after=canonical(m.after)) for m in out]


def pin(s: Server, version: int, t: Tables) -> Server:
    """The lane got ``version`` pinned."""
    return canonical(advance(s, lanes.Newer(version), t, "pin").after)


def wants_newer(s: Server) -> bool:
    """Whether the lane waits for an image."""
    return s.lane.phase is lanes.Phase.READY


def orphans(s: Server, t: Tables) -> list[Server]:
    """The server after its trainer died and another one took over: its last request is lost, or
    comes late.

    A trainer that froze and goes on is the second case: what it still asks is said by the stray
    request and its like.
    """
    late = _trainer_dies(s, t)
    both = [late, late._replace(stray=None)] if late.stray is not None else [late]
    return [canonical(after) for after in both]


def _strayed(s: Server) -> bool:
    """Whether an idle lane that looks at its server finds it other than the ledger has it."""
    if s.lane.entry.standing is Standing.QUARANTINED:
        return not s.up or not s.paused
    return s.lane.entry.held is not None and (
        not s.up or s.paused or s.label != label_of(NOW, s.lane.entry.held)
    )


def _faults(s: Server, t: Tables) -> list[Move]:
    out: list[Move] = []
    if s.up:
        out.append(Move("server dies", _server_dies(s), fault=True))
    if s.receiver is not None:
        out.append(Move("receiver dies", _receiver_ends(s), fault=True))
    if s.request is not None and s.lane.phase is not lanes.Phase.READY:
        # what is not fenced arrives late only as its lost answer would show; a load or a hello may
        # come at any later time
        late = s.request if s.request.kind in ("greet", "load") else None
        for name, stray in (("request is lost", s.stray), ("request is delayed", late or s.stray)):
            lost = s._replace(request=None, stray=stray)
            out.append(
                advance(lost, lanes.Failed(), t, f"{s.request.kind} {name}")._replace(fault=True)
            )
    if s.answer is not None:
        out.append(
            advance(s._replace(answer=None), lanes.Failed(), t, "answer is lost")._replace(
                fault=True
            )
        )
    if s.request is not None and s.request.kind in ("greet", "load") and s.stray is None:
        out.append(Move(f"{s.request.kind} is sent twice", s._replace(stray=s.request), fault=True))
    if s.request is not None and s.request.kind == "sending" and receiving(s):
        memory, _ = t.staging(
            s.memory, server.Arrived(s.request.version, s.request.version, "", ok=False)
        )
        out.append(
            Move(
                "bytes are corrupted",
                s._replace(memory=memory, request=None, answer=("no",)),
                fault=True,
            )
        )
    if s.loading is not None:
        out.append(Move("load breaks off", load_breaks(s, t), fault=True))
    return out


def _execute_current(s: Server, t: Tables) -> list[Move]:
    request = s.request
    assert request is not None
    if not s.up:
        return [
            Move(f"{request.kind} meets a dead server", s._replace(request=None, answer=("no",)))
        ]
    if request.kind == "sending":
        if not receiving(s):
            return [Move("transfer breaks off", s._replace(request=None, answer=("no",)))]
        memory, _ = t.staging(
            s.memory, server.Arrived(request.version, request.version, request.run, ok=True)
        )
        return [
            Move(
                "all bytes arrive",
                s._replace(memory=memory, request=None, answer=("staged", request.version)),
            )
        ]
    if s.loading is not None and request.kind not in ("send", "look", "read", "ping", "manifest"):
        return []  # the engine serves one call at a time
    return [
        Move(
            f"{request.kind} is executed", execute(s._replace(request=None), request, t, mine=True)
        )
    ]


def _receiver_ends(s: Server) -> Server:
    """The receiver is gone, with its memory; a transfer to it breaks off."""
    lost = s.request is not None and s.request.kind == "sending" and receiving(s)
    request, answer = (None, ("no",)) if lost else (s.request, s.answer)
    return s._replace(receiver=None, memory=server.Staging(), request=request, answer=answer)


def _server_dies(s: Server) -> Server:
    """The engine is gone, with its receiver; who restarts it starts it with its own weights.

    A call of the present lane that was on its way goes with its connection; a zombie makes another
    one and goes on.
    """
    waiting = s.request is not None or s.loading is not None
    answer = (
        ("no",)
        if waiting and s.lane.phase is not lanes.Phase.READY and s.answer is None
        else s.answer
    )
    if s.lane.phase in (lanes.Phase.IDLE, lanes.Phase.BACKOFF, lanes.Phase.READY):
        answer = None
    return Server(
        lane=s.lane,
        answer=answer,
        joined=s.joined,
        plan=s.plan,
        before=s.before,
        stray=None if s.stray is not None and s.stray.run == NOW else s.stray,
        up=False,
    )


def _trainer_dies(s: Server, t: Tables) -> Server:
    """Another trainer takes over; the request under way becomes a stray one of the run before."""

    def aged(half: Half) -> Half:
        return None if half is None else (OLDER[half[0]], half[1])

    stray = None
    if s.request is not None and s.request.kind not in HARMLESS:
        stray = s.request._replace(run=BEFORE, text=_aged_label(s.request.text or s.before))
        version = s.lane.version if s.lane.version is not None else -1
        stray = stray._replace(version=version, admitted=s.lane.admitted)
    elif s.lane.admitted:
        # it froze, and connects anew when it comes back
        stray = Request("greet", BEFORE, s.lane.epoch + 1, term=s.lane.term, admitted=True)
    if t.clocks_behind and stray is not None and stray.kind == "greet" and not stray.admitted:
        # Left out: a first hello that arrives after the next trainer's, whose clock is behind its
        # sender's, takes the server.
        stray = None
    h = s.engine
    return s._replace(
        lane=lanes.Lane(streamed=s.lane.streamed),
        request=None,
        answer=None,
        joined=None,
        plan=(),
        before="",
        stray=stray,
        weights=(aged(s.weights[0]), aged(s.weights[1])),
        loading=None if s.loading is None else s.loading._replace(run=OLDER[s.loading.run]),
        label=_aged_label(s.label),
        engine=replace(
            h,
            in_force=(OLDER[h.in_force[0]], h.in_force[1]),
            run=OLDER[h.run],
            granted=aged(h.granted),
        ),
        receiver=None if s.receiver is None else (OLDER[s.receiver[0]], s.receiver[1]),
    )


def _aged_label(text: str) -> str:
    label = Label.parse(text)
    return text if label is None else label_of(OLDER[label.run_id], label.version)
