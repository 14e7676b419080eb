"""A proxy between a program and Refrain that records requests and changes nothing."""

import json
import select
import socket
import threading
import time
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Call:
    """A request of a program, and the answer."""

    def __init__(self, method, path, heads, body):
        self.method, self.path, self.heads, self.body = method, path, heads, body
        self.begun_at, self.ended_at = time.monotonic(), None
        self.status, self.answer = None, b""

    def json(self):
        body = self.body
        if self.heads.get("content-encoding") in ("gzip", "deflate"):
            body = zlib.decompress(body, 47)
        try:
            return json.loads(body) if body else None
        except ValueError:
            return None


class Recorder:
    """Listens at a port of its own, and passes all on to `upstream`, a port of this machine."""

    def __init__(self, upstream):
        self.upstream = upstream
        self.calls = []

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 64

            def handle_error(self, request, client_address):
                pass

        self.server = Server(("127.0.0.1", 0), type("Bound", (Handler,), {"recorder": self}))
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    recorder = None

    def log_message(self, *_):
        pass

    def read_body(self):
        if self.headers.get("transfer-encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("content-length") or 0))
        pieces = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            pieces.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(pieces)

    def pass_on(self):
        if self.headers.get("expect", "").lower() == "100-continue":
            self.send_response_only(100)
            self.end_headers()
        body = self.read_body()
        call = Call(self.command, self.path, {name.lower(): value for name, value in self.headers.items()}, body)
        self.recorder.calls.append(call)
        self.close_connection = True
        heads = [f"{name}: {value}" for name, value in self.headers.items() if name.lower() not in (
            "connection", "content-length", "transfer-encoding", "expect", "upgrade")]
        heads = [f"{self.command} {self.path} HTTP/1.1", *heads, f"content-length: {len(body)}", "connection: close"]
        with socket.create_connection(("127.0.0.1", self.recorder.upstream)) as upstream:
            upstream.sendall("\r\n".join([*heads, "", ""]).encode("latin-1") + body)
            try:
                self.pump(upstream, call)
            finally:
                call.ended_at = time.monotonic()

    def pump(self, upstream, call):
        """Passes the answer on until its end, or until the program leaves."""
        while True:
            readable, _, _ = select.select([upstream, self.connection], [], [])
            if self.connection in readable and not self.connection.recv(1 << 16):
                return
            if upstream in readable:
                piece = upstream.recv(1 << 16)
                if not piece:
                    return
                if call.status is None:
                    call.status = int(piece.split(b" ", 2)[1])
                if len(call.answer) < 1 << 20:
                    call.answer += piece
                self.connection.sendall(piece)

    do_GET = do_POST = do_HEAD = do_DELETE = do_PUT = do_PATCH = do_OPTIONS = pass_on
