"""Runs rendered pods as processes on this machine, so that the objects themselves are tested and not a copy of them.

What a cluster does with a pod happens here as well: its files, variables and ports, its containers in order, its
probes, the addresses behind a Service, and the way to its end. Each pod and each Service has a loopback address of
its own. A process has no network and no root folder of its own, so addresses, names and paths are replaced in its
files, variables and arguments. Certificates name hosts, so a cluster may keep the names: then each process sees a file
/etc/hosts that follows the pods, in a mount namespace of its own.
"""

import asyncio
import itertools
import os
import pathlib
import random
import re
import signal
import ssl
import subprocess
import time

from cluster_api import ACCOUNT_FOLDER
from rendered import NAMESPACE, PROGRAM, container_port, entries, of_kind, selects, workloads

# How long a cluster takes to tell its nodes that a pod is about to end. Until then requests still go there.
ENDPOINTS_LAG_S = 1.0
# No wait takes that long on the busiest machine.
HANG_S = 300
# How many times longer than on a node a probe may take: all pods, clients and Services share one machine here.
PROBE_PATIENCE = 6
# The program in the image.
IN_IMAGE = "/usr/local/bin/refrain"
# A mount namespace, for those who may not make one without a user namespace as well.
NAMESPACES = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]


def with_hosts(hosts, command):
    """A command that sees a file as /etc/hosts."""
    return [*NAMESPACES, "sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"', str(hosts), *command]


def with_account(folder, command):
    """A command that finds the files of an account where a cluster mounts them."""
    there = f'mount -t tmpfs none /var/run && mkdir -p {ACCOUNT_FOLDER} && mount --bind "$0" {ACCOUNT_FOLDER}'
    return [*NAMESPACES, "sh", "-c", f'{there} && exec "$@"', str(folder), *command]


def has_namespaces():
    return subprocess.run(with_hosts("/etc/hosts", ["true"]), capture_output=True).returncode == 0


def expanded(text, variables):
    """A text with the variables that it names, as a node does it for arguments and for further variables."""
    return re.sub(r"\$\((\w+)\)", lambda found: variables.get(found[1], found[0]), text)


class Container:
    """A process of a pod."""

    def __init__(self, pod, spec):
        self.pod, self.spec, self.process = pod, spec, None

    @property
    def name(self):
        return f"{self.pod.name}/{self.spec['name']}"

    @property
    def stays(self):
        """Whether it runs beside the main container, though it starts first."""
        return self.spec.get("restartPolicy") == "Always"

    async def start(self):
        pod = self.pod
        mounts = {mount["mountPath"]: pod.volume(mount["name"]) for mount in self.spec.get("volumeMounts", [])}
        for path in mounts.values():
            pod.cluster.rewrite(path, pod, mounts)
        variables = dict(pod.cluster.api.variables) if pod.cluster.api else {}
        for entry in self.spec.get("env", []):
            variables[entry["name"]] = expanded(pod.value(entry), variables)
        self.mounts = mounts
        self.variables = {name: pod.cluster.local(value, pod, mounts) for name, value in variables.items()}
        # The image begins with the program.
        command = [*self.spec.get("command", [IN_IMAGE]), *self.spec.get("args", [])]
        command = [expanded(word, variables) for word in command]
        with open(pod.cluster.folder / f"{pod.name}.log", "ab") as log:
            self.process = await self.execute(command, stdout=log, stderr=log)

    async def execute(self, command, **streams):
        """Starts a process with the files and variables of the container."""
        cluster = self.pod.cluster
        local = [PROGRAM if word == IN_IMAGE else cluster.local(word, self.pod, self.mounts) for word in command]
        if ACCOUNT_FOLDER in self.mounts:
            local = with_account(self.mounts[ACCOUNT_FOLDER], local)
        if cluster.hosts:
            local = with_hosts(cluster.hosts, local)
            streams["env"] = {"PATH": os.environ["PATH"], **self.variables}
        else:
            streams["env"] = self.variables
        return await asyncio.create_subprocess_exec(*local, stdin=asyncio.subprocess.DEVNULL, **streams)

    async def answers(self, probe):
        """Asks as a probe says. Answers "" if all is well, and otherwise the reason."""
        timeout = PROBE_PATIENCE * self.spec[probe].get("timeoutSeconds", 1)
        if "exec" in self.spec[probe]:
            return await self.succeeds(self.spec[probe]["exec"]["command"], timeout)
        asked = self.spec[probe]["httpGet"]
        port = container_port(self.spec, asked["port"])
        return await ask(self.pod.ip, port, asked["path"], timeout, asked.get("scheme") == "HTTPS")

    async def succeeds(self, command, timeout):
        """Runs a command in the container. Answers "" if it succeeds, and otherwise what it said."""
        process = await self.execute(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        try:
            async with asyncio.timeout(timeout):
                said, _ = await process.communicate()
            return "" if process.returncode == 0 else said.decode() or f"status {process.returncode}"
        except TimeoutError:
            process.kill()
            await process.wait()
            return f"no end after {timeout} s"

    async def started(self):
        """Waits as the startup probe says."""
        probe = self.spec["startupProbe"]
        for _ in range(probe["failureThreshold"]):
            assert self.process.returncode is None, f"{self.name} has ended: {self.pod.log()}"
            if not await self.answers("startupProbe"):
                return
            await asyncio.sleep(probe["periodSeconds"])
        raise AssertionError(f"{self.name} has not started in time: {self.pod.log()}")

    async def completed(self):
        """Runs to its end, as a container that is none of those that stay."""
        await self.start()
        async with asyncio.timeout(HANG_S):
            status = await self.process.wait()
        assert status == 0, f"{self.name} ended with {status}: {self.pod.log()}"

    async def stop(self, until):
        """The signal to stop, and the end by force when the grace is over. Tells whether force was needed."""
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(max(until - time.monotonic(), 0.1)):
                await self.process.wait()
            return False
        except TimeoutError:
            self.process.kill()
            await self.process.wait()
            return True


class Pod:
    """A pod: its containers, and whether Services lead to it."""

    def __init__(self, cluster, workload, name, ip):
        self.cluster, self.workload, self.name, self.ip = cluster, workload, name, ip
        self.is_ready = self.is_ending = self.has_left = False
        self.init = [Container(self, spec) for spec in workload.pod.get("initContainers", [])]
        self.sidecars = [each for each in self.init if each.stays]
        self.main = Container(self, workload.main)
        self.folder = cluster.folder / name
        self.prober = None

    def log(self):
        return "".join((self.cluster.folder / f"{self.name}.log").read_text().splitlines(True)[-15:])

    def volume(self, name):
        """The folder of a volume, filled."""
        claims = self.workload.object["spec"].get("volumeClaimTemplates", [])
        if any(claim["metadata"]["name"] == name for claim in claims):
            folder = self.cluster.folder / "claims" / f"{name}-{self.name}"
            folder.mkdir(parents=True, exist_ok=True)
            return folder
        [volume] = [volume for volume in self.workload.pod["volumes"] if volume["name"] == name]
        folder = self.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        if "configMap" in volume:
            files = entries(self.cluster.objects, "ConfigMap", volume["configMap"]["name"])
        elif "secret" in volume:
            files = entries(self.cluster.objects, "Secret", volume["secret"]["secretName"])
            items = volume["secret"].get("items")
            if items:
                files = {item["path"]: files[item["key"]] for item in items}
        elif "projected" in volume:
            files = self.cluster.api.files(self.workload.pod["serviceAccountName"])
        else:
            assert "emptyDir" in volume, volume
            files = {}
        for file, text in files.items():
            (folder / file).write_text(text)
        return folder

    def value(self, entry):
        source = entry.get("valueFrom")
        if source is None:
            return entry["value"]
        if "fieldRef" in source:
            return {"status.podIP": self.ip, "metadata.name": self.name}[source["fieldRef"]["fieldPath"]]
        key = source["secretKeyRef"]
        return entries(self.cluster.objects, "Secret", key["name"])[key["key"]]

    async def start(self):
        for container in [*self.init, self.main]:
            if container is not self.main and not container.stays:
                await container.completed()
                continue
            await container.start()
            await container.started()
        self.prober = asyncio.create_task(self.probe())

    async def probe(self):
        """Asks as the probes say, until the pod ends. A failed liveness probe is a fault of the test."""
        misses = {"readinessProbe": 0, "livenessProbe": 0}
        next_at = dict.fromkeys(misses, 0.0)
        while True:
            for name, probe in ((name, self.workload.main[name]) for name in misses):
                if time.monotonic() < next_at[name]:
                    continue
                next_at[name] = time.monotonic() + probe["periodSeconds"]
                reason = await self.main.answers(name)
                misses[name] = misses[name] + 1 if reason else 0
                if name == "readinessProbe" and misses[name] == 0:
                    # A pod that ends does not come back, even while it answers.
                    self.is_ready = not self.has_left
                elif misses[name] >= probe["failureThreshold"] and not self.is_ending:
                    # A pod that is not ready gets no requests. Where that leaves none to answer, requests fail.
                    if name == "readinessProbe":
                        self.is_ready = False
                        continue
                    self.cluster.faults.append(f"{name} of {self.name} failed {misses[name]} times: {reason}")
            for container in [*self.sidecars, self.main]:
                if container.process.returncode is not None and not self.is_ending:
                    self.cluster.faults.append(f"{container.name} ended by itself: {self.log()}")
                    return
            await asyncio.sleep(0.2)

    async def ready(self):
        until = time.monotonic() + HANG_S
        while not self.is_ready:
            assert time.monotonic() < until, f"{self.name} does not become ready: {self.log()}"
            await asyncio.sleep(0.05)

    async def stop(self):
        """The end of a pod, as its node and its cluster carry it out at the same time."""
        until = time.monotonic() + self.workload.pod["terminationGracePeriodSeconds"]
        self.is_ending = True
        asyncio.get_running_loop().call_later(ENDPOINTS_LAG_S, self.leave_services)
        sleep = self.workload.main.get("lifecycle", {}).get("preStop", {}).get("sleep")
        if sleep:
            await asyncio.sleep(sleep["seconds"])
        was_forced = await self.main.stop(until)
        for container in reversed(self.sidecars):
            was_forced |= await container.stop(until)
        if was_forced:
            self.cluster.faults.append(f"{self.name} was killed after its grace: {self.log()}")
        if self.main.process.returncode != 0 and not was_forced:
            self.cluster.faults.append(f"{self.name} ended with {self.main.process.returncode}: {self.log()}")
        self.prober.cancel()
        self.leave_services()

    def leave_services(self):
        self.is_ready, self.has_left = False, True


class Cluster:
    """All pods, and the Services in front of them."""

    def __init__(self, objects, folder, keeps_names=False):
        self.objects, self.folder = objects, pathlib.Path(folder)
        # A ClusterApi, if pods call one.
        self.api = None
        self.hosts = self.folder / "hosts" if keeps_names else None
        self.pods, self.faults, self.listeners = [], [], []
        self.numbers = itertools.count(1)
        # Another run on this machine most likely has other addresses.
        self.network = f"127.{random.randrange(16, 250)}.{random.randrange(250)}"
        self.service_ips = {
            service["metadata"]["name"]: self.address()
            for service in of_kind(objects, "Service")
            if service["spec"].get("clusterIP") != "None"
        }
        # Pods of a StatefulSet keep their names, so they have fixed addresses here.
        self.stateful_ips = {
            f"{workload.name}-{number}": self.address()
            for workload in workloads(objects)
            if workload.kind == "StatefulSet"
            for number in range(workload.object["spec"]["replicas"])
        }

    def write_hosts(self):
        """Writes the names that a cluster's DNS has: those of Services, and of pods behind one without address."""
        if not self.hosts:
            return
        names = [(ip, name) for name, ip in self.service_ips.items()]
        for workload in workloads(self.objects):
            if workload.kind == "StatefulSet":
                service = workload.object["spec"]["serviceName"]
                for pod, ip in self.stateful_ips.items():
                    if pod.rpartition("-")[0] == workload.name:
                        names.append((ip, f"{pod}.{service}"))
        for service in of_kind(self.objects, "Service"):
            if service["spec"].get("clusterIP") == "None":
                pods = [pod for pod in self.pods if selects(service["spec"]["selector"], pod.workload.labels)]
                names.extend((pod.ip, service["metadata"]["name"]) for pod in pods if not pod.has_left)
        self.hosts.write_text("".join(f"{ip} {name} {name}.{NAMESPACE}.svc\n" for ip, name in names))

    def address(self):
        return f"{self.network}.{next(self.numbers)}"

    def local(self, text, pod, mounts):
        """A text in which paths, names and addresses of the pod are those of this machine."""
        for path in sorted(mounts, key=len, reverse=True):
            text = text.replace(path, str(mounts[path]))
        for name, ip in {} if self.hosts else {**self.stateful_ips, **self.service_ips}.items():
            text = re.sub(rf"//{re.escape(name)}(\.[a-z0-9-]+(\.{NAMESPACE}\.svc)?)?:", f"//{ip}:", text)
        return re.sub(r"\b(0\.0\.0\.0|127\.0\.0\.1):", f"{pod.ip}:", text)

    def rewrite(self, folder, pod, mounts):
        for file in folder.glob("*.json"):
            file.write_text(self.local(file.read_text(), pod, mounts))

    async def start(self):
        self.folder.mkdir(parents=True, exist_ok=True)
        self.write_hosts()
        for service in of_kind(self.objects, "Service"):
            ip = self.service_ips.get(service["metadata"]["name"])
            for port in service["spec"]["ports"] if ip else []:
                await self.serve(service, ip, port)
        # All at once, as after an installation.
        await asyncio.gather(*(self.scale_up(workload) for workload in workloads(self.objects)))

    async def scale_up(self, workload):
        started = [self.new_pod(workload, number) for number in range(workload.object["spec"]["replicas"])]
        await asyncio.gather(*(self.run(pod) for pod in started))

    def new_pod(self, workload, number):
        stateful = f"{workload.name}-{number}"
        if workload.kind == "StatefulSet":
            return Pod(self, workload, stateful, self.stateful_ips[stateful])
        ip = self.address()
        return Pod(self, workload, f"{workload.name}-{ip.rsplit('.', 1)[1]}", ip)

    async def run(self, pod):
        self.pods.append(pod)
        self.write_hosts()
        await pod.start()
        await pod.ready()

    async def complete(self, workload):
        """Runs a pod whose containers end one after the other. Answers what they said."""
        pod = Pod(self, workload, workload.name, self.address())
        for container in [*pod.init, pod.main]:
            await container.completed()
        return pod.log()

    async def end(self, pod):
        await pod.stop()
        self.pods.remove(pod)
        self.write_hosts()

    async def serve(self, service, ip, port):
        """Listens on the address of a Service, and passes each connection on to one of its ready pods."""

        def ready_pods():
            selector = service["spec"]["selector"]
            return [pod for pod in self.pods if pod.is_ready and selects(selector, pod.workload.labels)]

        async def accept(reader, writer):
            pods = ready_pods()
            if not pods:
                # Without pods a Service refuses connections.
                writer.transport.abort()
                return
            pod = random.choice(pods)
            try:
                to = await asyncio.open_connection(pod.ip, container_port(pod.workload.main, port["targetPort"]))
            except OSError:
                writer.transport.abort()
                return
            await asyncio.gather(copy(reader, to[1]), copy(to[0], writer))

        self.listeners.append(await asyncio.start_server(accept, ip, port["port"]))

    async def roll(self, name):
        """Replaces the pods of a workload as its strategy says."""
        [workload] = [workload for workload in workloads(self.objects) if workload.name == name]
        old = [pod for pod in self.pods if pod.workload.name == name]
        spec = workload.object["spec"]
        if workload.kind == "StatefulSet":
            for number in reversed(range(len(old))):
                await self.end(old[number])
                await self.run(self.new_pod(workload, number))
        elif spec["strategy"]["type"] == "Recreate":
            await asyncio.gather(*(self.end(pod) for pod in old))
            await self.scale_up(workload)
        else:
            bounds = spec["strategy"]["rollingUpdate"]
            step = max(bounds["maxSurge"], bounds["maxUnavailable"])
            for begin in range(0, len(old), step):
                going = old[begin : begin + step]
                new = [self.new_pod(workload, None) for _ in going]
                if bounds["maxSurge"]:
                    await asyncio.gather(*(self.run(pod) for pod in new))
                    await asyncio.gather(*(self.end(pod) for pod in going))
                else:
                    await asyncio.gather(*(self.end(pod) for pod in going))
                    await asyncio.gather(*(self.run(pod) for pod in new))

    async def stop(self):
        """Stops everything without grace. The test is over."""
        for listener in self.listeners:
            listener.close()
        for pod in self.pods:
            if pod.prober:
                pod.prober.cancel()
            for container in [pod.main, *pod.sidecars]:
                if container.process and container.process.returncode is None:
                    container.process.kill()
                    await container.process.wait()


async def copy(reader, writer):
    try:
        while piece := await reader.read(1 << 16):
            writer.write(piece)
            await writer.drain()
    except OSError:
        writer.transport.abort()
    finally:
        writer.close()


def unverified():
    """TLS as the probes of a node have it: they do not look at certificates."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


async def ask(ip, port, path, timeout, has_tls=False):
    """Asks for a page. Answers "" for the status 200, and otherwise what there was instead."""
    writer = None
    try:
        async with asyncio.timeout(timeout):
            reader, writer = await asyncio.open_connection(ip, port, ssl=unverified() if has_tls else None)
            writer.write(f"GET {path} HTTP/1.1\r\nhost: {ip}\r\nconnection: close\r\n\r\n".encode())
            answer = (await reader.read()).decode()
            return "" if answer.startswith("HTTP/1.1 200") else answer or "nothing"
    except OSError as error:
        # Also where the time is over.
        return f"{type(error).__name__} {error}"
    finally:
        if writer:
            writer.close()
