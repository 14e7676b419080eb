"""Writes what no tool at hand makes: the licences, the chart as an OCI artefact, and the provenance.

deploy/release/run calls it with the name of a function below and that function's arguments.
"""

import hashlib
import json
import pathlib
import re
import subprocess
import sys

LICENCE = re.compile(r"(licen[cs]e|copying|notice|unlicense)([-._].*)?$", re.IGNORECASE)
# What tests and documents of a package bring is not in the program.
ASIDE = {"tests", "test", "testdata", "docs", "examples", "benches", "contrib", "licenses-tests"}


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def as_json(value: object) -> bytes:
    return json.dumps(value, indent=1, sort_keys=True).encode() + b"\n"


def licences(features: str, *targets: str) -> None:
    """Prints the licence texts of all packages that the program is made of, each text once."""
    users: dict[str, set[str]] = {}
    for target in targets:
        options = ["--format-version=1", "--locked", "--features", features, "--filter-platform", target]
        manifest = "services/refrain/Cargo.toml"
        found = subprocess.check_output(["cargo", "metadata", "--manifest-path", manifest, *options])
        metadata = json.loads(found)
        nodes = {node["id"]: node for node in metadata["resolve"]["nodes"]}
        packages = {package["id"]: package for package in metadata["packages"]}
        root = next(package["id"] for package in metadata["packages"] if package["name"] == "refrain")
        seen, waiting = {root}, [root]
        while waiting:
            for used in nodes[waiting.pop()]["deps"]:
                runs = any(kind["kind"] is None for kind in used["dep_kinds"])
                if runs and used["pkg"] not in seen:
                    seen.add(used["pkg"])
                    waiting.append(used["pkg"])
        for package in map(packages.get, seen):
            if package["source"]:
                name = f"{package['name']} {package['version']}"
                for text in texts(package):
                    users.setdefault(text, set()).add(name)
    print("Licences of what is compiled into Refrain. Its own is beside this file. Also inside are Rust's standard")
    print("library (MIT or Apache-2.0), and libc++, libunwind and compiler-rt of LLVM (Apache-2.0 with its exception).")
    for text, names in sorted(users.items(), key=lambda item: sorted(item[1])):
        print(f"\n{'=' * 80}\n{', '.join(sorted(names))}\n{'=' * 80}\n\n{text}")


def texts(package: dict) -> list[str]:
    """The texts of a package, also those of C code inside. Without any, what its manifest says."""
    folder = pathlib.Path(package["manifest_path"]).parent
    found = [
        path.read_text(errors="replace").strip()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and LICENCE.match(path.name) and path.suffix != ".rs"
        and not ASIDE & set(path.relative_to(folder).parts)
    ]
    authors = ", ".join(package["authors"]) or "its authors"
    return found or [f"{package['license']}, by {authors}. The package has no text: {package['repository']}"]


def chart(package: str, layout: str) -> None:
    """Writes a packaged chart as an OCI layout, as `helm push` would send it to a registry."""
    folder = pathlib.Path(layout)
    blobs = folder / "blobs" / "sha256"
    blobs.mkdir(parents=True)

    def blob(kind: str, data: bytes) -> dict:
        (blobs / digest(data)).write_bytes(data)
        return {"mediaType": kind, "digest": f"sha256:{digest(data)}", "size": len(data)}

    from helm_python.chart import Chart

    data = pathlib.Path(package).read_bytes()
    about = Chart.load_archive(data).metadata
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": blob("application/vnd.cncf.helm.config.v1+json", as_json(about)),
        "layers": [blob("application/vnd.cncf.helm.chart.content.v1.tar+gzip", data)],
    }
    entry = blob(manifest["mediaType"], as_json(manifest))
    entry["annotations"] = {"org.opencontainers.image.ref.name": about["version"]}
    (folder / "index.json").write_bytes(as_json({"schemaVersion": 2, "manifests": [entry]}))
    (folder / "oci-layout").write_bytes(as_json({"imageLayoutVersion": "1.0.0"}))


def provenance(folder: str, commit: str, profile: str, *used: str) -> None:
    """Prints a statement of in-toto about all files of the folder. Nobody has signed it."""
    files = sorted(path for path in pathlib.Path(folder).iterdir() if path.is_file())
    tools = [
        subprocess.check_output(command, text=True).splitlines()[0]
        for command in (["rustc", "--version"], ["cmake", "--version"], ["buildah", "--version"])
    ]
    statement = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": path.name, "digest": {"sha256": digest(path.read_bytes())}} for path in files],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": "deploy/release/run in the sources of this commit",
                "externalParameters": {"commit": commit, "profile": profile},
                "resolvedDependencies": [
                    {"uri": "git+refrain", "digest": {"gitCommit": commit}},
                    {"uri": "Cargo.lock", "digest": {"sha256": digest(pathlib.Path("Cargo.lock").read_bytes())}},
                    *({"name": name} for name in used),
                ],
            },
            "runDetails": {"builder": {"id": "a machine of the maintainers, without a signature", "version": {
                "tools": ", ".join(tools)
            }}},
        },
    }
    sys.stdout.buffer.write(as_json(statement))


if __name__ == "__main__":
    {function.__name__: function for function in (licences, chart, provenance)}[sys.argv[1]](*sys.argv[2:])
