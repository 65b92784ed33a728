"""A container's health check: exit code 0 if the server at PORT answers /health with 200, else 1. So the image needs no curl."""

import http.client
import os
import sys

port = os.environ.get("PORT") or os.environ.get("AIP_HTTP_PORT") or "3000"  # as the server reads them
connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=4)
try:
    connection.request("GET", "/health")
    answer = connection.getresponse()
except (OSError, http.client.HTTPException) as error:
    sys.exit(f"no answer: {error}")
if answer.status != 200:
    sys.exit(f"{answer.status}: {answer.read(300).decode(errors='replace')}")
