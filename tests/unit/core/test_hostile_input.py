"""Any input, in any order: the core answers or records it, and keeps its invariants."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvd.core import events as ev
from kvd.core import instructions as ins
from kvd.core.config import CoreConfig
from kvd.core.machine import Core
from kvd.core.packed import NULL, pack
from kvd.protocol import local, peer
from kvd.protocol.types import PeerAddr, Rank, Watermark
from tests.unit.core.engine import NBYTES, digest, geometry, layouts

GROUPS = (0, 1, 0)
ADDR = PeerAddr("p", 1)
CONFIG = CoreConfig(
    max_offers=4,
    max_fetches=4,
    max_parked=2,
    max_tombstones=4,
    max_early_releases=2,
    max_blocks=64,
    min_job_bytes=NBYTES,
    max_job_bytes=2 * NBYTES,
    max_shm_job_bytes=2 * NBYTES,
    max_jobs=2,
    max_attachments=3,
    max_notifies=2,
    max_peers=2,
    fetch_max_s=20.0,
)

sessions = st.integers(1, 3)
clients = st.integers(1, 2)
transfers = st.sampled_from(["T", "U"])
fetch_ids = st.sampled_from(["f", "g"])
generations = st.integers(0, 3)
maybe_generation = generations | st.none()
tokens = st.sampled_from([0, 1, 16, 24, 32, 48, 2**62])
small = st.integers(0, 4) | st.just(2**32 - 1)
packed = st.lists(st.integers(0, 9) | st.just(NULL), max_size=5).map(pack) | st.just(b"abc")
seconds = st.sampled_from([0.0, 0.5, 5.0, 86_400.0])
codes = st.sampled_from(["ok", "fenced", "transport_error", "cancelled", "nonsense", ""])
addrs = st.sampled_from([ADDR, PeerAddr("q", 1), PeerAddr("r", 1)])
attach_ids = st.integers(0, 40).map(lambda n: f"1-{n}")
digests = st.sampled_from([digest("T", 32), digest("T", 16), bytes(16)])
marks = st.lists(st.builds(Watermark, small, small, tokens), max_size=2)
blocks = st.lists(packed, max_size=3)
engine_ids = st.sampled_from(["P", "D", "X"])

shim_messages = st.one_of(
    st.builds(
        local.Offer, transfers, generations, small, st.integers(0, 3), seconds, st.booleans()
    ),
    st.builds(local.OfferBlocks, transfers, generations, small, small, packed),
    st.builds(
        local.OfferDigests, transfers, generations, st.just(pack([16, 32])), st.binary(max_size=40)
    ),
    st.builds(local.Extend, transfers, generations, tokens, small, small),
    st.builds(local.Seal, transfers, generations, tokens),
    st.builds(local.Revoke, transfers, generations),
    st.builds(local.RevokeAll),
    st.builds(
        local.Fetch,
        fetch_ids,
        transfers,
        maybe_generation,
        addrs,
        engine_ids,
        tokens,
        tokens,
        digests,
        seconds,
        seconds,
        blocks=st.none() | st.lists(packed, max_size=3),
    ),
    st.builds(local.FetchBlocks, fetch_ids, small, small, packed),
    st.builds(local.FetchGo, fetch_ids),
    st.builds(local.Cancel, fetch_ids),
    st.builds(local.Release, transfers, maybe_generation, addrs, engine_ids),
    st.builds(local.Renew, transfers, maybe_generation, addrs, engine_ids),
    st.builds(local.Ping, small),
    st.builds(local.Bye),
    st.builds(local.Register, st.just(geometry(GROUPS)), st.just(4)),
)
client_messages = st.one_of(
    st.builds(peer.PeerHello, engine_ids, engine_ids, engine_ids),
    st.builds(
        peer.Attach,
        attach_ids,
        engine_ids,
        engine_ids,
        small,
        st.builds(Rank, tp_rank=small),
        st.just(geometry(GROUPS)),
        st.lists(st.sampled_from(["shm", "tcp", "x"]), max_size=2),
    ),
    st.builds(peer.Detach, attach_ids),
    st.builds(
        peer.FetchReq,
        fetch_ids,
        attach_ids,
        transfers,
        maybe_generation,
        tokens,
        tokens,
        digests,
        seconds,
    ),
    st.builds(peer.FetchGot, fetch_ids, generations, tokens),
    st.builds(peer.FetchClose, fetch_ids, codes, small),
    st.builds(peer.PeerRelease, transfers, maybe_generation, engine_ids),
    st.builds(peer.PeerRenew, transfers, maybe_generation, engine_ids),
    st.builds(peer.Heartbeat, small),
)
peer_messages = st.one_of(
    st.builds(
        peer.AttachOk,
        attach_ids,
        small,
        st.sampled_from(["shm", "tcp", "x"]),
        small,
        st.just([]),
        st.just(list(layouts(GROUPS))),
        small,
        small,
    ),
    st.builds(peer.AttachRefused, attach_ids, codes, codes),
    st.builds(
        peer.Grant,
        fetch_ids,
        generations,
        st.binary(min_size=16, max_size=16),
        small,
        small,
        blocks,
        marks,
        st.booleans(),
        st.booleans(),
    ),
    st.builds(peer.FetchRefused, fetch_ids, codes, codes),
    st.builds(peer.Progress, fetch_ids, generations, blocks, marks, st.booleans()),
    st.builds(peer.FetchRevoked, fetch_ids, generations, codes, st.booleans()),
    st.builds(peer.NotifyResult, transfers, st.sampled_from(["release", "renew", "x"]), codes),
    st.builds(peer.EngineGone, engine_ids, small),
    st.builds(peer.HeartbeatAck, small),
)
events = st.one_of(
    st.builds(
        ev.SessionOpened,
        sessions,
        engine_ids,
        small,
        st.just(Rank()),
        st.just("both"),
        st.booleans(),
    ),
    st.builds(
        ev.SessionRegistered,
        sessions,
        st.just(geometry(GROUPS)),
        st.just(8),
        st.just(()),
        st.just(layouts(GROUPS)),
        st.integers(0, 4),
    ),
    st.builds(ev.SessionClosed, sessions),
    st.builds(ev.ShimMessage, sessions, shim_messages),
    st.builds(ev.ShimMessage, sessions, shim_messages),
    st.builds(ev.ShimMessage, sessions, shim_messages),
    st.builds(ev.PeerUp, addrs, engine_ids, small, st.booleans()),
    st.builds(ev.PeerDown, addrs, codes, codes),
    st.builds(ev.PeerMessage, addrs, peer_messages),
    st.builds(ev.PeerMessage, addrs, peer_messages),
    st.builds(ev.ClientJoined, clients, engine_ids, small, st.booleans()),
    st.builds(ev.ClientLeft, clients, codes),
    st.builds(ev.ClientMessage, clients, client_messages),
    st.builds(ev.ClientMessage, clients, client_messages),
    st.builds(ev.TransportOpened, attach_ids),
    st.builds(ev.TransportFailed, attach_ids, codes, codes),
    st.builds(ev.PullDone, st.integers(0, 60), small),
    st.builds(ev.PullFailed, st.integers(0, 60), codes, codes),
    st.builds(ev.TicketRead, st.binary(min_size=16, max_size=16)),
    st.builds(ev.Tick),
)


@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(
    st.lists(st.tuples(events, st.sampled_from([0.0, 0.0, 0.0, 0.3, 5.0])), max_size=80),
    st.randoms(use_true_random=False),
    st.booleans(),
)
def test_no_input_raises(story: list[tuple[ev.Event, float]], random: object, drain: bool) -> None:
    core = Core(CONFIG, 1, "d", PeerAddr("d", 1), "test")
    now = 0.0
    told: set[tuple[int, str]] = set()
    jobs: dict[int, int] = {}
    opened: list[str] = []

    def run(event: ev.Event) -> None:
        for one in core.handle(event, now):
            match one:
                case ins.SendShim(session, local.FetchDone() as message):
                    assert (session, message.fetch_id) not in told
                    told.add((session, message.fetch_id))
                case ins.SendShim():
                    pass
                case ins.StartPull():
                    jobs[one.job] = one.nbytes
                case ins.OpenTransport():
                    opened.append(one.attach_id)
                case ins.CloseTransport():
                    opened.remove(one.attach_id)
        core.validate()

    run(ev.SessionOpened(1, "P", 1, Rank(), "both"))
    run(ev.SessionRegistered(1, geometry(GROUPS), 8, (), layouts(GROUPS), 4))
    run(ev.ClientJoined(1, "c", 1, True))
    run(
        ev.ClientMessage(
            1, peer.Attach("1-0", "P", "D", 1, Rank(), geometry(GROUPS), ["shm", "tcp"])
        )
    )
    for i, (event, wait) in enumerate(story):
        now += wait
        if isinstance(event, ev.SessionOpened) and event.session in {s for s, _ in told}:
            # A session's number is never used again.
            continue
        if isinstance(event, ev.PullDone | ev.PullFailed):
            jobs.pop(event.job, None)
        run(event)
        if drain and i == len(story) // 2:
            run(ev.DrainStarted())
    for session in (1, 2, 3):
        run(ev.SessionClosed(session))
    for job in list(jobs):
        run(ev.PullFailed(job, "cancelled", ""))
    assert opened == []
    assert core.statistics().sessions == 0
    assert not core.fetches.by_id
    assert not core.jobs.running
    _ = random
