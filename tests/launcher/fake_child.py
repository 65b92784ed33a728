"""A fake router or shard for tests of the launcher: `fake_child.py NAME PORT BEHAVIOUR...`. It imports nothing of penstock.

Behaviours: `serves` answers /health on PORT, with `left` 404 for rank group 1; `drains` takes 0.3 s to end after SIGTERM;
`stubborn` ignores SIGTERM; `fails CODE` writes log lines and exits with CODE; `records FOLDER CONFIGURATION` writes its arguments,
environment and configuration to FOLDER. Any other word, such as `runs`, has no effect: the process runs until it is told to stop.
"""

import http.server
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

name, port, *behaviour = sys.argv[1:]


def say(text: str) -> None:
    os.write(1, f"{name} {text}\n".encode())  # a single write, or lines of several processes would mix


class HealthHandler(http.server.BaseHTTPRequestHandler):
    """Answers the first five polls with 503 and a loading stage, later ones with 200."""

    polls = 0

    def do_GET(self) -> None:
        if self.path == "/health/ready?group=1" and "left" in behaviour:
            self.send_response(404)
            self.end_headers()
            return
        HealthHandler.polls += 1
        loading = HealthHandler.polls < 6
        self.send_response(503 if loading else 200)
        self.end_headers()
        if loading:
            self.wfile.write(json.dumps({"stage": f"loading weights {10 * HealthHandler.polls} %"}).encode())

    def log_message(self, format: str, *arguments: object) -> None:
        """Writes no access log."""


def terminate(number: int, frame: object) -> None:
    say("was asked to stop")
    if "stubborn" not in behaviour:
        time.sleep(0.3 if "drains" in behaviour else 0)
        say("stops")
        os._exit(0)


signal.signal(signal.SIGTERM, terminate)
say(f"has pid {os.getpid()}")
if "records" in behaviour:
    folder, configuration = behaviour[-2:]
    text = Path(configuration[1:]).read_text() if configuration.startswith("@") else configuration
    Path(folder, f"{name}{os.getpid()}").write_text(json.dumps([sys.argv, dict(os.environ), text]))
if "fails" in behaviour:
    print("2026-11-21T00:00:00Z ERROR shard 1: in its log", flush=True)
    print("Traceback of a fault\nValueError: what went wrong", file=sys.stderr, flush=True)
    sys.exit(int(behaviour[behaviour.index("fails") + 1]))
if "serves" in behaviour:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", int(port)), HealthHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
while True:
    time.sleep(60)
