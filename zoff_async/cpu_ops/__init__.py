"""HOW the host computes: update rules, the kernels that run them, the landing of gradients, and the thread
pool.

    rule = ADAMW
    kernel = make_kernel("auto", rule)
    update = kernel.bind(master, (exp_avg, exp_avg_sq), grad, out)      # once a chunk
    scalars = rule.scalars(step=1, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)
    update.run(scalars)                                                 # every step, in any thread

numexpr and numba are imported by their own kernels only, when those are asked for.
"""

from zoff_async.cpu_ops.adam import ADAM, ADAMW
from zoff_async.cpu_ops.choose import KERNELS, make_kernel, make_landing
from zoff_async.cpu_ops.cpus import available_cpus, default_workers
from zoff_async.cpu_ops.kernel import BoundUpdate, Kernel
from zoff_async.cpu_ops.landing import BLOCK_NUMEL, Landing
from zoff_async.cpu_ops.pool import Pool, PoolStatistics
from zoff_async.cpu_ops.rule import Line, Program, Scalars, UpdateRule

__all__ = [
    "ADAM",
    "ADAMW",
    "BLOCK_NUMEL",
    "KERNELS",
    "BoundUpdate",
    "Kernel",
    "Landing",
    "Line",
    "Pool",
    "PoolStatistics",
    "Program",
    "Scalars",
    "UpdateRule",
    "available_cpus",
    "default_workers",
    "make_kernel",
    "make_landing",
]
