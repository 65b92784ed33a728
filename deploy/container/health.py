"""A container's health check: exit code 0 if the server at PORT answers /health with 200, else 1. So the image needs no curl."""

import http.client
import os
import sys

connection = http.client.HTTPConnection("127.0.0.1", int(os.environ.get("PORT", "3000")), timeout=4)
try:
    connection.request("GET", "/health")
    answer = connection.getresponse()
except (OSError, http.client.HTTPException) as error:
    sys.exit(f"no answer: {error}")
if answer.status != 200:
    sys.exit(f"{answer.status}: {answer.read(300).decode(errors='replace')}")
