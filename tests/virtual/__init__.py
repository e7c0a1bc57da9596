"""Tests of routers, agents and gateways together in virtual time, under any order of faults."""
