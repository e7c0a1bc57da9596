"""Which chunks of a prompt no other prompt has, as the connector package finds them."""

from __future__ import annotations

from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from pointsman_connector.own_chunks import OwnChunks


def keys(text: str) -> list[bytes]:
    """The keys of a prompt: each names its chunk and all before it."""
    return [beginning.encode() for beginning in accumulate(text)]


def test_what_two_prompts_have_in_common_belongs_to_neither() -> None:
    own = OwnChunks()
    own.seen(keys("sysab"))
    own.seen(keys("sysxyz"))
    assert own.of(b"sysab") == [b"sysab", b"sysa"]
    assert own.of(b"sysxyz") == [b"sysxyz", b"sysxy", b"sysx"]


def test_the_turns_of_a_session_are_one_prompt() -> None:
    own = OwnChunks()
    own.seen(keys("sys"))
    own.seen(keys("sysab"))
    own.seen(keys("sysabcd")[4:])
    assert own.of(b"sysabcd") == keys("sysabcd")[::-1], "the head of the last turn was in the engine's own cache"


def test_a_prompt_that_another_one_continues_owns_nothing() -> None:
    own = OwnChunks()
    own.seen(keys("sys"))
    own.seen(keys("sysab"))
    assert own.of(b"sys") == []


def test_a_fork_is_known_after_its_other_branch_is_gone() -> None:
    own = OwnChunks()
    own.seen(keys("sab"))
    own.seen(keys("sxy"))
    for key in (b"sab", b"sa"):
        own.forget(key)
    assert own.of(b"sxy") == [b"sxy", b"sx"]
    own.forget(b"s")
    own.forget(b"sx")
    assert own.of(b"sxy") == [b"sxy"]
    own.clear()
    assert len(own) == 0


@given(st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=8), st.integers(0, 7))
def test_own_chunks_are_those_of_a_set(prompts: list[str], at: int) -> None:
    own = OwnChunks()
    for prompt in prompts:
        own.seen(keys(prompt))
    last = prompts[at % len(prompts)]
    others = {key for prompt in prompts if not last.startswith(prompt) for key in keys(prompt)}
    expected = [] if last.encode() in others else [key for key in keys(last)[::-1] if key not in others]
    assert own.of(last.encode()) == expected
