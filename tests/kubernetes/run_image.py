"""Runs the program of an image in the image's own root folder, which it cannot write, as the image's user.

The only argument is that folder. The script needs root and a mount namespace of its own. `image` starts it.
"""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request

USER = 10001
PROGRAM = "/usr/local/bin/refrain"
HOME = "/var/lib/refrain"
DATA = f"{HOME}/refrain-data"
PORT = 18080
URL = f"http://127.0.0.1:{PORT}"


def mount(*arguments):
    subprocess.run(["mount", *arguments], check=True)


def main(root):
    # What runs containers gives them this file.
    pathlib.Path(f"{root}/etc/hosts").write_text("127.0.0.1 mesh.example\n")
    mount("--bind", root, root)
    mount("-o", "remount,ro,bind", root)
    mount("-t", "tmpfs", "-o", f"mode=750,uid={USER},gid={USER}", "none", f"{root}{HOME}")

    def enter():
        os.chroot(root)
        os.chdir(HOME)
        os.setgroups([])
        os.setgid(USER)
        os.setuid(USER)

    def start(*arguments, **options):
        variables = {"PATH": "/usr/local/bin"}
        return subprocess.Popen([PROGRAM, *arguments], env=variables, preexec_fn=enter, text=True, **options)

    def finished(*arguments):
        """Status and output of a command that ends by itself."""
        process = start(*arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        said, _ = process.communicate(timeout=60)
        return process.returncode, said

    log = pathlib.Path(f"{root}{HOME}/said").open("w")
    # As the image without arguments does, on another port.
    mesh = start("up", "--listen", f"0.0.0.0:{PORT}", "--make-key", stdout=log, stderr=log)
    try:
        until = time.monotonic() + 60
        while finished("health", "--url", URL)[0] != 0:
            assert mesh.poll() is None and time.monotonic() < until, pathlib.Path(log.name).read_text()
            time.sleep(0.2)
        # By a name, which the image looks up by itself.
        status, said = finished("health", "--url", URL.replace("127.0.0.1", "mesh.example"))
        assert status == 0, said
        # The check of the image asks the default address, where nobody listens here.
        status, said = finished("health", "--timeout-ms", "500")
        assert status == 1 or said == "ready\n", said

        def complete(key):
            request = urllib.request.Request(
                f"{URL}/v1/completions",
                json.dumps({"model": "refrain-tiny", "prompt": "SELECT", "max_tokens": 8}).encode(),
                {"authorization": f"Bearer {key}", "content-type": "application/json"},
            )
            with opener.open(request, timeout=60) as response:
                return json.load(response)["usage"]["completion_tokens"]

        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        key = pathlib.Path(f"{root}{DATA}/api-key").read_text().strip()
        assert complete(key) == 8
        assert key not in pathlib.Path(log.name).read_text(), "the key is in the log"
        for key, path in [("refrain-dev", "v1/models"), ("", "metrics")]:
            try:
                opener.open(urllib.request.Request(f"{URL}/{path}", headers={"authorization": f"Bearer {key}"}))
                raise AssertionError(f"{path} is open")
            except urllib.error.HTTPError as error:
                assert error.code in (401, 404), error

        # Commands in the container find the mesh there, as `docker exec` runs them.
        status, said = finished("tenants", "add", "acme")
        assert status == 0, said
        status, said = finished("tenants", "list")
        assert status == 0 and "acme" in said, said
        for words in [("store", "stats"), ("usage",)]:
            status, said = finished(*words)
            assert status == 0, said

        state = dict(
            line.split(":", 1) for line in pathlib.Path(f"/proc/{mesh.pid}/status").read_text().splitlines()
        )
        assert state["Uid"].split() == [str(USER)] * 4 and state["Gid"].split() == [str(USER)] * 4
        assert not state["Groups"].split() and int(state["CapEff"], 16) == 0

        # Elsewhere it cannot write, so it does not start there, and says where it wanted to.
        status, said = finished("up", "--listen", "127.0.0.1:0", "--data-dir", "/usr/local/data")
        assert status != 0 and "/usr/local/data" in said, said

        mesh.send_signal(signal.SIGTERM)
        assert mesh.wait(60) == 0, pathlib.Path(log.name).read_text()
    finally:
        mesh.kill()
        mesh.wait()
    print("it answered, was healthy, could not write to its root, and ended with status 0")


if __name__ == "__main__":
    main(sys.argv[1])
