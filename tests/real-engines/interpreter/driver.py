import time

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

from refrain_interpreter.compiler import WITHOUT


class InterpreterDriver(DriverBase):
    @classmethod
    def is_active(cls):
        return True

    def map_python_to_cpp_type(self, name):
        raise RuntimeError(WITHOUT)

    def get_current_target(self):
        return GPUTarget("cpu", 0, 1)

    def get_active_torch_device(self):
        return torch.device("cpu")

    def get_device_interface(self):
        return torch.cpu

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_benchmarker(self):
        def milliseconds(kernel, quantiles=None, **_):
            begun = time.perf_counter()
            kernel()
            took = (time.perf_counter() - begun) * 1e3
            return [took] * len(quantiles or [0])

        return milliseconds
