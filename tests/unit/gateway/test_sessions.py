"""Whose turn a prompt is, known from its keys."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pointsman_gateway.core.request.sessions import Sessions, bounded_id

KEYS = st.lists(st.integers(0, 2**64 - 1), max_size=6)


def test_a_longer_prompt_continues_the_shorter_one() -> None:
    sessions = Sessions()
    assert sessions.resolve("t", [1, 2, 3], hint="", fresh="a") == "a"
    assert sessions.resolve("t", [1, 2, 3, 4, 5], hint="", fresh="b") == "a"
    assert sessions.resolve("t", [1, 2, 3, 4, 5, 6], hint="", fresh="c") == "a"
    assert sessions.resolve("t", [1, 2, 9], hint="", fresh="d") == "d"


def test_the_longest_continuation_counts() -> None:
    sessions = Sessions()
    sessions.resolve("t", [1, 2], hint="short", fresh="")
    sessions.resolve("t", [1, 2, 3, 4], hint="long", fresh="")
    assert sessions.resolve("t", [1, 2, 3, 4, 5], hint="", fresh="new") == "long"


def test_a_fork_over_the_same_beginning_is_another_session() -> None:
    sessions = Sessions()
    sessions.resolve("t", [1, 2], hint="", fresh="a")
    assert sessions.resolve("t", [1, 2, 3], hint="", fresh="b") == "a"
    assert sessions.resolve("t", [1, 2, 7], hint="", fresh="c") == "c"
    assert sessions.resolve("t", [1, 2, 7, 8], hint="", fresh="d") == "c"
    assert sessions.resolve("t", [1, 2, 3, 4], hint="", fresh="e") == "a"


def test_the_clients_own_word_wins_and_is_remembered() -> None:
    sessions = Sessions()
    assert sessions.resolve("t", [1], hint="mine", fresh="a") == "mine"
    assert sessions.resolve("t", [1, 2], hint="", fresh="b") == "mine"


def test_tenants_do_not_see_each_other() -> None:
    sessions = Sessions()
    sessions.resolve("red", [1, 2], hint="", fresh="a")
    assert sessions.resolve("blue", [1, 2, 3], hint="", fresh="b") == "b"


def test_a_prompt_without_keys_is_new_each_time() -> None:
    sessions = Sessions()
    assert sessions.resolve("t", [], hint="", fresh="a") == "a"
    assert sessions.resolve("t", [], hint="", fresh="b") == "b"
    assert len(sessions) == 0


def test_finding_remembers_nothing() -> None:
    sessions = Sessions()
    sessions.resolve("t", [1], hint="", fresh="a")
    assert sessions.find("t", [1, 2]) == "a"
    assert sessions.find("t", [1, 3]) == "a"
    assert sessions.find("t", [4]) is None
    assert len(sessions) == 1


@given(
    st.lists(st.tuples(st.sampled_from(["x", "y"]), KEYS, st.sampled_from(["", "hint"])), max_size=40),
    st.integers(1, 5),
)
def test_memory_is_bounded_and_the_last_prompt_is_always_known(
    prompts: list[tuple[str, list[int], str]], capacity: int
) -> None:
    sessions = Sessions(capacity)
    for at, (tenant, keys, hint) in enumerate(prompts):
        session = sessions.resolve(tenant, keys, hint=hint, fresh=f"s{at}")
        assert len(sessions) <= capacity
        if keys:
            assert sessions.find(tenant, keys) == session


@given(st.text())
def test_any_text_makes_an_id_that_fits_a_header(text: str) -> None:
    name = bounded_id(text)
    assert 0 < len(name) <= 128
    assert name.isascii()
    assert name.isprintable()
    assert bounded_id(name) == name
