"""Moves blocks between two engines through two daemons, without vLLM.

kvd serve --socket /tmp/a.sock &
kvd serve --socket /tmp/b.sock &
python move_bytes.py /tmp/a.sock /tmp/b.sock
"""

import os
import sys

from connector_shim.client import Client
from connector_shim.memory import shared_blocks
from kvd.protocol.local import FetchDone

LAYERS, BLOCKS, NBYTES = 4, 8, 4096
DIGEST = b"of the prompt..."  # 16 bytes that both engines compute from the prompt

with Client(sys.argv[1], engine_id="P") as sender, Client(sys.argv[2], engine_id="D") as receiver:
    memory, sent = shared_blocks(LAYERS, BLOCKS, NBYTES, block_size=16)
    sender.describe(memory)
    memory, received = shared_blocks(LAYERS, BLOCKS, NBYTES, block_size=16)
    receiver.describe(memory)
    address = sender.wait_up(10).advertise
    receiver.wait_up(10)

    # 40 tokens lie in blocks 5, 2 and 7 of each layer, and are held for a minute at most.
    sent[:] = os.urandom(len(sent))
    sender.offer("hello", 1, blocks=[[5, 2, 7]], digests={40: DIGEST}, tokens=40, lease_s=60)
    receiver.fetch(
        "hello", remote=address, engine_id="P", start=0, end=40, blocks=[[1, 3, 0]],
        digest=DIGEST, deadline_s=10, park_s=1,
    )  # fmt: skip
    done = None
    while done is None:
        sender.poll()
        done = next((e for e in receiver.poll(1.0) if isinstance(e, FetchDone)), None)

print(f"{done.code}: {done.nbytes} bytes by {done.transport} {done.detail}".rstrip())
for layer in range(LAYERS):
    for source, target in ((5, 1), (2, 3), (7, 0)):
        a, b = (NBYTES * (layer * BLOCKS + block) for block in (source, target))
        assert sent[a : a + NBYTES] == received[b : b + NBYTES]
