"""Values with certificates and credentials, and what others than the chart bring for them: Secrets of cert-manager and
of an operator."""

import base64
import re
import subprocess

import trustme

from rendered import NAMESPACE, PROGRAM, ROOT, of_kind

# The host that clients call.
API_HOST = "llm.example.com"

VALUES = {
    "tls": {
        "api": {"dnsNames": [API_HOST], "issuer": {"name": "public", "kind": "ClusterIssuer"}},
        "operations": {"issuer": {"name": "inside"}},
        "mesh": {"enabled": True, "issuer": {"name": "inside"}},
    },
    "credentials": {
        "existingSecret": "refrain-credentials",
        "issuerPublicKeys": ["ab" * 32],
        "forOperators": True,
    },
    # Engines that take KV blocks from each other.
    "config": {"engine": {"kv_pool": {"memory_bytes_max": 67108864, "fetch_tokens_min": 32}}},
    "metrics": {"podMonitor": {"enabled": True}},
}

# A gateway for a trainer, and the pods that may call it.
TRAINER_PODS = {"podSelector": {"matchLabels": {"app": "trainer"}}}
TRAINER = {
    "trainer": {"enabled": True},
    "config": {"gateway": {"trainer": {"tenant": "default"}}},
    "networkPolicies": {"trainers": [TRAINER_PODS]},
}


def secret(name, files):
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "data": {key: base64.b64encode(text).decode() for key, text in files.items()},
    }


def certificate_secrets(objects, authority):
    """The Secrets that cert-manager makes of the Certificates among the objects."""
    made = []
    for wanted in of_kind(objects, "Certificate"):
        leaf = authority.issue_cert(*wanted["spec"]["dnsNames"])
        chain = b"".join(blob.bytes() for blob in leaf.cert_chain_pems)
        files = {"tls.crt": chain, "tls.key": leaf.private_key_pem.bytes(), "ca.crt": authority.cert_pem.bytes()}
        made.append(secret(wanted["spec"]["secretName"], files))
    return made


def credentials(folder):
    """Runs the commands of docs/kubernetes.md. Answers the issuer's public keys, and the Secret."""
    text = (ROOT / "docs" / "kubernetes.md").read_text()
    [script] = [block for block in re.findall(r"```sh\n(.*?)```", text, re.S) if "refrain mesh issuer" in block]
    tools = folder / "tools"
    tools.mkdir()
    (tools / "refrain").symlink_to(PROGRAM)
    # The Secret is made of the folder that this command names.
    (tools / "kubectl").write_text('#!/bin/sh\nfor word; do case $word in --from-file=*) echo "$word";; esac; done\n')
    (tools / "kubectl").chmod(0o755)
    said = subprocess.run(
        ["sh", "-euc", script],
        cwd=folder,
        env={"PATH": f"{tools}:/usr/bin:/bin"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    keys = re.findall(r'issuer_public_keys = \["([0-9a-f]{64})"\]', said)
    [named] = re.findall(r"--from-file=(\S+)", said)
    files = {path.name: path.read_bytes() for path in (folder / named).iterdir()}
    return keys, secret(VALUES["credentials"]["existingSecret"], files)


def authority():
    return trustme.CA(organization_name="tests of the chart")
