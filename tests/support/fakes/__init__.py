"""Fake peers of one service, over real sockets."""
