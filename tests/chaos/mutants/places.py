"""Files that several guards are in, and tests that see several of them missing."""

from __future__ import annotations

SHM, SERVING = "kvd/transport/shm.py", "kvd/transport/tcp_serving.py"
FETCHES, GRANTS = "kvd/core/fetches.py", "kvd/core/grants.py"
SESSION, TRACKING = "connector_shim/session.py", "connector_shim/tracking.py"
MIDWAY = "tests/contract/test_safety.py::test_blocks_reused_in_mid_copy_are_not_accepted"
STOPPED = "tests/contract/test_safety.py::test_after_stop_no_byte_lands_once_the_pull_returned"
STALE = "tests/contract/test_stale_reads.py::test_a_reader_never_accepts_reused_blocks"
CORE, CLIENT = "tests/unit/core", "tests/unit/client"
