"""numexpr's kernel: numpy's bits, as few operations as there can be, and nothing that grows with the steps."""

from __future__ import annotations

import numexpr
import pytest
import torch

from tests.cpu_ops.reference import HYPER, check_kernel, scalars_of
from zoff_async.cpu_ops import ADAM, ADAMW, make_kernel
from zoff_async.cpu_ops import numexpr_machine as machine

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BLOCK = machine.BLOCK_NUMEL


@pytest.mark.parametrize("flush", [True, False])
@pytest.mark.parametrize("grad", DTYPES)
@pytest.mark.parametrize("out", [None, *DTYPES])
def test_one_update_has_numpys_bits_in_every_dtype(grad, out, flush):
    """With NaN, inf, zeros of both signs and subnormals, in a thread that flushes those and in one that does not."""
    kernel = make_kernel("numexpr", ADAMW)

    check_kernel(kernel, ADAMW.scalars(**HYPER, factor=0.7), 5000, grad=grad, out=out, flush=flush)


@pytest.mark.parametrize("numel", [1, 2, 1023, 1024, 1025, 2047, 2048, BLOCK, BLOCK + 1, 2 * BLOCK - 1])
def test_one_update_has_numpys_bits_for_every_size(numel):
    check_kernel(make_kernel("numexpr", ADAMW), ADAMW.scalars(**HYPER), numel, offset=3)


@pytest.mark.parametrize("rule", [ADAMW, ADAM], ids=lambda rule: rule.name)
@pytest.mark.parametrize("factor", [1.0, 0.25, 0.3])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_operations_are_left_out_only_where_no_bit_changes(rule, factor, weight_decay):
    """The reference leaves nothing out."""
    scalars = rule.scalars(**{**HYPER, "weight_decay": weight_decay}, factor=factor)

    check_kernel(make_kernel("numexpr", rule), scalars, 3000, grad=torch.float32)
    check_kernel(make_kernel("numexpr", rule), scalars, 3000, grad=torch.float16)


@pytest.mark.parametrize(
    ("rule", "program"),
    [(rule, program) for rule in (ADAMW, ADAM) for program in rule.programs],
    ids=lambda x: getattr(x, "name", x),
)
def test_every_program_of_a_rule_has_numpys_bits(rule, program):
    scalars = scalars_of(rule, program)

    assert scalars.program == program
    check_kernel(make_kernel("numexpr", rule), scalars, 3000)


@pytest.mark.parametrize("numel", [1, 1000, BLOCK + 1])
def test_a_second_buffer_takes_the_new_state_and_the_old_stays(numel):
    check_kernel(make_kernel("numexpr", ADAMW), ADAMW.scalars(**HYPER), numel, in_place=False)


@pytest.mark.parametrize(
    ("rule", "weight_decay", "factor", "operations"),
    [(ADAMW, 0.1, 1.0, 13), (ADAMW, 0.0, 1.0, 12), (ADAMW, 0.1, 0.5, 14), (ADAM, 0.0, 1.0, 12), (ADAM, 0.1, 1.0, 14)],
)
def test_the_number_of_operations_an_element_is_minimal(rule, weight_decay, factor, operations):
    kernel = make_kernel("numexpr", rule)
    plan = kernel.plan(rule.scalars(**{**HYPER, "weight_decay": weight_decay}, factor=factor))
    counted = 0
    for _, compiled in plan.steps:
        counted += len(numexpr.disassemble(getattr(compiled.run, "func", compiled.run)))
        counted += compiled.root_of is not None  # one operation of numpy's

    assert counted == operations


def test_a_schedule_of_three_hundred_steps_compiles_each_expression_once(monkeypatch):
    """Numbers are arguments: a learning rate in the text would compile anew every step."""
    texts = []
    real = numexpr.NumExpr
    monkeypatch.setattr(numexpr, "NumExpr", lambda text, signature: texts.append(text) or real(text, signature))
    kernel = make_kernel("numexpr", ADAMW)
    tensors = [torch.ones(8) for _ in range(4)]
    update = kernel.bind(tensors[0], tensors[1:3], tensors[3], None)

    for step in range(1, 301):
        factor, decay = (1.0, 0.5)[step % 2], (0.0, 0.1)[step % 3 == 0]
        update.run(
            ADAMW.scalars(step=step, lr=1e-3 / step, betas=(0.9, 0.999), eps=1e-8, weight_decay=decay, factor=factor)
        )

    assert sorted(texts) == [
        "g*f",
        "m + (g - m)*c1",
        "p - m*s/(root + e)",
        "p*d - m*s/(root + e)",
        "v*b2 + g*g*c2",
    ]


def test_scratch_does_not_grow_with_the_number_of_lengths():
    kernel = make_kernel("numexpr", ADAMW)
    for numel in range(1, 200):
        scratch = kernel.scratch(numel)
        assert scratch.grad.size == scratch.grad_tensor.numel() == scratch.root.size == numel

    assert len(kernel._local.scratch) <= 66
    assert kernel.scratch(5).grad_tensor.data_ptr() == kernel.scratch(7).grad_tensor.data_ptr()


def test_names_in_the_callers_frame_mean_nothing():
    m = v = g = p = c1 = None  # numexpr.evaluate would find these
    kernel = make_kernel("numexpr", ADAMW)
    tensors = [torch.ones(8) for _ in range(4)]
    kernel.bind(tensors[0], tensors[1:3], tensors[3], None).run(ADAMW.scalars(**HYPER))

    assert tensors[0].isfinite().all()
    assert (m, v, g, p, c1) == (None,) * 5
