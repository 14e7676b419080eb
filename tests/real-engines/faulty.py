"""A proxy in front of an engine that injects faults into its answers."""

import http.client
import http.server
import threading

# The statuses that a client may get: 502 (the engine failed), 503 (it cannot be reached), 504 (a deadline passed).
FAULTS = {
    "down": (502, 503),
    "slow": (504,),
    "failing": (502,),
    "answering garbage": (502,),
    "streaming garbage": (502,),
    "breaking off": (502,),
}


class Proxy:
    """Forwards all requests, except for those to `path` while a fault is set."""

    def __init__(self, url, path):
        self.fault = None
        self.over = threading.Event()
        host, port = url.removeprefix("http://").split(":")
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def log_message(self, *_):
                pass

            def do_GET(self):
                self.pass_on(None)

            def do_POST(self):
                body = self.rfile.read(int(self.headers["content-length"]))
                if proxy.fault is None or self.path != path:
                    self.pass_on(body)
                else:
                    self.break_down(proxy.fault)

            def pass_on(self, body):
                connection = http.client.HTTPConnection(host, int(port))
                connection.request(self.command, self.path, body, {"content-type": "application/json"})
                answer = connection.getresponse()
                self.send_response(answer.status)
                self.send_header("content-type", answer.headers.get("content-type", "text/plain"))
                self.end_headers()
                try:
                    while piece := answer.read1():
                        self.wfile.write(piece)
                except OSError:
                    pass

            def head(self, status, kind):
                self.send_response(status)
                self.send_header("content-type", kind)
                self.end_headers()

            def break_down(self, fault):
                if fault == "slow":
                    proxy.over.wait(20)
                elif fault == "failing":
                    self.head(500, "application/json")
                    self.wfile.write(b'{"error": {"message": "planned failure", "code": 500}}')
                elif fault == "answering garbage":
                    self.head(200, "text/html")
                    self.wfile.write(b"<html>hello</html>")
                elif fault == "streaming garbage":
                    self.head(200, "text/event-stream")
                    self.wfile.write(b"data: {hello\n\n")
                elif fault == "breaking off":
                    self.head(200, "text/event-stream")
                    self.wfile.write(b'data: {"conte')
                # For "down" the connection closes without an answer.

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def stop(self):
        self.over.set()
        self.server.shutdown()
