"""Addresses: HOST:PORT with IPv6 in brackets, URLs, ZMQ endpoints."""

import pytest

from pointsman_common.core.addresses import Address, address_of_url, connect_endpoint, parse_address


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:8080", "127.0.0.1", 8080),
        ("router-0.routers:50051", "router-0.routers", 50051),
        ("[::1]:9100", "::1", 9100),
        ("[::]:0", "::", 0),
        ("[fe80::1%eth0]:80", "fe80::1%eth0", 80),
        (":9101", "", 9101),
    ],
)
def test_an_address_is_printed_as_it_was_parsed(text: str, host: str, port: int) -> None:
    assert parse_address(text) == (host, port)
    assert str(parse_address(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "8080",
        "a",
        "a:",
        "a:b",
        "a:65536",
        "::1:8080",
        "[::1]",
        "[::1]8080",
        "[a]:80",
        "[10.0.0.1]:80",
        "http://a:80",
    ],
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="HOST:PORT"):
        parse_address(text)


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://[::1]:8000/v1", "[::1]:8000"),
        ("http://[fd00::7]", "[fd00::7]:80"),
        ("https://engine", "engine:443"),
        ("http://10.0.0.7:8000", "10.0.0.7:8000"),
    ],
)
def test_the_address_of_a_url(url: str, address: str) -> None:
    assert str(address_of_url(url)) == address


def test_all_interfaces_are_of_both_families() -> None:
    assert parse_address("[::]:80").to_listen == parse_address(":80").to_listen == (None, 80)
    assert parse_address("0.0.0.0:80").to_listen == ("0.0.0.0", 80)
    assert [Address(host, 1).is_wildcard for host in ("", "::", "0.0.0.0", "::1")] == [True, True, True, False]


@pytest.mark.parametrize(
    ("endpoint", "host", "reached"),
    [
        ("tcp://*:5557", "fd00::7", "tcp://[fd00::7]:5557"),
        ("tcp://0.0.0.0:5557", "10.0.0.7", "tcp://10.0.0.7:5557"),
        ("tcp://[::]:5557", "engine", "tcp://engine:5557"),
        ("tcp://:::5557", "::1", "tcp://[::1]:5557"),
        ("tcp://[fd00::8]:5557", "::1", "tcp://[fd00::8]:5557"),
        ("ipc:///run/kv/events", "::1", "ipc:///run/kv/events"),
    ],
)
def test_where_a_bound_endpoint_is_reached(endpoint: str, host: str, reached: str) -> None:
    assert connect_endpoint(endpoint, host) == reached
