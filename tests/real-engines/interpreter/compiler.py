from triton.backends.compiler import BaseBackend

WITHOUT = "no kernel is compiled here: set TRITON_INTERPRET=1"


class InterpreterBackend(BaseBackend):
    @staticmethod
    def supports_target(target):
        return target.backend == "cpu"

    def hash(self):
        return "interpreter"

    def parse_options(self, options):
        raise RuntimeError(WITHOUT)

    def add_stages(self, stages, options, *others):
        raise RuntimeError(WITHOUT)

    def load_dialects(self, context):
        pass

    def get_module_map(self):
        return {}
