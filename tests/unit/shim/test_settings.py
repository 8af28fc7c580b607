"""kv_connector_extra_config: by name, with types and bounds."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from connector_shim.settings import _CHECKS, ShimSettings, hooks_layers


def test_defaults_pass_their_own_checks() -> None:
    settings = ShimSettings()
    values = {field.name: getattr(settings, field.name) for field in fields(settings)}
    assert values.keys() == _CHECKS.keys()
    assert ShimSettings.parse(values) == settings


def test_values_are_taken() -> None:
    extra = {"socket": "/run/x.sock", "lease_s": 5, "max_held_fraction": 1, "daemon": "spawn",
             "spawn": {"transport": "tcp"}}  # fmt: skip
    settings = ShimSettings.parse(extra)
    assert (settings.socket, settings.lease_s, settings.daemon) == ("/run/x.sock", 5.0, "spawn")
    assert isinstance(settings.lease_s, float)
    assert settings.spawn == {"transport": "tcp"}


def test_p2pnccls_spelling_of_send_types_will_do() -> None:
    for name in ("GET", "PUT", "PUT_ASYNC"):
        assert ShimSettings.parse({"send_type": name}).send_type == name.lower()
    assert not hooks_layers({"send_type": "GET", "stream_unit": "layer"})
    assert hooks_layers({"send_type": "PUT", "stream_unit": "layer"})


def test_unknown_keys_are_named_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'lease'") as caught:
        ShimSettings.parse({"lease": 5})
    for field in fields(ShimSettings):
        assert field.name in str(caught.value)


@pytest.mark.parametrize(
    "extra",
    [
        {"lease_s": "30"},
        {"lease_s": 0},
        {"lease_s": True},
        {"lease_s": float("nan")},
        {"max_held_fraction": 1.5},
        {"daemon": "fork"},
        {"socket": 5},
        {"spawn": []},
        {"spawn": {1: 2}},
        {"log_level": "loud"},
        {"daemon_hang_s": 0.1},
    ],
)
def test_bad_values_are_named(extra: dict[str, Any]) -> None:
    (key,) = extra
    with pytest.raises(ValueError, match=key):
        ShimSettings.parse(extra)
