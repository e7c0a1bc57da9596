"""A small HTTP server in a thread, for code that asks one without an event loop."""

from __future__ import annotations

import http.server
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def serving(page: Callable[[str], tuple[int, bytes]], tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """Run a server on a free port of 127.0.0.1; yield its base URL. `page` returns status and body by the path. `tls`: for
    https."""

    class Pages(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = page(self.path)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.do_GET()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Pages) as server:
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http{'s' if tls is not None else ''}://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
