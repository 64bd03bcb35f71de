"""Where a stack may be reached: this machine only, unless there is a key."""

from __future__ import annotations

import pytest

from apis.errors import PortBusy, StackError
from distributions.server import bind, check_exposure


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org"])
def test_another_address_than_this_machines_own_needs_a_key(host: str):
    with pytest.raises(StackError, match="POSTGRAD_API_KEY"):
        check_exposure(host, None)
    check_exposure(host, "sesame")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_this_machines_own_address_needs_no_key(host: str):
    check_exposure(host, None)


def test_a_busy_port_is_refused_with_the_remedy():
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(PortBusy, match=rf"port {port} .*--port"):
            bind("127.0.0.1", port)
