"""Which engines without an instance a router knows of."""

from __future__ import annotations

from pointsman_router.core.instances.absent_engines import FORGOTTEN_AFTER_S, AbsentEngine, AbsentEngines


def engine(number: int, problem: str = "connection refused") -> AbsentEngine:
    return AbsentEngine(f"n:{number}", f"http://n:{number}", problem, "n")


def test_a_report_replaces_the_agents_last_one() -> None:
    absent = AbsentEngines()
    absent.reported("a", [engine(2), engine(1)], 0.0)
    absent.reported("b", [engine(3)], 0.0)
    assert absent.beside([], 1.0) == [engine(1), engine(2), engine(3)]
    absent.reported("a", [engine(2)], 2.0)
    assert absent.beside([], 2.0) == [engine(2), engine(3)]
    absent.reported("a", [], 3.0)
    assert absent.beside([], 3.0) == [engine(3)]


def test_an_engine_with_an_instance_is_not_absent_whoever_says_so() -> None:
    absent = AbsentEngines()
    absent.reported("old", [engine(1), engine(2)], 0.0)
    assert absent.beside(["n:1/0", "n:1/1"], 0.0) == [engine(2)]


def test_of_two_reports_of_one_engine_the_last_counts() -> None:
    absent = AbsentEngines()
    absent.reported("old", [engine(1, "status 500")], 0.0)
    absent.reported("new", [engine(1)], 1.0)
    assert absent.beside([], 1.0) == [engine(1)]
    absent.reported("old", [engine(1, "status 500")], 2.0)
    assert absent.beside([], 2.0) == [engine(1, "status 500")]


def test_what_is_not_repeated_is_forgotten() -> None:
    absent = AbsentEngines()
    absent.reported("a", [engine(1)], 0.0)
    assert absent.beside([], FORGOTTEN_AFTER_S) == [engine(1)]
    assert absent.beside([], FORGOTTEN_AFTER_S + 0.1) == []
