"""Which URLs and addresses data sets may be fetched from."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from apis.errors import InvalidField
from post_training.data.addresses import check_address, check_url
from providers.localfs.config import LocalFSConfig

# -- which hosts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "http://other.example/a.csv",
        "http://data.example.org:8080/a.csv",
        "https://data.example.org:80/a.csv",
        "http://sub.data.example.org/a.csv",
        "http://data.example.org.evil.example/a.csv",
        "http://evil.example/data.example.org/a.csv",
        "http://evil.example#data.example.org/a.csv",
        "http://evil.example?data.example.org/a.csv",
        "http://127.0.0.1/a.csv",
        "http://2130706433/a.csv",
        "http://0x7f.1/a.csv",
        "http://[::1]/a.csv",
    ],
)
def test_a_host_that_is_not_listed_is_refused_by_name(url: str):
    with pytest.raises(InvalidField, match="allowed_hosts"):
        check_url(url, ["data.example.org"])


@pytest.mark.parametrize(
    "url",
    [
        "http://data.example.org@evil.example/a.csv",
        "http://user:secret@data.example.org/a.csv",
        "http://evil.example\\@data.example.org/a.csv",
        "http://data.example.org\\.evil.example/a.csv",
        "http://data.example.org/a\r\nHost: evil.example",
        "http://data.example.org/a b.csv",
        "http://data.example.org/\u00e4.csv",
        "http://data.example.org:port/a.csv",
        "http://data.example.org:99999/a.csv",
        "http:///a.csv",
        "http:data.example.org/a.csv",
        "http://[data.example.org/a.csv",
        "ftp://data.example.org/a.csv",
        "http://data.example.org/" + "x" * 3000,
    ],
)
def test_what_could_be_read_in_two_ways_is_no_url(url: str):
    with pytest.raises(InvalidField) as caught:
        check_url(url, ["data.example.org", "evil.example"])
    assert "secret" not in caught.value.message


def test_a_listed_host_is_known_by_any_way_of_writing_it():
    for url in (
        "http://DATA.Example.org/a?b=c",
        "http://data.example.org.:80/a?b=c",
        "HTTP://data.example.org/a?b=c#d",
    ):
        address = check_url(url, ["data.example.org"])
        assert (address.scheme, address.host, address.port, address.target) == (
            "http",
            "data.example.org",
            80,
            "/a?b=c",
        )
    assert check_url("https://data.example.org", ["data.example.org"]).target == "/"
    assert check_url(
        "https://xn--bcher-kva.example/a", LocalFSConfig(allowed_hosts=["b\u00fccher.example"]).allowed_hosts
    )
    assert check_url("http://[2606:4700::1]:8080/a", ["[2606:4700::1]:8080"]).port == 8080


@pytest.mark.parametrize("entry", ["", "*.example.org", "http://example.org", "example.org/a", "a@b", "example.org:x"])
def test_an_entry_that_would_never_match_is_refused_when_the_stack_starts(entry: str):
    with pytest.raises(ValidationError):
        LocalFSConfig(allowed_hosts=[entry])


# -- which addresses -------------------------------------------------------------------------------------------------

PRIVATE = ["127.0.0.1", "127.8.8.8", "10.0.0.1", "172.16.0.1", "172.31.255.255", "192.168.1.1", "100.64.0.1", "::1"]
PRIVATE += ["fc00::1", "fd12:3456::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "64:ff9b::7f00:1", "64:ff9b::10.0.0.1"]
NEVER = ["0.0.0.0", "0.1.2.3", "169.254.169.254", "169.254.0.1", "224.0.0.1", "239.1.1.1", "240.0.0.1", "192.0.0.192"]
NEVER += ["255.255.255.255", "192.0.2.1", "198.18.0.1", "198.51.100.1", "203.0.113.1", "192.88.99.1", "168.63.129.16"]
NEVER += ["::", "fe80::1", "fe80::1%eth0", "ff02::1", "fec0::1", "fd00:ec2::254", "100.100.100.200", "::127.0.0.1"]
NEVER += ["::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe", "64:ff9b:1::1", "2001:db8::1", "2001::1", "2002:7f00:1::"]
NEVER += ["100::1", "3fff::1", "5f00::1", "4000::1", "::ffff:0:127.0.0.1"]
PUBLIC = ["8.8.8.8", "93.184.216.34", "172.15.0.1", "172.32.0.1", "100.63.0.1", "100.128.0.1", "169.253.0.1"]
PUBLIC += ["2606:4700::1", "2a00:1450::1", "::ffff:8.8.8.8", "64:ff9b::8.8.8.8"]


def test_only_addresses_of_the_public_internet_are_let_through():
    for address in PRIVATE + NEVER:
        with pytest.raises(InvalidField, match="not one of the public internet"):
            check_address(address, allow_private=False)
    for address in PUBLIC:
        check_address(address, allow_private=False)


def test_the_setting_lets_private_addresses_through_and_no_others():
    for address in PRIVATE + PUBLIC:
        check_address(address, allow_private=True)
    for address in NEVER:
        with pytest.raises(InvalidField):
            check_address(address, allow_private=True)
