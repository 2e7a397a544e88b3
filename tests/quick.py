"""Programs that are quick to compile: the same numbers from slower code."""

from jaxspec.runner import Runner


class Lowered:
    """A lowered program that is compiled without optimisation."""

    def __init__(self, lowered):
        self.lowered = lowered

    def compile(self):
        return self.lowered.compile(compiler_options={"xla_backend_optimization_level": 0})


def unoptimised(patch):
    """Engines compile their programs without optimisation while the patch (a pytest.MonkeyPatch) lasts."""
    lower = Runner._lower
    patch.setattr(Runner, "_lower", lambda *args: Lowered(lower(*args)))
