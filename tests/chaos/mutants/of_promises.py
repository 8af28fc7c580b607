"""Rules 4 to 11: ids, completeness, bounds, reports, deaths, geometry, sizes, and prompts."""

from __future__ import annotations

from tests.chaos.mutants.mutant import Hunk, Mutant
from tests.chaos.mutants.places import (
    CLIENT,
    CORE,
    FETCHES,
    GRANTS,
    SERVING,
    SESSION,
    TRACKING,
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
        f"{CORE}/test_grant_ends.py::test_generations_that_are_asked_for",
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
