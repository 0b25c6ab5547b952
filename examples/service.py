#!/usr/bin/env python3
"""Serve a model by HTTP, its layers compiled: `service.py examples/decoder.onnx artifacts --key public.pem`.

POST /run takes the inputs as .npz, by their names, and answers with the outputs as .npz. GET /health answers with the
layers that artifacts compute.
"""

from __future__ import annotations

import argparse
import io
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np

import tvm_deconv as td
from tvm_deconv.onnxruntime import Session

MAX_BYTES = 64 << 20  # of a request


class Service(ThreadingHTTPServer):
    """A server with one session; sessions and layers may be called by many threads at once."""

    def __init__(self, address: tuple[str, int], model: Path, artifacts: Path, key: Path | None = None) -> None:
        """Load everything before the first request: what is wrong ends the process now."""
        self.session = Session(model, td.load(artifacts, public_key=key))
        super().__init__(address, Handler)


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: Service

    def do_GET(self) -> None:
        """Answer with the layers of the artifacts, and with those that ONNX Runtime computes."""
        session = self.server.session
        content = {"compiled": list(session.layers), "left": session.left}
        self.answer(200, json.dumps(content).encode(), "application/json")

    def do_POST(self) -> None:
        """Run the model."""
        length = self.headers.get("Content-Length", "")
        size = int(length) if length.isdecimal() else 0
        if not 0 < size <= MAX_BYTES:
            self.answer(413, f"send 1 to {MAX_BYTES} bytes".encode())
            return
        try:
            with np.load(io.BytesIO(self.rfile.read(size)), allow_pickle=False) as arrays:
                outputs = self.server.session.run(None, dict(arrays))
        except Exception as error:  # of NumPy, zipfile and ONNX Runtime, which have no class in common
            self.answer(400, str(error).encode())
            return
        names = [output.name for output in self.server.session.get_outputs()]
        content = io.BytesIO()
        np.savez(content, **dict(zip(names, outputs, strict=True)))
        self.answer(200, content.getvalue(), "application/zip")

    def answer(self, status: int, content: bytes, kind: str = "text/plain; charset=utf-8") -> None:
        """Send an answer."""
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("artifacts", type=Path)
    parser.add_argument("--key", type=Path, help="public key: serve only what its owner signed")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    given = parser.parse_args()
    with Service((given.host, given.port), given.model, given.artifacts, given.key) as service:
        print(f"http://{given.host}:{service.server_port}/health", flush=True)
        service.serve_forever()


if __name__ == "__main__":
    main()
