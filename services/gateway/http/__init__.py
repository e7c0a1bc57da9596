"""HTTP/1.1 on bare uvloop Protocols: the server that clients reach, and the pooled client that reaches instances."""
