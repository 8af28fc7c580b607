"""The client when its daemon drains, and when the client itself closes."""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable

import pytest

from connector_shim.client import Client
from connector_shim.errors import ClientError
from connector_shim.events import Up
from kvd.protocol import local
from kvd.protocol.codes import Code
from tests.conftest import wait_for
from tests.unit.client.fake import (
    REMOTE,
    FakeDaemon,
    describe,
    fetch,
    of_type,
    offer,
    state,
    welcome,
)


def test_a_draining_daemon_gets_nothing_new_and_finishes_the_rest(
    up: Client, daemon: FakeDaemon
) -> None:
    offer(up)
    fetch_id = fetch(up)
    daemon.read()
    daemon.say(local.State(True))
    assert up.poll() == [local.State(True)]
    assert state(up) == "draining"
    for call in (lambda: offer(up, "new"), lambda: fetch(up)):
        with pytest.raises(ClientError) as caught:
            call()
        assert caught.value.code is Code.DRAINING
    assert up.cancel(fetch_id)
    up.release("t", remote=REMOTE, engine_id="p")
    assert up.seal("t", 1, tokens=3)
    assert len(daemon.read()) == 3
    daemon.say(local.State(False))
    up.poll()
    assert state(up) == "up"


def test_a_daemon_that_drains_already_says_so(client: Client, daemon: FakeDaemon) -> None:
    client.poll()
    daemon.accept()
    daemon.say_raw(welcome(draining=True))
    client.poll()
    daemon.say(local.Registered(1))
    client.poll()
    assert state(client) == "draining"
    daemon.hang_up()
    daemon.boot_id = 2
    client.poll()
    assert state(client) == "down"


def test_a_drain_that_begins_while_registering_is_told(client: Client, daemon: FakeDaemon) -> None:
    client.poll()
    daemon.accept()
    daemon.say_raw(welcome())
    daemon.say(local.State(True))
    assert client.poll() == []
    daemon.say(local.Registered(1))
    up, change = client.poll()
    assert isinstance(up, Up)
    assert change == local.State(True)
    assert state(client) == "draining"


def test_closing_kills_the_words_and_says_goodbye(up: Client, daemon: FakeDaemon) -> None:
    offer(up)
    (opened,) = of_type(daemon.read(), local.Offer)
    with mmap.mmap(daemon.fds[1], 0, prot=mmap.PROT_READ) as table:
        assert up.close()
        assert struct.unpack_from("<Q", table, 8 * opened.slot) == (0,)
    assert daemon.read() == [local.Bye()]
    assert daemon.saw_eof()
    assert up.poll() == []
    assert up.close()
    with pytest.raises(ClientError):
        offer(up)


def test_closing_with_fetches_out_tells_whether_they_are_still(
    make_client: Callable[..., Client], daemon: FakeDaemon
) -> None:
    client = make_client()
    daemon.take_in(client)
    fetch(client)
    assert not client.close(0.0)


def test_closing_waits_for_the_daemon_to_stop_writing(
    make_client: Callable[..., Client], daemon: FakeDaemon
) -> None:
    client = make_client()
    daemon.take_in(client)
    fetch(client)
    daemon.hang_up()
    assert client.close(5.0)


def test_no_descriptor_is_left(path: os.PathLike[str], daemon: FakeDaemon) -> None:
    before = set(os.listdir("/proc/self/fd"))
    client = Client(str(path), engine_id="engine")
    describe(client)
    for boot_id in range(3):
        daemon.boot_id = boot_id
        wait_for(lambda: (client.poll(), client.fileno())[1], what="a connection")
        daemon.take_in(client)
        daemon.hang_up()
        client.poll()
    client.close()
    assert set(os.listdir("/proc/self/fd")) == before
