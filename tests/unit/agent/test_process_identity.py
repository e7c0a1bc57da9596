"""Whether the process behind an address is still the same."""

from __future__ import annotations

from pointsman_agent.core.process_identity import IdentityChange, ProcessIdentity


def test_an_identity_stays_changes_and_alternates() -> None:
    identity = ProcessIdentity()
    assert [identity.observe(start, 0, 0) for start in (1.0, 1.0, 2.0, 2.0)] == [
        IdentityChange.NEW,
        IdentityChange.SAME,
        IdentityChange.NEW,
        IdentityChange.SAME,
    ]
    assert identity.observe(1.0, 0, 0) is IdentityChange.ALTERNATING
    assert identity.observe(2.0, 0, 0) is IdentityChange.ALTERNATING
    looks = [identity.observe(2.0, 0, 0) for _ in range(61)]
    assert looks.count(IdentityChange.NEW) == 1
    assert looks[-1] is IdentityChange.SAME


def test_a_process_that_does_not_tell_its_start_is_followed_by_its_counters() -> None:
    identity = ProcessIdentity()
    assert identity.observe(None, 10, 10) is IdentityChange.NEW
    assert identity.anonymous
    assert identity.observe(None, 11, 10) is IdentityChange.SAME
    for _ in range(10):
        identity.observe(None, 11, 11)
    assert identity.observe(None, 0, 0) is IdentityChange.NEW
    assert not identity.alternating


def test_an_engine_that_restarts_again_and_again_is_no_load_balancer() -> None:
    identity = ProcessIdentity()
    looks = [identity.observe(start, 0, 0) for start in (1.0, 2.0, 3.0, 3.0, 4.0, 5.0, 6.0)]
    assert IdentityChange.ALTERNATING not in looks
    assert identity.observe(4.0, 0, 0) is IdentityChange.ALTERNATING, "an earlier one answers again"


def test_anonymous_processes_that_take_turns_are_seen_too() -> None:
    identity = ProcessIdentity()
    looks = [identity.observe(None, tokens, 0) for tokens in (10, 500, 10, 500, 11, 501, 11, 501, 11)]
    assert looks[-1] is IdentityChange.ALTERNATING


def test_an_announced_run_names_an_engine_that_has_several_api_servers() -> None:
    identity = ProcessIdentity()
    assert identity.observe(None, 5, 5, run="7f") is IdentityChange.NEW
    assert identity.observe(None, 9, 9, run="7f") is IdentityChange.SAME
    assert not identity.anonymous
    assert identity.observe(None, 10, 10, run="80") is IdentityChange.NEW, "though no counter fell"
    assert identity.observe(1000.0, 11, 11, run="80") is IdentityChange.NEW
    assert identity.current == "1000.000", "as before, if there is a start time"


def test_a_page_without_the_start_time_or_a_counter_shows_no_restart() -> None:
    identity = ProcessIdentity()
    assert identity.observe(1_000.0, 50, 20, run="a") is IdentityChange.NEW
    for page in ((None, 50, 20, "a"), (1_000.0, None, 20, "a"), (None, None, None, ""), (1_000.0, 60, 20, "a")):
        assert identity.observe(*page[:3], run=page[3]) is IdentityChange.SAME
    assert identity.observe(None, 70, 20, run="b") is IdentityChange.NEW
    plain = ProcessIdentity()
    plain.observe(1_000.0, 50, 20)
    assert plain.observe(None, 51, 20) is IdentityChange.SAME
    assert plain.observe(None, 3, 1) is IdentityChange.NEW
