"""How servers, receivers and trainers die, and what is lost with them."""

from dataclasses import replace

from tests.model_check.server import (
    BEFORE,
    HARMLESS,
    NOW,
    OLDER,
    Half,
    Request,
    Server,
    label_of,
    receiving,
)
from tests.model_check.tables import Tables
from titan_grpo.protocol import lane as lanes
from titan_grpo.protocol import ledger, staging
from titan_grpo.protocol.messages import Label


def receiver_ends(s: Server) -> Server:
    """The receiver is gone, with its memory; a transfer to it breaks off."""
    lost = s.request is not None and s.request.kind == "sending" and receiving(s)
    request, answer = (None, ("no",)) if lost else (s.request, s.answer)
    return s._replace(receiver=None, memory=staging.Staging(), request=request, answer=answer)


def server_dies(s: Server) -> Server:
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
        entry=s.entry,
        answer=answer,
        joined=s.joined,
        plan=s.plan,
        before=s.before,
        stray=None if s.stray is not None and s.stray.run == NOW else s.stray,
        up=False,
    )


def trainer_dies(s: Server, t: Tables) -> Server:
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
        entry=ledger.Entry(),
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
