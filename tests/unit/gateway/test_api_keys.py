"""Keys name tenants and their limits, and change while the gateway runs."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from pointsman.router.v1 import placement_pb2
from pointsman_gateway.core.rate_limits import RateLimits
from pointsman_gateway.core.tenants import ANYONE, parse_keys
from pointsman_gateway.io.api_keys import LOOK_AGAIN_S, ApiKeys, KeysFromEnvironment
from tests.support.repository import REPOSITORY


def tenant(keys: ApiKeys, authorization: str, x_api_key: str = "") -> str | None:
    client = keys.client_of(authorization, x_api_key)
    return None if client is None else client.tenant


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "keys"
    file.write_text("# comment\n\nred: \nblue:k2\n".replace("red: ", "red:k1 "))
    return file


def test_keys_name_tenants(file: Path) -> None:
    keys = ApiKeys(file)
    assert [tenant(keys, f"Bearer {key}") for key in ("k1", "k2", "k3", "")] == ["red", "blue", None, None]
    assert tenant(keys, "k1") is None
    assert tenant(keys, "Basic k1") is None
    assert tenant(keys, "bearer  k1 ") == "red"
    assert tenant(keys, "", "k2") == "blue"
    assert tenant(keys, "Bearer nobody", "k2") == "blue"
    assert tenant(keys, "", "Bearer k2") is None
    file.write_text("")
    assert tenant(ApiKeys(file), "Bearer ") is None


def test_without_a_source_everyone_may_call() -> None:
    assert ApiKeys().client_of("", "") is ANYONE
    assert not ApiKeys().needed
    assert tenant(ApiKeys(lines=[]), "Bearer k") is None


def test_a_key_has_limits_and_a_salt_of_its_own() -> None:
    line = "red:k1 requests_per_minute=60 tokens_per_minute=100000 in_flight=8 cache_salt=s4lt"
    (client,) = parse_keys([line], "x").values()
    assert (client.tenant, client.limits, client.cache_salt) == ("red", RateLimits(60, 100_000, 8), "s4lt")
    assert b"k1" not in client.key


def test_a_key_has_an_interval_of_pings() -> None:
    lines = ["red:k1", "red:k2 silence_s=0", "red:k3 silence_s=12.5 in_flight=2", "red:k4 silence_s=3600"]
    assert [client.silence_s for client in parse_keys(lines, "x").values()] == [None, 0, 12.5, 3_600]


@pytest.mark.parametrize("value", ["-1", "3601", "nan", "inf", "soon"])
def test_an_interval_of_pings_has_bounds(value: str) -> None:
    with pytest.raises(ValueError, match="x:1: silence_s must be from 0 to 3,600"):
        parse_keys([f"red:k1 silence_s={value}"], "x")


def test_a_key_has_a_class_and_a_weight() -> None:
    lines = ["red:k1", "red:k2 priority=interactive weight=1000", "blue:k3 priority=standard", "blue:k4 priority=batch"]
    assert [(tenant.priority, tenant.weight) for tenant in parse_keys(lines, "x").values()] == [
        (placement_pb2.PRIORITY_STANDARD, 1),
        (placement_pb2.PRIORITY_INTERACTIVE, 1_000),
        (placement_pb2.PRIORITY_STANDARD, 1),
        (placement_pb2.PRIORITY_BATCH, 1),
    ]


@pytest.mark.parametrize(
    "line",
    [
        "secret",
        ":secret",
        "red:",
        "red: secret",
        "red:secret x",
        "red:secret in_flight=-1",
        "red:secret in_flight=1.5",
        "red:secret other=1",
        "red:secret in_flight=1 in_flight=2",
        "red:secret cache_salt=",
        "red:secret priority=first",
        "red:secret priority=",
        "red:secret weight=0",
        "red:secret weight=1001",
        "red:secret weight=0.5",
        "ok:k\nred:k",
    ],
)
def test_a_bad_line_is_named_without_its_key(line: str) -> None:
    with pytest.raises(ValueError, match=r"^there:\d+: ") as refused:
        parse_keys(["", *line.split("\n")], "there")
    assert "secret" not in str(refused.value)


def test_keys_come_from_the_environment_too(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert KeysFromEnvironment().lines() is None
    monkeypatch.setenv("POINTSMAN_GATEWAY_API_KEYS", "green:k3 in_flight=1; grey:k4")
    source = KeysFromEnvironment()
    assert "k3" not in repr(source)
    keys = ApiKeys(file, source.lines())
    assert [tenant(keys, f"Bearer {key}") for key in ("k1", "k3", "k4")] == ["red", "green", "grey"]
    monkeypatch.setenv("POINTSMAN_GATEWAY_API_KEYS", "green:k1")
    with pytest.raises(ValueError, match="1 of its keys"):
        ApiKeys(file, KeysFromEnvironment().lines())


def test_a_changed_file_is_read_again(file: Path) -> None:
    keys = ApiKeys(file)
    assert keys.refresh(0.0) is False
    file.write_text("red:new-key\n")
    assert keys.refresh(LOOK_AGAIN_S / 2) is False  # looked a moment ago
    assert keys.refresh(LOOK_AGAIN_S) is True
    assert [tenant(keys, f"Bearer {key}") for key in ("k1", "new-key")] == [None, "red"]
    assert keys.refresh(2 * LOOK_AGAIN_S) is False


def test_a_broken_or_missing_file_keeps_the_keys_from_before(file: Path) -> None:
    keys = ApiKeys(file)
    file.write_text("no key here")
    assert keys.refresh(0.0) is False
    file.unlink()
    assert keys.refresh(10.0) is False
    assert tenant(keys, "Bearer k1") == "red"
    other = file.with_name("other")
    other.write_text("blue:k9")
    os.replace(other, file)
    assert keys.refresh(20.0) is True
    assert tenant(keys, "Bearer k9") == "blue"


@pytest.mark.parametrize("others", ["", "acme:sk-1234-prod\n", "# of acme\nblue:k2 in_flight=2\nacme:sk-12345\n"])
def test_the_command_of_the_docs_revokes_one_key(tmp_path: Path, others: str) -> None:
    (command,) = re.findall(r"`(keys=.* > secrets/api-keys)`", (REPOSITORY / "docs/security.md").read_text())
    file = tmp_path / "secrets/api-keys"
    file.parent.mkdir()
    file.write_text(f"acme:sk-1234 in_flight=3\n{others}")
    keys = ApiKeys(file)
    assert tenant(keys, "Bearer sk-1234") == "acme"
    subprocess.run(["sh", "-c", command], cwd=tmp_path, check=True)
    assert file.read_text() == (others or "\n")
    assert keys.refresh(0.0)
    assert tenant(keys, "Bearer sk-1234") is None
    assert keys.digests == ApiKeys(lines=others.splitlines()).digests
