"""The guards, by safety rule. A test fails by what it saw: wrong bytes or a wrong answer."""

from __future__ import annotations

from dataclasses import replace

from tests.chaos.mutants.mutant import Hunk, Mutant

SHM, SERVING = "kvd/transport/shm.py", "kvd/transport/tcp_serving.py"
FETCHES, GRANTS = "kvd/core/fetches.py", "kvd/core/grants.py"
SESSION, TRACKING = "connector_shim/session.py", "connector_shim/tracking.py"
MIDWAY = "tests/contract/test_safety.py::test_blocks_reused_in_mid_copy_are_not_accepted"
STOPPED = "tests/contract/test_safety.py::test_after_stop_no_byte_lands_once_the_pull_returned"
STALE = "tests/contract/test_stale_reads.py::test_a_reader_never_accepts_reused_blocks"
CORE, CLIENT = "tests/unit/core", "tests/unit/client"

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

IDS = (
    Mutant(
        "the producer grants whatever generation it has",
        4,
        (
            Hunk(
                GRANTS,
                "if offer is not None and (wanted is None or wanted == offer.generation):",
                "if offer is not None:",
            ),
        ),
        f"{CORE}/test_grants.py::test_generations_that_are_asked_for",
    ),
    Mutant(
        "the consumer takes whatever generation is granted",
        4,
        (
            Hunk(
                FETCHES,
                "if message.generation is not None and grant.generation != message.generation:",
                "if False:",
            ),
        ),
        f"{CORE}/test_fetch_answers.py::test_a_grant_of_another_generation_than_named",
    ),
    Mutant(
        "an older epoch of an engine replaces the newer",
        4,
        (
            Hunk(
                "kvd/core/sessions.py",
                "if any(other.epoch > event.epoch for other in rivals):",
                "if False:",
            ),
        ),
        f"{CORE}/test_sessions.py::test_an_older_epoch_of_a_rank_is_turned_away",
    ),
    Mutant(
        "a release that comes before its offer is forgotten",
        4,
        (Hunk("kvd/core/offers.py", "        self._apply_early_release(offer)\n", ""),),
        f"{CORE}/test_offers.py::test_a_release_before_its_offer_is_remembered",
    ),
)

MANIFEST = (
    Mutant(
        "nccl: a receive that was given up is one",
        5,
        (
            Hunk(
                "kvd/transport/nccl_comm.py",
                "                self._thread.call(confirm).add_done_callback(settle)\n",
                "                settle(received)\n",
            ),
        ),
        "tests/cuda/test_nccl_link.py::test_a_receive_that_nccl_gave_up_is_no_receive",
    ),
    Mutant(
        "nccl: what ended with the communicator counts",
        5,
        (
            Hunk(
                "kvd/transport/nccl_link.py",
                "        self._check()\n        return True\n",
                "        return True\n",
            ),
        ),
        "tests/cuda/test_nccl_link.py::test_what_ends_with_the_communicator_was_not_received",
    ),
    Mutant(
        "core: one layer of a block is enough",
        5,
        (
            Hunk(
                "kvd/core/manifest.py",
                "                if group.done[i] == group.required:\n"
                "                    group.missing -= 1\n",
                "                if group.done[i] == group.required:\n"
                "                    group.missing = 0\n",
            ),
        ),
        f"{CORE}/test_parts.py::test_a_manifest_against_a_plain_set",
    ),
    Mutant(
        "core: a failure names no bad blocks",
        5,
        (
            Hunk(
                FETCHES,
                "            return fetch.manifest.bad()\n",
                "            return [bitmap(0, fetch.count) for _ in fetch.dst]\n",
            ),
        ),
        f"{CORE}/test_fetch.py::test_a_broken_copy_names_the_blocks_that_are_not_there",
    ),
    Mutant(
        "tcp: what is not valid yet is served",
        5,
        (Hunk(SERVING, "    if held < needed:\n", "    if False:\n"),),
        "tests/contract/test_tcp_server.py::test_what_is_not_valid_yet_is_refused",
    ),
    Mutant(
        "shim: a success with bad blocks is believed",
        5,
        (
            Hunk(
                TRACKING,
                "if succeeded and not any(map(any, message.bad)) and (fits or not message.bad):",
                "if succeeded:",
            ),
        ),
        f"{CLIENT}/test_tracking.py::test_an_end_that_contradicts_itself_fails_every_block",
    ),
)

BOUNDS = (
    Mutant(
        "a parked request waits as long as its peer likes",
        6,
        (
            Hunk(
                GRANTS,
                "wait = min(message.park_s, self._ctx.config.park_max_s)",
                "wait = message.park_s",
            ),
        ),
        f"{CORE}/test_grants.py::test_parking_is_bounded_in_time_and_number",
    ),
    Mutant(
        "stuck peers take every job",
        6,
        (Hunk("kvd/core/jobs.py", "        if one.jobs == 0:\n            return True\n", ""),),
        f"{CORE}/test_jobs.py::test_stuck_peers_leave_room_for_others",
    ),
)

ONCE = (
    Mutant(
        "shim: the end of a fetch is told as often as it comes",
        7,
        (
            Hunk(
                TRACKING,
                "fetch = self._fetches.pop(message.fetch_id, None)",
                "fetch = self._fetches.get(message.fetch_id)",
            ),
        ),
        f"{CLIENT}/test_tracking.py::test_late_double_and_unknown_ends_are_counted_and_dropped",
    ),
    Mutant(
        "vLLM is told of a request that it was told of before",
        7,
        (
            Hunk(
                "connector_shim/reports.py",
                "req_id = self._holds.pop_key(key)",
                "req_id = self._holds.by_key.get(key)",
            ),
        ),
        "tests/unit/shim/test_reports.py::test_case_6_late_and_double_completions",
    ),
)

DEATH = (
    Mutant(
        "a dead engine's memory is kept",
        8,
        (
            Hunk(
                "kvd/core/sessions.py",
                "        if self.by_id.pop(session.id, None) is not None:\n"
                "            self._ctx.emit(ReleaseSession(session.id))\n",
                "        self.by_id.pop(session.id, None)\n",
            ),
        ),
        f"{CORE}/test_sessions.py::test_a_quiet_session_is_released_at_once_and_once",
    ),
    Mutant(
        "a daemon's death is not told for what it was fetching",
        8,
        (
            Hunk(
                SESSION,
                "        self._tracker.fail_fetches(Code.DAEMON_GONE, detail)\n",
                "",
            ),
        ),
        f"{CLIENT}/test_session.py::"
        "test_eof_ends_everything_once_with_dead_words_and_registers_again",
    ),
)

GEOMETRY = (
    Mutant(
        "geometries are not compared",
        9,
        (
            Hunk(
                "kvd/core/clients.py",
                "        if difference is not None:\n            name, ours",
                "        if difference is not None and message is None:\n            name, ours",
            ),
        ),
        "tests/integration/daemon/test_refusals.py::"
        "test_a_geometry_mismatch_names_the_field_and_both_values[shm-kv_dtype]",
        "GEOMETRY_MISMATCH",
    ),
)

SIZES = (
    Mutant(
        "block ids from a peer are not checked",
        10,
        (
            Hunk(
                "kvd/transport/jobs.py",
                'unpack_ids(piece.src, remote_blocks, f"job',
                'unpack_ids(piece.src, 2**32 - 1, f"job',
            ),
        ),
        "tests/contract/test_safety.py::"
        "test_source_ids_that_the_peer_does_not_have_are_refused[shm-40]",
    ),
    Mutant(
        "a reachable address needs nobody's consent",
        10,
        (
            Hunk(
                "kvd/settings.py",
                "        if not self.insecure and not self.keys:\n",
                "        if False:\n",
            ),
        ),
        "tests/unit/ops/test_config.py::test_a_reachable_address_needs_insecure",
    ),
)

PROMPTS = (
    Mutant(
        "another prompt's KV is granted",
        11,
        (Hunk(GRANTS, "if digest != request.message.digest:", "if False:"),),
        f"{CORE}/test_fetch_answers.py::test_another_prompt_moves_nothing",
    ),
    Mutant(
        "KV without a digest is granted",
        11,
        (
            Hunk(
                GRANTS,
                "        if digest is None:\n            if offer.sealed is None:\n",
                "        if digest is None:\n            return True\n"
                "            if offer.sealed is None:\n",
            ),
        ),
        f"{CORE}/test_grants.py::test_a_sealed_offer_without_the_digest_is_refused",
    ),
)

# The core checks its own invariants in tests; without that, the test alone has to see it.
BLIND = Hunk(
    "kvd/core/invariants.py",
    "    _check_sessions(core)\n    _check_offers(core)\n",
    "    if core is not None:\n        return\n"
    "    _check_sessions(core)\n    _check_offers(core)\n",
)
_ALL = (
    *WRITER_IS_OWNER,
    *READS_ARE_VALIDATED,
    *DONE_MEANS_QUIET,
    *IDS,
    *MANIFEST,
    *BOUNDS,
    *ONCE,
    *DEATH,
    *GEOMETRY,
    *SIZES,
    *PROMPTS,
)
MUTANTS: tuple[Mutant, ...] = tuple(
    replace(mutant, hunks=(*mutant.hunks, BLIND)) if mutant.test.startswith(CORE) else mutant
    for mutant in _ALL
)
