"""Entry point of vLLM's general plugins: makes `KvdConnector` known by name."""

from __future__ import annotations

NAME = "KvdConnector"


def register() -> None:
    """Register the connector's class; a second call, or one after somebody else's, does nothing.

    vLLM calls this in every process that it starts, more than once in some.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME in KVConnectorFactory._registry:
        return
    KVConnectorFactory.register_connector(NAME, "connector_shim.connector", NAME)
