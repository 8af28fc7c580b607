"""What runs inside an engine.

`client.Client` is the engine-neutral part: it registers memory with a kvd daemon, offers blocks,
fetches into blocks, and tells how each ended. It needs neither vLLM nor torch;
docs/examples/move_bytes.py moves bytes with it. `memory` describes KV memory, `fence` is the table
that makes stale reads impossible, `spawn` starts a daemon as a child. vLLM's connector
(`connector.KvdConnector`) stands on top of it.
"""
