#!/opt/pointsman/bin/python
"""Health probe for containers without curl: `pointsman-probe grpc HOST:PORT [SERVICE]` or `pointsman-probe http URL`.

Exit status 0 when the service says that it serves, 1 with the reason on stderr otherwise.
"""

from __future__ import annotations

import os
import ssl
import sys
import urllib.error
import urllib.request

TIMEOUT_S = 3.0


def why_unhealthy(kind: str, address: str, service: str = "") -> str | None:
    """Why the server at `address` is not healthy, or None when it is. `kind` is "grpc" or "http"; `service` of a gRPC server."""
    if kind == "http":
        try:
            trusted = ssl.create_default_context(cafile=os.environ.get("POINTSMAN_TLS_CA") or None)
            with urllib.request.urlopen(address, timeout=TIMEOUT_S, context=trusted):
                return None
        except (urllib.error.URLError, OSError) as error:
            return str(error)
    import grpc  # Only where it is used: an http probe is three times as fast without it.
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from pointsman.common.io.channel import open_blocking_channel

    with open_blocking_channel(address) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=service), timeout=TIMEOUT_S
            )
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
    serving = health_pb2.HealthCheckResponse.SERVING
    return None if answer.status == serving else health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


def main(arguments: list[str]) -> int:
    """Run one probe; returns the exit status."""
    if arguments[:1] not in (["grpc"], ["http"]) or len(arguments) not in ((2, 3) if arguments[0] == "grpc" else (2,)):
        print("usage: pointsman-probe grpc HOST:PORT [SERVICE] | http URL", file=sys.stderr)
        return 2
    reason = why_unhealthy(*arguments)
    if reason is not None:
        print(f"{arguments[1]}: {reason}", file=sys.stderr)
    return 0 if reason is None else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
