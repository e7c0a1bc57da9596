"""An HTTP/1.1 server on bare uvloop Protocols; the client towards instances is in io/engines."""
