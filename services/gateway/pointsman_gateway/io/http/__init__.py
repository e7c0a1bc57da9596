"""An HTTP/1.1 server on plain uvloop protocols. The HTTP client for instances is in io/engines."""
