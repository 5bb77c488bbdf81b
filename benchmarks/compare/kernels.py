"""The group `kernels`: kernels and whole pushes against loops that move the same bytes.

Each section is a file of benchmarks/kernels, where its bars are written down.
"""

from compare.programs import add_bars

TARGETS = ["bench_kernels"]


def _section(name, meaning):
    def run(context):
        add_bars(context, "benchmarks/kernels/bench_kernels", name)
    run.__doc__ = meaning
    return run


SECTIONS = {
    "quantise": _section("quantise", "Two-bit and one-bit codes of gradients, and back."),
    "resnet": _section("resnet", "Push and pull with the sizes of ResNet-50's parameters."),
    "sparse": _section("sparse", "Row-sparse pushes and row_sparse_pull."),
    "updates": _section("updates", "The updates of optimizers."),
}
