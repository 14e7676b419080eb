"""What has to hold in a run, and orders to engines whose effect is checked."""

import time


class Checks:
    """What has to hold. All failures are told at the end."""

    def __init__(self):
        self.failed = []

    def hold(self, condition, text):
        if not condition:
            self.failed.append(text)
            print(f"FAILS: {text}", flush=True)


def update(mesh, folder, version, checks):
    """Has the engines load weights, as slime does between two epochs."""
    began = time.monotonic()
    mesh.post("/pause_generation", {"mode": "retract"})
    mesh.post("/update_weights_from_disk", {"model_path": folder, "weight_version": str(version)})
    mesh.post("/continue_generation", {})
    seconds = time.monotonic() - began
    check_versions(mesh, version, checks)
    return seconds


def check_versions(mesh, version, checks):
    answer = mesh.post("/get_weight_version", None)
    versions = [worker["weight_version"] for worker in answer["workers"]]
    checks.hold(versions == [str(version)] * len(versions), f"all workers have version {version}: {versions}")
