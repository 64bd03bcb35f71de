"""Where a stack may be reached: this machine only, unless there is a key."""

from __future__ import annotations

import pytest

from apis.errors import PortBusy, StackError
from distributions.server import bind, check_exposure


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org"])
def test_another_address_than_this_machines_own_needs_a_key(host: str):
    with pytest.raises(StackError, match="POSTGRAD_API_KEY"):
        check_exposure(host, None)
    check_exposure(host, "a-key-beyond-guessing")


@pytest.mark.parametrize("key", ["k3", "sesame", "0123456789abcde", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"])
def test_a_key_that_can_be_guessed_is_refused_where_others_can_try_and_warned_of_elsewhere(
    key: str, caplog: pytest.LogCaptureFixture
):
    with pytest.raises(StackError, match=r"can be guessed.*openssl rand -hex 32.*postgrad keys create"):
        check_exposure("0.0.0.0", key)
    check_exposure("127.0.0.1", key)
    assert "can be guessed" in caplog.text
    assert key not in caplog.text


@pytest.mark.parametrize("key", ["0123456789abcdef", "pg_" + "Zq7-x_" * 8, "sha256:" + "a" * 64])
def test_a_key_beyond_guessing_or_a_digest_is_taken_without_a_word(key: str, caplog: pytest.LogCaptureFixture):
    check_exposure("0.0.0.0", key)
    assert caplog.text == ""


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_this_machines_own_address_needs_no_key(host: str):
    check_exposure(host, None)


def test_a_busy_port_is_refused_with_the_remedy():
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(PortBusy, match=rf"port {port} .*--port"):
            bind("127.0.0.1", port)
