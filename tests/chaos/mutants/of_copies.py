"""Rules 1 to 3: who writes, what makes a read valid, and when a copy is over."""

from __future__ import annotations

from tests.chaos.mutants.mutant import Hunk, Mutant
from tests.chaos.mutants.places import (
    CLIENT,
    CORE,
    FETCHES,
    MIDWAY,
    SERVING,
    SESSION,
    SHM,
    STALE,
    STOPPED,
    TRACKING,
)

WRITER_IS_OWNER = (
    Mutant(
        "peers are given memory that they can write",
        1,
        (
            Hunk(
                "kvd/memory/engine.py",
                'os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)',
                'os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)',
            ),
        ),
        "tests/unit/memory/test_sharing.py::test_shared_descriptors_are_read_only_for_good",
    ),
    Mutant(
        "the owner's user may open shared memory for writing again",
        1,
        (Hunk("kvd/memory/engine.py", "os.fchmod(fd, 0o400)", "os.fchmod(fd, 0o600)"),),
        "tests/unit/memory/test_sharing.py::test_shared_descriptors_are_read_only_for_good",
    ),
)

NO_LOOK_AFTER_SHM = Hunk(
    SHM,
    "        if self._failure is None and not self.stopped:\n"
    '            self._check_fence("after")\n',
    "",
)

NO_LOOK_AFTER_TCP = (
    Hunk(
        SERVING,
        "            fault = self._fault(view, request)\n"
        "            if fault is not None and vector.done >= head.nbytes:\n"
        "                break\n",
        "",
    ),
    Hunk(
        SERVING,
        "        if fault is None:\n"
        "            # All bytes are copied into the socket by now: "
        "this check is what makes them valid.\n"
        "            fault = self._fault(view, request)\n",
        "",
    ),
)

READS_ARE_VALIDATED = (
    Mutant(
        "shm: no look at the fence word after the copy",
        2,
        (NO_LOOK_AFTER_SHM,),
        f"{MIDWAY}[shm]",
        "wrong",
    ),
    Mutant(
        "tcp: no look at the fence word once bytes are sent",
        2,
        NO_LOOK_AFTER_TCP,
        f"{MIDWAY}[tcp]",
        "wrong",
    ),
    Mutant(
        "tcp: the same, from memory of a GPU",
        2,
        NO_LOOK_AFTER_TCP,
        f"{STALE}[tcp_cuda]",
        "wrong",
    ),
    Mutant(
        "cuda_ipc: no look at the fence word after the copy",
        2,
        (
            Hunk(
                "kvd/transport/cuda_ipc.py",
                '                self._check_fence(job, "after")\n',
                "",
            ),
        ),
        f"{STALE}[cuda_ipc]",
        "wrong",
    ),
    Mutant(
        "nccl: no look at the fence word once bytes are gathered",
        2,
        (
            Hunk(
                "kvd/transport/nccl_serving.py",
                "            # All bytes are in staging by now: "
                "this check is what makes them valid.\n"
                "            self._check(view, want)\n",
                "",
            ),
        ),
        f"{STALE}[nccl]",
        "wrong",
    ),
    Mutant(
        "nccl: no look at the fence word once bytes are sent from blocks",
        2,
        (
            Hunk(
                "kvd/transport/nccl_serving.py",
                "                self._check(chunk.run.view, chunk.want)\n",
                "",
            ),
        ),
        "tests/cuda/test_nccl_runs.py::test_blocks_reused_in_mid_send_touch_nothing",
    ),
    Mutant(
        "shm: the same, found by the fault suite",
        2,
        (NO_LOOK_AFTER_SHM,),
        "tests/chaos/test_chaos.py::test_what_engines_are_told_is_true_whatever_fails[shm]",
        "told good",
    ),
    Mutant(
        "shm without a fence table",
        2,
        (
            Hunk(
                "kvd/core/clients.py",
                "if transport in SAME_HOST and not memory.fence_slots:",
                "if False:",
            ),
        ),
        f"{CORE}/test_attaches.py::test_the_first_transport_that_is_allowed",
    ),
    Mutant(
        "the word is dropped after the end of its offer is told",
        2,
        (
            Hunk(
                TRACKING,
                "        self._drop(key)\n"
                "        self._remember(key)\n"
                "        self._events.append(OfferEnded("
                "transfer_id=key[0], generation=key[1], reason=reason))\n",
                "        self._remember(key)\n"
                "        self._events.append(OfferEnded("
                "transfer_id=key[0], generation=key[1], reason=reason))\n"
                "        self._drop(key)\n",
            ),
        ),
        f"{CLIENT}/test_tracking.py::test_the_word_is_dropped_before_the_end_is_an_event",
    ),
    Mutant(
        "the fence word is never dropped",
        2,
        (Hunk("connector_shim/fence.py", "        self._words[held[0]] = DEAD\n", ""),),
        f"{CLIENT}/test_fence.py::test_a_word_lives_from_arm_to_drop_for_every_mapping",
    ),
    Mutant(
        "words live on when the daemon's socket ends",
        2,
        (
            Hunk(
                TRACKING,
                "        if self.fence is not None:\n            self.fence.drop_all()\n",
                "",
            ),
            Hunk(TRACKING, "        self._drop(key)\n        self._remember(key)\n", ""),
        ),
        f"{CLIENT}/test_session.py::"
        "test_eof_ends_everything_once_with_dead_words_and_registers_again",
    ),
    Mutant(
        "a silent daemon keeps a lease for ever",
        2,
        (
            Hunk(
                SESSION,
                "for transfer_id, generation in self._tracker.expire_offers(now):",
                "for transfer_id, generation in ():",
            ),
        ),
        f"{CLIENT}/test_silence.py::"
        "test_a_lease_ends_by_the_shims_clock_while_the_daemon_is_silent",
    ),
)

DONE_MEANS_QUIET = (
    Mutant(
        "core: the end is told while copies run",
        3,
        (
            Hunk(
                FETCHES,
                "        if fetch.jobs:\n            self.ctx.emit(StopPulls(fetch.id))\n"
                "            return FetchState.DRAINING\n",
                "",
            ),
            Hunk(
                FETCHES,
                '        """The one place where a fetch ends: no job of it is in flight."""\n'
                "        assert fetch.jobs == 0\n",
                "",
            ),
        ),
        f"{CORE}/test_fetch.py::test_cancel_is_told_when_nothing_can_land",
    ),
    Mutant(
        "core: another fetch may be given blocks that are still written into",
        3,
        (
            Hunk(
                FETCHES,
                "        if fetch.jobs:\n            self.ctx.emit(StopPulls(fetch.id))\n",
                "        for held, ids in zip("
                "fetch.session.destinations, fetch.reserved, strict=False):\n"
                "            held -= ids\n"
                "        if fetch.jobs:\n            self.ctx.emit(StopPulls(fetch.id))\n",
            ),
        ),
        f"{CORE}/test_fetch.py::test_destinations_stay_taken_until_the_end_is_told",
    ),
    Mutant(
        "core: an engine's memory is given back while copies run",
        3,
        (
            Hunk(
                "kvd/core/sessions.py",
                "if session.alive or session.jobs or session.fetches:",
                "if session.alive:",
            ),
        ),
        f"{CORE}/test_sessions.py::test_memory_is_given_back_when_the_last_job_has_ended",
    ),
    Mutant(
        "shm: a stopped pull ends before its running copy",
        3,
        (
            Hunk(
                SHM,
                "        work.stopped = True\n",
                "        work.stopped = True\n"
                '        work.outcome.set(TransportError(Code.CANCELLED, ""))\n',
            ),
            # A copy that goes on to the end of its batch, as one huge call would.
            Hunk(
                SHM,
                "                if self._interrupted():\n                    return\n",
                "",
            ),
        ),
        f"{STOPPED}[shm]",
    ),
    Mutant(
        "tcp: a stopped pull ends while its bytes land",
        3,
        (
            Hunk(
                "kvd/transport/tcp_jobs.py",
                "if chunk.state in (State.QUEUED, State.ASKED, State.LANDED):",
                "if chunk.state is not State.ENDED:",
            ),
            Hunk(
                "kvd/transport/tcp_stream.py",
                "if landing and (chunk.job.over or not go_on):",
                "if landing and not go_on:",
            ),
            Hunk(
                "kvd/transport/tcp_jobs.py",
                "            chunk.state = state\n            if state is State.LANDED",
                "            if chunk.state is State.ENDED:\n                return\n"
                "            chunk.state = state\n            if state is State.LANDED",
            ),
        ),
        f"{STOPPED}[tcp]",
    ),
    Mutant(
        "shim: a daemon that is left is taken for quiet",
        3,
        (
            Hunk(
                SESSION,
                "            self.phase = Phase.LEAVING\n",
                "            self._tracker.fail_fetches(Code.DAEMON_GONE, detail)\n"
                "            self.phase = Phase.LEAVING\n",
            ),
        ),
        f"{CLIENT}/test_nonsense.py::test_after_nonsense_a_fetch_ends_only_when_the_daemon_has_closed",
    ),
    Mutant(
        "shim: a closed socket is taken for a quiet GPU",
        3,
        (Hunk(SESSION, "elif self._tracker.num_fetches and self._on_gpu():", "elif False:"),),
        f"{CLIENT}/test_dying.py::test_blocks_on_a_gpu_stay_held_until_a_dying_daemon_has_exited",
        "told ended while the GPU could write",
    ),
    Mutant(
        "shim: a daemon that is exiting is taken for one that closed in order",
        3,
        (Hunk("connector_shim/peerproc.py", "not flags & _PF_EXITING and ", ""),),
        f"{CLIENT}/test_dying.py::test_blocks_on_a_gpu_stay_held_until_a_dying_daemon_has_exited",
        "told ended while the GPU could write",
    ),
)
