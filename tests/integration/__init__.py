"""A service, or several, over real sockets, before fake neighbours."""
