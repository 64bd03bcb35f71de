"""Which URLs data sets may be fetched from, and which addresses their hosts may have.

Both are asked: a host must be listed, and what its name resolves to must be an address of the public internet, so that
a listed name which is made to point into this machine's own network leads nowhere.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network
from urllib.parse import urlsplit

from apis.errors import InvalidField

_PORTS = {"http": 80, "https": 443}
_PRINTABLE = re.compile(r"[!-\[\]-~]+")  # visible ASCII without the backslash, which browsers take for a slash
_MAX_URL = 2048
_PARAM = "source.uri"

# What the IANA special-purpose registries keep out of the public internet, multicast, and 6to4 (RFC 7526). Written down
# here, since what `ipaddress` calls global changes from one Python to the next.
_PRIVATE = tuple(
    map(
        ip_network, ("10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "::1", "fc00::/7")
    )
)
_NEVER = tuple(
    map(
        ip_network,
        (
            "0.0.0.0/8",
            "169.254.0.0/16",
            "192.0.0.0/24",
            "192.0.2.0/24",
            "192.88.99.0/24",
            "198.18.0.0/15",
            "198.51.100.0/24",
            "203.0.113.0/24",
            "224.0.0.0/4",
            "240.0.0.0/4",
            "2001::/23",
            "2001:db8::/32",
            "2002::/16",
            "3fff::/20",
            # Where clouds tell a machine its secrets, other than 169.254.169.254: Azure, Alibaba, Amazon.
            "168.63.129.16",
            "100.100.100.200",
            "fd00:ec2::/32",
        ),
    )
)
_GLOBAL_IPV6 = IPv6Network("2000::/3")
_NAT64 = IPv6Network("64:ff9b::/96")


@dataclass(frozen=True)
class WebAddress:
    """An http or https URL that may be fetched.

    Attributes:
        host: lower case, in ASCII.
        target: path and query.
    """

    scheme: str
    host: str
    port: int
    target: str

    @property
    def has_default_port(self) -> bool:
        return self.port == _PORTS[self.scheme]

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.target}"


def check_url(url: str, allowed_hosts: Collection[str]) -> WebAddress:
    """Take a URL apart and check that it may be fetched.

    Args:
        allowed_hosts: `host`, on the scheme's own port, or `host:port`.

    Raises:
        InvalidField: it is no plain http(s) URL, or its host is not listed.
    """
    if len(url) > _MAX_URL or not _PRINTABLE.fullmatch(url):
        raise InvalidField(
            f"a URL has at most {_MAX_URL} characters, all of them visible ASCII and none a backslash: "
            "percent-encode what is not",
            param=_PARAM,
        )
    address = _take_apart(url)
    if not any(_listed(address, entry) for entry in allowed_hosts):
        raise InvalidField(
            f"data sets are not read over {address.scheme!r} from {address.host}:{address.port}: have it added to "
            "`allowed_hosts` of the datasetio provider in run.yaml, or send the rows (source type 'rows')",
            param=_PARAM,
        )
    return address


def _take_apart(url: str) -> WebAddress:
    try:
        parts = urlsplit(url)
        host, port = canonical_host(parts.hostname or ""), parts.port
    except ValueError:
        raise InvalidField(f"{url[:100]!r} is not a URL", param=_PARAM) from None
    if parts.scheme not in _PORTS or not host:
        raise InvalidField(f"{url[:100]!r} is not an http:// or https:// URL with a host", param=_PARAM)
    if parts.username is not None or parts.password is not None:
        raise InvalidField("a URL must hold no user or password: it is stored, and shown in lists", param=_PARAM)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return WebAddress(parts.scheme, host, _PORTS[parts.scheme] if port is None else port, target)


def canonical_host(host: str) -> str:
    """A host's name as it is compared: lower case, in ASCII, without the last dot. Raises ValueError."""
    host = host.lower().removesuffix(".")
    return host if host.isascii() else host.encode("idna").decode("ascii")


def check_allowed_host(entry: str) -> str:
    """An entry of `allowed_hosts`, as it is compared. Raises ValueError where it is no host and no `host:port`."""
    parts = urlsplit(f"//{entry}")
    host = canonical_host(parts.hostname or "")
    if not host or parts.path or parts.query or parts.username is not None or "*" in host or "/" in entry:
        raise ValueError(f"{entry!r} is not of the form host or host:port, such as data.example.org")
    shown = f"[{host}]" if ":" in host else host
    return shown if parts.port is None else f"{shown}:{parts.port}"


def _listed(address: WebAddress, entry: str) -> bool:
    parts = urlsplit(f"//{entry}")
    port = _PORTS[address.scheme] if parts.port is None else parts.port
    return parts.hostname == address.host and port == address.port


def check_address(text: str, allow_private: bool) -> None:
    """Refuse an address, as the resolver gave it, that is not one of the public internet.

    Args:
        allow_private: let this machine's own and private networks through; never link-local addresses (a cloud's
            metadata), multicast and the like.

    Raises:
        InvalidField: without the address, which would tell about the network.
    """
    address = _embedded(ip_address(text.partition("%")[0]))
    private = any(address in network for network in _PRIVATE)
    never = any(address in network for network in _NEVER)
    if isinstance(address, IPv6Address) and not private:
        never = never or address not in _GLOBAL_IPV6
    if never or (private and not allow_private):
        raise InvalidField(
            "the URL's host has an address that is not one of the public internet, and such are not fetched from; "
            "`allow_private_addresses` of the datasetio provider in run.yaml lets private ones through",
            param=_PARAM,
        )


def _embedded(address: IPv4Address | IPv6Address) -> IPv4Address | IPv6Address:
    """The IPv4 address that an IPv6 one leads to: mapped (RFC 4291), or translated by NAT64 (RFC 6052)."""
    if isinstance(address, IPv4Address):
        return address
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return IPv4Address(int(address) & 0xFFFFFFFF) if address in _NAT64 else address
