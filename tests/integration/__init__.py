"""Tests of one or several services over real sockets, with fakes for the other services."""
