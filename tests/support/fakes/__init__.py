"""Neighbours made up for one service, over real sockets."""
