"""pytest plugin for a run of vLLM's own connector tests: puts `KvdConnector` in NIXL's place.

Those tests build their engine's configuration for "NixlConnector" and a model from the network.
Here that name stands for `KvdConnector` with a daemon that is up, and the model for a local
configuration file (KVD_TEST_MODEL); nothing else of the tests is touched.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from connector_shim.connector import KvdConnector
from connector_shim.jobs import RankState
from connector_shim.metadata import KvdHandshake
from connector_shim.plugin import register

UTILS = "tests.v1.kv_connector.unit.utils"


class KvdWithDaemon(KvdConnector):
    """As after a start of an engine whose daemon runs: the handshake has told so.

    No worker takes part in those tests, so no news follow, and old news must do.
    """

    built = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        KvdWithDaemon.built += 1
        self.set_xfer_handshake_metadata_pp_aware(
            {(0, 0): KvdHandshake((0, 0), RankState("up", "127.0.0.1", 7777))}
        )
        assert self._scheduler is not None
        self._scheduler.daemons.recheck_s = float("inf")


def pytest_configure(config: pytest.Config) -> None:
    register()
    KVConnectorFactory._registry["NixlConnector"] = lambda: KvdWithDaemon


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    model = os.environ["KVD_TEST_MODEL"]
    for item in items:
        module: Any = item.module  # type: ignore[attr-defined]
        if getattr(module, "_kvd_model", None) == model:
            continue
        original = module.create_vllm_config

        def create(original: Any = original, **kwargs: Any) -> Any:
            kwargs.setdefault("model", model)
            vllm_config = original(**kwargs)
            vllm_config.model_config.skip_tokenizer_init = True
            return vllm_config

        module.create_vllm_config = create
        module._kvd_model = model
    importlib.import_module(UTILS)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.write_line(f"KvdConnector was built {KvdWithDaemon.built} times")
