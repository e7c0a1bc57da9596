"""By which evidence an engine is healthy, unhealthy or gone."""

from __future__ import annotations

from pointsman_agent.core.engine_life import ALIVE_AFTER_SIGN_S, GONE_AFTER_S, UNHEALTHY_AFTER, EngineLife

LATER = ALIVE_AFTER_SIGN_S


def test_consecutive_failures_make_it_unhealthy_and_one_answer_healthy() -> None:
    life = EngineLife(0.0)
    for failure in range(1, UNHEALTHY_AFTER + 1):
        life.silent("refused", LATER + failure)
        assert life.healthy is (failure < UNHEALTHY_AFTER)
    assert life.problem == "refused"
    life.probed(LATER + 9.0)
    assert (life.healthy, life.problem) == (True, "")


def test_other_signs_of_life_outweigh_probes_without_an_answer() -> None:
    life = EngineLife(0.0)
    for second in range(100):
        life.silent("no answer", float(second))
        life.sign(second + 0.5)
        assert life.healthy
    for second in (103, 104):
        life.silent("no answer", float(second))
    assert not life.healthy
    life.sign(105.0)
    assert life.healthy


def test_a_sign_counts_from_its_own_time_whenever_it_is_looked_at() -> None:
    life = EngineLife(0.0)
    for failure in range(1, UNHEALTHY_AFTER + 1):
        life.sign(1.0)
        life.silent("no answer", 1.0 + LATER * failure)
    assert not life.healthy


def test_an_engine_that_says_that_it_is_dead_is_unhealthy_and_not_gone() -> None:
    life = EngineLife(0.0)
    for second in range(1, 100):
        life.said_dead("/health answered 503", float(second))
        life.sign(second + 0.5)
        assert life.healthy is (second < UNHEALTHY_AFTER)
    assert not life.gone(100.0)
    life.probed(100.0)
    assert life.healthy


def test_it_is_gone_when_nothing_answers() -> None:
    life = EngineLife(0.0)
    assert not life.gone(GONE_AFTER_S)
    assert life.gone(GONE_AFTER_S + 0.1)
    life.sign(1.0)
    assert not life.gone(GONE_AFTER_S + 0.1)
