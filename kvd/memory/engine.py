"""EngineMemory: one engine rank's KV memory and fence table, mapped into this daemon.

Opened once at registration (or at attach, read-only, for a peer's memory), closed at pin count 0.
"""

from __future__ import annotations
