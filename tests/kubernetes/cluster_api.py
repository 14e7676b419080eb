"""The API of a cluster for pods that run as processes: Leases and EndpointSlices, for accounts with the right."""

import json
import re
import ssl
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from rendered import NAMESPACE, named, of_kind

# Where a process looks for the files below.
ACCOUNT_FOLDER = "/var/run/secrets/kubernetes.io/serviceaccount"
VERBS = {"POST": "create", "PUT": "update"}


class ClusterApi:
    """Serves until it is closed. What the rendered roles do not allow is refused, and kept in `refused`."""

    def __init__(self, objects, authority, address):
        self.objects, self.authority = objects, authority
        self.refused, self.leases, self.lock = [], {}, threading.Lock()
        # The addresses behind Services that the chart does not render, by their names.
        self.endpoints = {}
        api = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one(self):
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                with api.lock:
                    status, answer = api.answer(self.command, self.path, self.headers["authorization"], body)
                text = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            do_GET = do_POST = do_PUT = handle_one

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer((address, 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert(address).configure_cert(context)
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        self.variables = {
            "KUBERNETES_SERVICE_HOST": address,
            "KUBERNETES_SERVICE_PORT": str(self.server.server_address[1]),
        }
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()

    def files(self, account):
        """What a cluster mounts for a container that calls by this account."""
        root = self.authority.cert_pem.bytes().decode()
        return {"token": f"token of {account}", "ca.crt": root, "namespace": NAMESPACE}

    def may(self, account, verb, group, resource, namespace, name):
        for binding in of_kind(self.objects, "RoleBinding"):
            accounts = [subject["name"] for subject in binding["subjects"]]
            if binding["metadata"]["namespace"] != namespace or account not in accounts:
                continue
            for rule in named(self.objects, "Role", binding["roleRef"]["name"])["rules"]:
                if group in rule["apiGroups"] and resource in rule["resources"] and verb in rule["verbs"]:
                    if name in rule.get("resourceNames", [name]):
                        return True
        return False

    def answer(self, method, url, token, body):
        path, _, query = url.partition("?")
        group, namespace, resource, name = re.fullmatch(
            r"/apis/([a-z0-9.]+)/v1/namespaces/([^/]+)/([a-z]+)(?:/([^/]+))?", path
        ).groups()
        verb = VERBS.get(method, "get" if name else "list")
        account = token.removeprefix("Bearer token of ")
        # The name of what is created is in the body, where the rights do not look.
        if not self.may(account, verb, group, resource, namespace, name):
            self.refused.append((account, verb, path))
            return 403, {}
        if resource == "endpointslices":
            service = dict(urllib.parse.parse_qsl(query))["labelSelector"].removeprefix("kubernetes.io/service-name=")
            endpoints = [{"addresses": [ip]} for ip in self.endpoints[service]]
            return 200, {"items": [{"addressType": "IPv4", "endpoints": endpoints}]}
        if verb == "get":
            return (200, self.leases[name]) if name in self.leases else (404, {})
        lease = json.loads(body)
        name = lease["metadata"]["name"]
        old = self.leases.get(name, {"metadata": {}})["metadata"].get("resourceVersion")
        if lease["metadata"].get("resourceVersion") != old:
            return 409, {}
        lease["metadata"]["resourceVersion"] = str(int(old or 0) + 1)
        self.leases[name] = lease
        return 200, lease
