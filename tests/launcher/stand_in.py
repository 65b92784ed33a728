"""Plays the router and the shards in the launcher's tests: `stand_in.py NAME PORT BEHAVIOUR...`. It imports nothing of ours."""

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
    os.write(1, f"{name} {text}\n".encode())  # at once, or lines of several processes mix


class Health(http.server.BaseHTTPRequestHandler):
    """503 with a stage for the first looks, then 200."""

    looks = 0

    def do_GET(self) -> None:
        Health.looks += 1
        loading = Health.looks < 6
        self.send_response(503 if loading else 200)
        self.end_headers()
        if loading:
            self.wfile.write(json.dumps({"stage": f"loading weights {10 * Health.looks} %"}).encode())

    def log_message(self, format: str, *arguments: object) -> None:
        """Silent."""


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
    server = http.server.ThreadingHTTPServer(("127.0.0.1", int(port)), Health)
    threading.Thread(target=server.serve_forever, daemon=True).start()
while True:
    time.sleep(60)
