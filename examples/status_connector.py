"""A connector for telemetry.status_bridge: it writes every number that a run sends into a CSV file.

    python examples/status_connector.py 61000 status.csv
    python jobs/diloco.py @ job.toml --telemetry.status_bridge 127.0.0.1:61000

A connector to any other tool differs in `write` only. It needs nothing but Python.
"""

import csv
import json
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

FIELDS = ("worker_id", "round", "metric_name", "value")


class Handler(BaseHTTPRequestHandler):
    """Takes POST /status with a JSON object of `FIELDS`."""

    protocol_version = "HTTP/1.1"  # One connection for all requests.
    file: Path

    def do_POST(self) -> None:
        """Write a number down, and answer."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        known = self.path == "/status"
        if known:
            self.write(json.loads(body))
        self.send_response(200 if known else 404)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def write(self, number: dict[str, str | int | float]) -> None:
        """Append a row to the file."""
        with self.file.open("a", encoding="utf-8", newline="") as file:
            csv.writer(file).writerow([number[field] for field in FIELDS])

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing for each request."""


def main() -> None:
    """Serve one run after the other until the process is ended."""
    port, Handler.file = int(sys.argv[1]), Path(sys.argv[2])
    if not Handler.file.exists():
        Handler.file.write_text(",".join(FIELDS) + "\n", encoding="utf-8")
    with HTTPServer(("127.0.0.1", port), Handler) as server:
        print(f"listening on 127.0.0.1:{port}", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
