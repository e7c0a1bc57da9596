"""Engines that say of themselves what tests want them to say, on the way to their agents."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.support.engines.servers import Engine
from tests.support.http_request import ask

LAYERWISE_PUSH = b'pointsman_kv_transfer_info{protocol="mooncake",layerwise="True"} 1.0\n'


@contextlib.contextmanager
def announcing(engine: Engine, line: bytes = LAYERWISE_PUSH) -> Iterator[str]:
    """The address for an agent at which `engine` answers, with `line` on its /metrics."""

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            try:
                reply = ask(engine.url + self.path)
            except OSError:
                # As an engine that is down: no answer.
                self.close_connection = True
                return
            body = reply.text.encode() + (line if self.path.startswith("/metrics") else b"")
            self.send_response(reply.status)
            self.send_header("Content-Type", "text/plain" if self.path.startswith("/metrics") else "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            mine, _, options = engine.target.partition("?")
            yield f"http://127.0.0.1:{server.server_port}?advertise={mine}&{options}"
        finally:
            server.shutdown()
            thread.join()
